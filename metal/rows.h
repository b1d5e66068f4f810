// Row products in the canonical order (docs/numerics.md, R1), one simdgroup for a few rows of the matrix.
//
// A lane holds the accumulators 2 lane and 2 lane + 1: elements come in pairs, 64 to a turn of the simdgroup, so weights and
// activations are read by neighbouring lanes from neighbouring bytes. The tree over 64 is one addition in the lane, then
// five exchanges. One decoder for each row type; get(i), i even, gives elements i and i + 1; at(i) the last of an odd row.
#pragma once

#include "iq2_table.h"

constant constexpr uint kSegment = 2048;  // elements after which accumulators are folded into the totals

// All row types but MXFP4 keep what is read together at even (u16) or fourfold (u32) distances from an aligned row.
KERNEL_INLINE float2 load_pair(device const float* p) { return float2(p[0], p[1]); }
KERNEL_INLINE uint load_u16(device const uchar* p) { return *(device const ushort*)p; }
KERNEL_INLINE uint load_u32(device const uchar* p) { return *(device const uint*)p; }
KERNEL_INLINE float f16_value(uint bits) { return float(as_type<half>(ushort(bits))); }
KERNEL_INLINE float load_f16(device const uchar* p) { return f16_value(load_u16(p)); }

// Small integers as floats by way of the mantissa, exact: conversions are slow on GPUs.
KERNEL_INLINE float small_uint(uint v) { return as_type<float>(0x4b000000u | v) - 8388608.0f; }                   // below 2^23
KERNEL_INLINE float signed_byte(uint v) { return as_type<float>(0x4b000000u | ((v & 255u) ^ 128u)) - 8388736.0f; }  // its low byte

// Four turns of a simdgroup at once, elements 256 block + 64 t + 2 lane and the next one: fetch() reads what they are made of,
// values() makes them, so that other work can be put between the two. All that is read lies at fixed distances from one
// place a lane, so that the loads of a block are all on the way before the first is used.

#define ROW_WORDS 12  // what fetch() reads, at most

struct DecF32 {
  device const float* p;
  float2 get(uint i) const { return load_pair(p + i); }
  void fetch(uint block, uint lane, thread uint* raw) const {
    device const float* q = p + ulong(block) * 256u + 2u * lane;
    for (uint t = 0u; t < 4u; ++t) {
      raw[2u * t] = as_type<uint>(q[64u * t]);
      raw[2u * t + 1u] = as_type<uint>(q[64u * t + 1u]);
    }
  }
  void values(uint block, uint lane, thread const uint* raw, thread float2* out) const {
    for (uint t = 0u; t < 4u; ++t) out[t] = float2(as_type<float>(raw[2u * t]), as_type<float>(raw[2u * t + 1u]));
  }
  float at(uint i) const { return p[i]; }
};

struct DecF16 {
  device const half* p;
  float2 get(uint i) const { return float2(float(p[i]), float(p[i + 1u])); }
  void fetch(uint block, uint lane, thread uint* raw) const {
    device const ushort* q = (device const ushort*)p + ulong(block) * 256u + 2u * lane;
    for (uint t = 0u; t < 4u; ++t) {
      raw[2u * t] = q[64u * t];
      raw[2u * t + 1u] = q[64u * t + 1u];
    }
  }
  void values(uint block, uint lane, thread const uint* raw, thread float2* out) const {
    for (uint t = 0u; t < 4u; ++t) out[t] = float2(f16_value(raw[2u * t]), f16_value(raw[2u * t + 1u]));
  }
  float at(uint i) const { return float(p[i]); }
};

struct DecBf16 {
  device const ushort* p;
  float2 get(uint i) const { return float2(at(i), at(i + 1u)); }
  void fetch(uint block, uint lane, thread uint* raw) const {
    device const ushort* q = p + ulong(block) * 256u + 2u * lane;
    for (uint t = 0u; t < 4u; ++t) {
      raw[2u * t] = q[64u * t];
      raw[2u * t + 1u] = q[64u * t + 1u];
    }
  }
  void values(uint block, uint lane, thread const uint* raw, thread float2* out) const {
    for (uint t = 0u; t < 4u; ++t) out[t] = float2(as_type<float>(raw[2u * t] << 16), as_type<float>(raw[2u * t + 1u] << 16));
  }
  float at(uint i) const { return as_type<float>(uint(p[i]) << 16); }
};

