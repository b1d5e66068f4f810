// Packed cache rows (docs/formats.md): reading pairs of elements, and the fp4 rows written by a threadgroup.
#pragma once

// One 256th of an e4m3 value: ds4_e4m3 with the exponent moved, so that it costs no multiplication.
KERNEL_INLINE float e4m3_256th(uint code) {
  uint mag = code & 0x7fu;
  float normal = as_type<float>((mag << 20) + (112u << 23));
  float small = small_uint(mag) * 7.62939453125e-6f;  // 2^-17
  return as_type<float>(as_type<uint>(mag < 8u ? small : normal) | ((code & 0x80u) << 24));
}

// The magnitudes 0 1 2 3 4 6 8 12 of twice an e2m1 value are the nibbles of one word.
KERNEL_INLINE float e2m1_twice(uint code) {
  float mag = small_uint((0xc8643210u >> ((code & 7u) * 4u)) & 15u);
  return as_type<float>(as_type<uint>(mag) | ((code & 8u) << 28));
}

// Codes and scale of elements i and i + 1 (i even) of a packed row, as they are read.
struct RawPair {
  uint codes, scale;
};

KERNEL_INLINE RawPair raw_window_pair(device const uchar* row, uint dim, uint i) {
  RawPair raw;
  raw.codes = uint(row[i]) | (uint(row[i + 1u]) << 8);
  raw.scale = row[dim + (i >> 5)];
  return raw;
}

KERNEL_INLINE RawPair raw_compressed_pair(device const uchar* row, uint dim, uint i) {
  RawPair raw;
  raw.codes = row[i >> 1];
  raw.scale = row[(dim >> 1) + (i >> 4)];
  return raw;
}

KERNEL_INLINE float2 window_values(RawPair raw) {
  float s = scale_256(raw.scale);
  return float2(e4m3_256th(raw.codes & 255u) * s, e4m3_256th(raw.codes >> 8) * s);
}

// Halving the codes is exact.
KERNEL_INLINE float2 compressed_values(RawPair raw) {
  float s = ds4_e4m3(raw.scale);
  return float2((0.5f * e2m1_twice(raw.codes & 15u)) * s, (0.5f * e2m1_twice(raw.codes >> 4)) * s);
}

// Elements i and i + 1 (i even) of a window row, and of a compressed row, of dim elements.
KERNEL_INLINE float2 window_pair(device const uchar* row, uint dim, uint i) { return window_values(raw_window_pair(row, dim, i)); }
KERNEL_INLINE float2 compressed_pair(device const uchar* row, uint dim, uint i) { return compressed_values(raw_compressed_pair(row, dim, i)); }

// Two neighbouring lanes hold the codes of one byte; the even one writes it.
KERNEL_INLINE void put_nibbles(device uchar* row, uint i, uint code) {
  uint next = simd_shuffle_xor(code, 1);
  if ((i & 1u) == 0u) row[i >> 1] = uchar(code | (next << 4));
}

// Compressed row: dim / 2 bytes of e2m1 pairs (low nibble first), then one e4m3 scale per 16. dim is a multiple of 32.
// x was written before the last barrier; all threads of the threadgroup call it.
KERNEL_INLINE void pack_compressed_row(threadgroup const float* x, uint dim, device uchar* row, uint tid, uint threads) {
  for (uint g = tid >> 5; g < dim >> 5; g += threads >> 5) {
    uint i = 32u * g + (tid & 31u);
    float m = fabs(x[i]);  // of 16 lanes
    m = ds4_max(m, simd_shuffle_xor(m, 1));
    m = ds4_max(m, simd_shuffle_xor(m, 2));
    m = ds4_max(m, simd_shuffle_xor(m, 4));
    m = ds4_max(m, simd_shuffle_xor(m, 8));
    float s = ds4_scale_q4_kv(m);
    put_nibbles(row, i, ds4_e2m1_code(ds4_min(ds4_max(x[i] / s, -6.0f), 6.0f)));
    if ((i & 15u) == 0u) row[(dim >> 1) + (i >> 4)] = ds4_e4m3_code(s);
  }
}

// Index row: dim / 2 bytes of e2m1 pairs, then one e8m0 scale per 32.
KERNEL_INLINE void pack_index_row(threadgroup const float* x, uint dim, device uchar* row, uint tid, uint threads) {
  for (uint g = tid >> 5; g < dim >> 5; g += threads >> 5) {
    uint i = 32u * g + (tid & 31u);
    float s = ds4_scale_q4_index(lanes_amax(x[i]));
    put_nibbles(row, i, ds4_e2m1_code(x[i] * (1.0f / s)));
    if ((i & 31u) == 0u) row[(dim >> 1) + g] = ds4_e8m0_code(s);
  }
}
