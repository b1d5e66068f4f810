// One decoder per row type: get(i) gives elements i .. i + kW - 1 of a row as f32, at(i) one element (ragged tails).
// The decoded value is defined in docs/numerics.md; every product below is exact or rounded once.
#pragma once

#include "cpu/iq2_patterns.h"
#include "cpu/simd.h"
#include "engine/weights.h"

DS4_CPU_NAMESPACE_BEGIN

struct DecF32 {
  const float* p;
  DS4_INLINE V get(int i) const { return v_load(p + i); }
  DS4_INLINE float at(int i) const { return p[i]; }
};

struct DecF16 {
  const uint16_t* p;
  DS4_INLINE V get(int i) const { return v_f16(p + i); }
  DS4_INLINE float at(int i) const { return f16_scalar(reinterpret_cast<const uint8_t*>(p + i)); }
};

struct DecBf16 {
  const uint16_t* p;
  DS4_INLINE V get(int i) const { return v_bf16(p + i); }
  DS4_INLINE float at(int i) const { return DS4_AS_FLOAT(static_cast<uint32_t>(p[i]) << 16); }
};

// 256 * 2^(b - 127), for the decoders that hold 1/256 of the e4m3 value.
DS4_INLINE float scale_256(uint32_t b) {
  const uint32_t e = b + 8u;
  return DS4_AS_FLOAT((e > 255u ? 255u : e) << 23);
}

struct DecFp8 {  // both fp8 kinds: a scale per 32 columns, the row picks which scales
  const uint8_t* p;
  const uint8_t* scale;
  DS4_INLINE V get(int i) const { return v_mul(v_e4m3_256th(p + i), v_set(scale_256(scale[i >> 5]))); }
  DS4_INLINE float at(int i) const { return (ds4_e4m3(p[i]) * 0.00390625f) * scale_256(scale[i >> 5]); }
};

struct DecFp4Row {
  const uint8_t* p;
  const uint8_t* scale;
  DS4_INLINE V get(int i) const { return v_mul(v_e2m1_pairs(p + (i >> 1)), v_set(ds4_e8m0(scale[i >> 5]))); }
  DS4_INLINE float at(int) const { return 0.f; }  // columns are a multiple of 32
};

struct DecMxfp4 {  // 17 bytes per 32: e8m0, then 16 low nibbles and 16 high nibbles
  const uint8_t* p;
  DS4_INLINE V get(int i) const {
    const uint8_t* b = p + (i >> 5) * 17;
    const V s = v_set(ds4_e8m0(b[0]));
    const uint8_t* q = b + 1 + (i & 15);
    return (i & 16) != 0 ? v_mul(v_e2m1_half<true>(q), s) : v_mul(v_e2m1_half<false>(q), s);
  }
  DS4_INLINE float at(int) const { return 0.f; }
};

struct DecQ8_0 {  // 34 bytes per 32: f16 scale, 32 int8
  const uint8_t* p;
  DS4_INLINE V get(int i) const {
    const uint8_t* b = p + (i >> 5) * 34;
    return v_mul(v_i8(reinterpret_cast<const int8_t*>(b + 2 + (i & 31))), v_set(f16_scalar(b)));
  }
  DS4_INLINE float at(int) const { return 0.f; }
};

struct DecQ4K {  // 144 bytes per 256: f16 d, f16 dmin, 8 six-bit (scale, min) in 12 bytes, 128 bytes of nibbles
  const uint8_t* p;
  DS4_INLINE V get(int i) const {
    const uint8_t* b = p + (i >> 8) * 144;
    const int j = (i >> 5) & 7;
    const uint8_t* s = b + 4;
    uint32_t sc, mn;
    if (j < 4) {
      sc = s[j] & 63u;
      mn = s[j + 4] & 63u;
    } else {
      sc = (s[j + 4] & 15u) | ((s[j - 4] >> 6) << 4);
      mn = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
    }
    const V d = v_set(f16_scalar(b) * static_cast<float>(sc));
    const V m = v_set(-(f16_scalar(b + 2) * static_cast<float>(mn)));
    const uint8_t* q = b + 16 + (j >> 1) * 32 + (i & 31);
    return (j & 1) != 0 ? v_fma(d, v_u4_half<true>(q), m) : v_fma(d, v_u4_half<false>(q), m);
  }
  DS4_INLINE float at(int) const { return 0.f; }
};