// 256 * 2^(b - 127): the e4m3 value is taken as 1/256 of itself, so that no f32 subnormal can come up.
KERNEL_INLINE float scale_256(uint b) {
  uint e = b + 8u;
  return as_type<float>((e > 255u ? 255u : e) << 23);
}

KERNEL_INLINE float e4m3_scaled(uint code, float scale256) { return (ds4_e4m3(code) * 0.00390625f) * scale256; }

struct DecFp8 {
  device const uchar* p;
  device const uchar* scale;
  float2 get(uint i) const {
    float s = scale_256(scale[i >> 5]);
    return float2(e4m3_scaled(p[i], s), e4m3_scaled(p[i + 1u], s));
  }
  void fetch(uint block, uint lane, thread uint* raw) const {
    device const uchar* q = p + ulong(block) * 256u + 2u * lane;
    device const uchar* s = scale + ulong(block) * 8u + (lane >> 4);
    for (uint t = 0u; t < 4u; ++t) {
      raw[2u * t] = q[64u * t];
      raw[2u * t + 1u] = q[64u * t + 1u];
      raw[8u + t] = s[2u * t];
    }
  }
  void values(uint block, uint lane, thread const uint* raw, thread float2* out) const {
    for (uint t = 0u; t < 4u; ++t) {
      float s256 = scale_256(raw[8u + t]);
      out[t] = float2(e4m3_scaled(raw[2u * t], s256), e4m3_scaled(raw[2u * t + 1u], s256));
    }
  }
  float at(uint i) const { return e4m3_scaled(p[i], scale_256(scale[i >> 5])); }
};

KERNEL_INLINE float e2m1(uint code) {
  float m = 0.5f * small_uint((0xc8643210u >> ((code & 7u) * 4u)) & 15u);  // the nibbles are twice the magnitudes
  return as_type<float>(as_type<uint>(m) | ((code & 8u) << 28));
}

struct DecFp4Row {
  device const uchar* p;
  device const uchar* scale;
  float2 get(uint i) const {
    float s = ds4_e8m0(scale[i >> 5]);
    uint b = p[i >> 1];
    return float2(e2m1(b & 15u) * s, e2m1(b >> 4) * s);
  }
  void fetch(uint block, uint lane, thread uint* raw) const {
    device const uchar* q = p + ulong(block) * 128u + lane;
    device const uchar* s = scale + ulong(block) * 8u + (lane >> 4);
    for (uint t = 0u; t < 4u; ++t) {
      raw[t] = q[32u * t];
      raw[4u + t] = s[2u * t];
    }
  }
  void values(uint block, uint lane, thread const uint* raw, thread float2* out) const {
    for (uint t = 0u; t < 4u; ++t) {
      float e = ds4_e8m0(raw[4u + t]);
      out[t] = float2(e2m1(raw[t] & 15u) * e, e2m1(raw[t] >> 4) * e);
    }
  }
  float at(uint i) const { return 0.0f * float(i); }  // columns are a multiple of 32
};

struct DecMxfp4 {  // 17 bytes per 32: e8m0, then 16 low nibbles and 16 high nibbles
  device const uchar* p;
  float2 get(uint i) const {
    device const uchar* b = p + (i >> 5) * 17u;
    float s = ds4_e8m0(b[0]);
    device const uchar* q = b + 1u + (i & 15u);
    uint shift = (i & 16u) >> 2;
    return float2(e2m1((uint(q[0]) >> shift) & 15u) * s, e2m1((uint(q[1]) >> shift) & 15u) * s);
  }
  void fetch(uint block, uint lane, thread uint* raw) const {
    device const uchar* b = p + ulong(block) * 136u + (lane >> 4) * 17u;
    device const uchar* q = b + 1u + (2u * lane & 15u);
    for (uint t = 0u; t < 4u; ++t) {
      raw[8u + t] = b[34u * t];
      raw[2u * t] = q[34u * t];
      raw[2u * t + 1u] = q[34u * t + 1u];
    }
  }
  void values(uint block, uint lane, thread const uint* raw, thread float2* out) const {
    uint shift = (lane & 8u) >> 1;
    for (uint t = 0u; t < 4u; ++t) {
      float e = ds4_e8m0(raw[8u + t]);
      out[t] = float2(e2m1((raw[2u * t] >> shift) & 15u) * e, e2m1((raw[2u * t + 1u] >> shift) & 15u) * e);
    }
  }
  float at(uint i) const { return 0.0f * float(i); }
};

struct DecQ8_0 {  // 34 bytes per 32: f16 scale, 32 int8
  device const uchar* p;
  float2 get(uint i) const {
    device const uchar* b = p + (i >> 5) * 34u;
    float d = load_f16(b);
    uint v = load_u16(b + 2u + (i & 31u));
    return float2(d * signed_byte(v), d * signed_byte(v >> 8));
  }
  void fetch(uint block, uint lane, thread uint* raw) const {
    device const uchar* b = p + ulong(block) * 272u + (lane >> 4) * 34u;
    device const uchar* q = b + 2u + (2u * lane & 31u);
    for (uint t = 0u; t < 4u; ++t) {
      raw[4u + t] = load_u16(b + 68u * t);
      raw[t] = load_u16(q + 68u * t);
    }
  }
  void values(uint block, uint lane, thread const uint* raw, thread float2* out) const {
    for (uint t = 0u; t < 4u; ++t) {
      float d = f16_value(raw[4u + t]);
      out[t] = float2(d * signed_byte(raw[t]), d * signed_byte(raw[t] >> 8));
    }
  }
  float at(uint i) const { return 0.0f * float(i); }
};

struct DecQ4K {  // 144 bytes per 256: f16 d, f16 dmin, 8 six-bit (scale, min) in 12 bytes, 128 bytes of nibbles
  device const uchar* p;
  // Scales and mins of a block's eight groups: bytes of low and high; group j is byte j & 3 of sc[j >> 2] and mn[j >> 2].
  void unpack(uint low, uint mid, uint high, thread uint* sc, thread uint* mn) const {
    sc[0] = low & 0x3f3f3f3fu;
    mn[0] = mid & 0x3f3f3f3fu;
    sc[1] = (high & 0x0f0f0f0fu) | ((low >> 2) & 0x30303030u);
    mn[1] = ((high >> 4) & 0x0f0f0f0fu) | ((mid >> 2) & 0x30303030u);
  }
  float2 pair(uint both, uint sc, uint mn, uint q) const {
    float d = f16_value(both & 0xffffu) * small_uint(sc & 255u);
    float m = -(f16_value(both >> 16) * small_uint(mn & 255u));
    return float2(fma(d, small_uint(q & 15u), m), fma(d, small_uint((q >> 8) & 15u), m));
  }
  float2 get(uint i) const {
    device const uchar* b = p + (i >> 8) * 144u;
    uint j = (i >> 5) & 7u, shift = (j & 3u) * 8u, sc[2], mn[2];
    unpack(load_u32(b + 4u), load_u32(b + 8u), load_u32(b + 12u), sc, mn);
    uint q = load_u16(b + 16u + (j >> 1) * 32u + (i & 31u)) >> ((j & 1u) << 2);
    return j < 4u ? pair(load_u32(b), sc[0] >> shift, mn[0] >> shift, q) : pair(load_u32(b), sc[1] >> shift, mn[1] >> shift, q);
  }
  void fetch(uint block, uint lane, thread uint* raw) const {
    device const uchar* b = p + ulong(block) * 144u;
    device const uchar* codes = b + 16u + (2u * lane & 31u);
    uint4 head = *(device const uint4*)b;  // d and dmin, then the 12 bytes of scales
    raw[4] = head.x;
    raw[5] = head.y;
    raw[6] = head.z;
    raw[7] = head.w;
    for (uint t = 0u; t < 4u; ++t) raw[t] = load_u16(codes + 32u * t);
  }
  void values(uint block, uint lane, thread const uint* raw, thread float2* out) const {
    uint odd = lane >> 4, sc[2], mn[2];
    unpack(raw[5], raw[6], raw[7], sc, mn);
    for (uint t = 0u; t < 4u; ++t) {
      uint shift = ((t & 1u) * 2u + odd) * 8u;
      out[t] = pair(raw[4], sc[t >> 1] >> shift, mn[t >> 1] >> shift, raw[t] >> (odd << 2));
    }
  }
  float at(uint i) const { return 0.0f * float(i); }
};

struct DecQ2K {  // 84 bytes per 256: 16 (scale, min) nibble pairs, 64 bytes of 2-bit codes, f16 d, f16 dmin
  device const uchar* p;
  float2 get(uint i) const {
    device const uchar* b = p + (i >> 8) * 84u;
    uint e = i & 255u;
    uint sm = b[e >> 4];
    float d = load_f16(b + 80u) * float(sm & 15u);
    float m = -(load_f16(b + 82u) * float(sm >> 4));
    uint q = load_u16(b + 16u + (e >> 7) * 32u + (e & 31u)) >> (((e >> 5) & 3u) << 1);
    return float2(fma(d, float(q & 3u), m), fma(d, float((q >> 8) & 3u), m));
  }
  void fetch(uint block, uint lane, thread uint* raw) const {}
  void values(uint block, uint lane, thread const uint* raw, thread float2* out) const {
    for (uint t = 0u; t < 4u; ++t) out[t] = get(256u * block + 64u * t + 2u * lane);
  }
  float at(uint i) const { return 0.0f * float(i); }
};