struct DecQ2K {  // 84 bytes per 256: 16 (scale, min) nibble pairs, 64 bytes of 2-bit codes, f16 d, f16 dmin
  const uint8_t* p;
  DS4_INLINE V get(int i) const {
    const uint8_t* b = p + (i >> 8) * 84;
    const int e = i & 255;
    const uint32_t sm = b[e >> 4];
    const float d = f16_scalar(b + 80) * static_cast<float>(sm & 15u);
    const float m = -(f16_scalar(b + 82) * static_cast<float>(sm >> 4));
    const uint8_t* q = b + 16 + (e >> 7) * 32 + (e & 31);
    const int shift = ((e >> 5) & 3) * 2;
    float t[kW];
    for (int k = 0; k < kW; ++k) t[k] = DS4_FMA(d, static_cast<float>((q[k] >> shift) & 3), m);
    return v_load(t);
  }
  DS4_INLINE float at(int) const { return 0.f; }
};

// 66 bytes per 256: f16 d, then for each 32 values four pattern numbers and a word of 4 x 7 sign bits and a 4-bit scale.
// The eighth sign of a pattern makes their number even. Value: ((d * (0.5 + scale)) * 0.25) * magnitude, all exact.
struct DecIq2Xxs {
  const uint8_t* p;
  DS4_INLINE V get(int i) const {
    const uint8_t* b = p + (i >> 8) * 66;
    const uint8_t* q = b + 2 + ((i >> 5) & 7) * 8;
    uint32_t word;
    std::memcpy(&word, q + 4, 4);
    const float d = (f16_scalar(b) * (0.5f + static_cast<float>(word >> 28))) * 0.25f;
    constexpr float kMagnitudes[4] = {8.f, 25.f, 43.f, 0.f};
    float t[kW];
    for (int k = 0; k < kW; ++k) {
      const int e = (i + k) & 31, l = e >> 3, j = e & 7;
      const uint32_t signs = (word >> (7 * l)) & 127u;
      const uint32_t all = signs | (static_cast<uint32_t>(__builtin_popcount(signs) & 1) << 7);
      const float v = d * kMagnitudes[(kIq2Patterns[q[l]] >> (2 * j)) & 3];
      t[k] = ((all >> j) & 1u) != 0 ? -v : v;
    }
    return v_load(t);
  }
  DS4_INLINE float at(int) const { return 0.f; }
};

// Calls f(make) where make(row) is the decoder of that row.
template <class F>
DS4_INLINE void with_decoder(const Matrix& m, F f) {
  const uint8_t* data = m.data;
  const uint8_t* scale = m.scale;
  const int64_t rb = m.row_bytes, sb = m.scale_row_bytes;
  switch (m.type) {
    case RowType::f32:
      return f([=](int r) { return DecF32{reinterpret_cast<const float*>(data + r * rb)}; });
    case RowType::f16:
      return f([=](int r) { return DecF16{reinterpret_cast<const uint16_t*>(data + r * rb)}; });
    case RowType::bf16:
      return f([=](int r) { return DecBf16{reinterpret_cast<const uint16_t*>(data + r * rb)}; });
    case RowType::fp8_block:
      return f([=](int r) { return DecFp8{data + r * rb, scale + (r >> 5) * sb}; });
    case RowType::fp8_row:
      return f([=](int r) { return DecFp8{data + r * rb, scale + r * sb}; });
    case RowType::fp4_row:
      return f([=](int r) { return DecFp4Row{data + r * rb, scale + r * sb}; });
    case RowType::q8_0:
      return f([=](int r) { return DecQ8_0{data + r * rb}; });
    case RowType::q4_k:
      return f([=](int r) { return DecQ4K{data + r * rb}; });
    case RowType::mxfp4:
      return f([=](int r) { return DecMxfp4{data + r * rb}; });
    case RowType::q2_k:
      return f([=](int r) { return DecQ2K{data + r * rb}; });
    case RowType::iq2_xxs:
      return f([=](int r) { return DecIq2Xxs{data + r * rb}; });
  }
}

DS4_CPU_NAMESPACE_END