CONSTANT_TABLE(ushort, kIq2Patterns, 256) = {DS4_IQ2_PATTERNS};

// 66 bytes per 256: f16 d, then for each 32 values four pattern numbers and a word of 4 x 7 sign bits and a 4-bit scale.
struct DecIq2Xxs {
  device const uchar* p;
  float2 get(uint i) const {
    device const uchar* b = p + (i >> 8) * 66u;
    device const uchar* q = b + 2u + ((i >> 5) & 7u) * 8u;
    uint word = load_u16(q + 4u) | (load_u16(q + 6u) << 16);
    float d = (load_f16(b) * (0.5f + float(word >> 28))) * 0.25f;
    uint l = (i & 31u) >> 3, j = i & 7u;
    uint signs = (word >> (7u * l)) & 127u;
    uint all = signs | ((popcount(signs) & 1u) << 7);
    uint pattern = kIq2Patterns[q[l]];
    return float2(value(d, pattern >> (2u * j), all >> j), value(d, pattern >> (2u * j + 2u), all >> (j + 1u)));
  }
  float value(float d, uint code, uint sign) const {
    uint c = code & 3u;
    float v = d * (c == 0u ? 8.0f : (c == 1u ? 25.0f : (c == 2u ? 43.0f : 0.0f)));
    return (sign & 1u) != 0u ? -v : v;
  }
  void fetch(uint block, uint lane, thread uint* raw) const {}
  void values(uint block, uint lane, thread const uint* raw, thread float2* out) const {
    for (uint t = 0u; t < 4u; ++t) out[t] = get(256u * block + 64u * t + 2u * lane);
  }
  float at(uint i) const { return 0.0f * float(i); }
};

// A matrix as the kernels see it: rows row_bytes apart, scales scale_row_bytes apart (a row of them per 32 rows for fp8_block).
struct RowSource {
  device const uchar* data;
  device const uchar* scale;
  ulong row_bytes;
  uint scale_row_bytes;
};

KERNEL_INLINE void open_row(thread DecF32& d, RowSource m, uint r) { d.p = (device const float*)(m.data + m.row_bytes * r); }
KERNEL_INLINE void open_row(thread DecF16& d, RowSource m, uint r) { d.p = (device const half*)(m.data + m.row_bytes * r); }
KERNEL_INLINE void open_row(thread DecBf16& d, RowSource m, uint r) { d.p = (device const ushort*)(m.data + m.row_bytes * r); }
KERNEL_INLINE void open_row(thread DecFp4Row& d, RowSource m, uint r) {
  d.p = m.data + m.row_bytes * r;
  d.scale = m.scale + ulong(m.scale_row_bytes) * r;
}
KERNEL_INLINE void open_row(thread DecMxfp4& d, RowSource m, uint r) { d.p = m.data + m.row_bytes * r; }
KERNEL_INLINE void open_row(thread DecQ8_0& d, RowSource m, uint r) { d.p = m.data + m.row_bytes * r; }
KERNEL_INLINE void open_row(thread DecQ4K& d, RowSource m, uint r) { d.p = m.data + m.row_bytes * r; }
KERNEL_INLINE void open_row(thread DecQ2K& d, RowSource m, uint r) { d.p = m.data + m.row_bytes * r; }
KERNEL_INLINE void open_row(thread DecIq2Xxs& d, RowSource m, uint r) { d.p = m.data + m.row_bytes * r; }

struct DecFp8Block : DecFp8 {};
struct DecFp8Row : DecFp8 {};
KERNEL_INLINE void open_row(thread DecFp8Block& d, RowSource m, uint r) {
  d.p = m.data + m.row_bytes * r;
  d.scale = m.scale + ulong(m.scale_row_bytes) * (r >> 5);
}
KERNEL_INLINE void open_row(thread DecFp8Row& d, RowSource m, uint r) {
  d.p = m.data + m.row_bytes * r;
  d.scale = m.scale + ulong(m.scale_row_bytes) * r;
}

// Runs CALL(decoder type) for a RowType.
#define DS4_WITH_ROW_TYPE(type, CALL)                 \
  do {                                                \
    if ((type) == 0) { CALL(DecF32); }                \
    else if ((type) == 1) { CALL(DecF16); }           \
    else if ((type) == 2) { CALL(DecBf16); }          \
    else if ((type) == 3) { CALL(DecFp8Block); }      \
    else if ((type) == 4) { CALL(DecFp8Row); }        \
    else if ((type) == 5) { CALL(DecFp4Row); }        \
    else if ((type) == 6) { CALL(DecQ8_0); }          \
    else if ((type) == 7) { CALL(DecQ4K); }           \
    else if ((type) == 8) { CALL(DecMxfp4); }         \
    else if ((type) == 9) { CALL(DecQ2K); }           \
    else { CALL(DecIq2Xxs); }                         \
  } while (false)

template <class D>
KERNEL_INLINE void row_turns(thread const D& row, uint block, uint lane, thread float2* out) {
  uint raw[ROW_WORDS];
  row.fetch(block, lane, raw);
  row.values(block, lane, raw, out);
}

// The tree over 64 accumulators, neighbours first; every lane gets the sum.
KERNEL_INLINE float tree64(float2 a) {
  float v = a.x + a.y;
  v = v + simd_shuffle_xor(v, 1);
  v = v + simd_shuffle_xor(v, 2);
  v = v + simd_shuffle_xor(v, 4);
  v = v + simd_shuffle_xor(v, 8);
  v = v + simd_shuffle_xor(v, 16);
  return v;
}

// One segment begin .. end - 1 of R matrix rows with N activation rows, x + at[j] each, into this lane's accumulators.
template <class D, int R, int N>
KERNEL_INLINE void row_segment(thread const D* w, device const float* x, thread const uint* at, uint begin, uint end, uint lane,
                               thread float2* acc) {
  for (int q = 0; q < R * N; ++q) acc[q] = float2(0.0f);
  uint first = begin >> 8, blocks = (end - begin) >> 8;  // segments begin at multiples of 256
#pragma unroll 2
  for (uint b = first; b < first + blocks; ++b) {
    float2 wv[R][4];
    for (int r = 0; r < R; ++r) row_turns(w[r], b, lane, wv[r]);
    for (int j = 0; j < N; ++j) {
      device const float* xb = x + at[j] + ulong(b) * 256u + 2u * lane;
      float2 xv[4];
      for (uint t = 0u; t < 4u; ++t) xv[t] = load_pair(xb + 64u * t);
      for (uint t = 0u; t < 4u; ++t)
        for (int r = 0; r < R; ++r) {
          acc[r * N + j].x = fma(wv[r][t].x, xv[t].x, acc[r * N + j].x);
          acc[r * N + j].y = fma(wv[r][t].y, xv[t].y, acc[r * N + j].y);
        }
    }
  }
  uint i = begin + 256u * blocks + 2u * lane;
  for (; i + 1u < end; i += 64u) {
    float2 wv[R];
    for (int r = 0; r < R; ++r) wv[r] = w[r].get(i);
    for (int j = 0; j < N; ++j) {
      float2 xv = load_pair(x + at[j] + i);
      for (int r = 0; r < R; ++r) {
        acc[r * N + j].x = fma(wv[r].x, xv.x, acc[r * N + j].x);
        acc[r * N + j].y = fma(wv[r].y, xv.y, acc[r * N + j].y);
      }
    }
  }
  if (i < end)  // the last element of an odd number
    for (int r = 0; r < R; ++r) {
      float wv = w[r].at(i);
      for (int j = 0; j < N; ++j) acc[r * N + j].x = fma(wv, x[at[j] + i], acc[r * N + j].x);
    }
}

// out[r * N + j]: products of R matrix rows of k columns with N activation rows. All lanes of the simdgroup call it and
// all get the sums.
template <class D, int R, int N>
KERNEL_INLINE void row_products(thread const D* w, device const float* x, thread const uint* at, uint k, uint lane, thread float* out) {
  float2 total[R * N];
  for (int q = 0; q < R * N; ++q) total[q] = float2(0.0f);
  for (uint begin = 0u; begin < k; begin += kSegment) {
    float2 acc[R * N];
    row_segment<D, R, N>(w, x, at, begin, min(begin + kSegment, k), lane, acc);
    for (int q = 0; q < R * N; ++q) total[q] = begin == 0u ? acc[q] : total[q] + acc[q];
  }
  for (int q = 0; q < R * N; ++q) out[q] = tree64(total[q]);
}
