// One vector type per instruction set, and the decoders of narrow weight formats.
//
// Only operations that IEEE 754 rounds correctly (add, mul, fma) plus exact conversions, so the width never shows
// in a result: the canonical order (docs/numerics.md) fixes which element meets which accumulator.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/isa.h"
#include "numerics.h"

#if defined(DS4_ISA_AVX512) || defined(DS4_ISA_AVX2)
#include <immintrin.h>
#elif defined(DS4_ISA_NEON)
#include <arm_neon.h>
#endif

DS4_CPU_NAMESPACE_BEGIN

#define DS4_INLINE inline __attribute__((always_inline))

#if defined(DS4_ISA_AVX512)

constexpr int kW = 16;
constexpr int kRegisters = 32;
struct V {
  __m512 v;
};
DS4_INLINE V v_zero() { return {_mm512_setzero_ps()}; }
DS4_INLINE V v_set(float x) { return {_mm512_set1_ps(x)}; }
DS4_INLINE V v_load(const float* p) { return {_mm512_loadu_ps(p)}; }
DS4_INLINE void v_store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
DS4_INLINE V v_add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
DS4_INLINE V v_mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
DS4_INLINE V v_fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
DS4_INLINE V v_bf16(const uint16_t* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
DS4_INLINE V v_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// 2^-8 times the e4m3 value: the code moved into a half float, whose exponent bias is 8 more.
DS4_INLINE V v_e4m3_256th(const uint8_t* p) {
  __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  __m256i h = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8),
                              _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x7f)), 7));
  return {_mm512_cvtph_ps(h)};
}
DS4_INLINE V v_e2m1_pairs(const uint8_t* p) {  // element 2i in the low nibble of byte i
  uint64_t bytes;
  std::memcpy(&bytes, p, 8);
  __m512i w = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
  w = _mm512_or_si512(w, _mm512_slli_epi64(w, 28));
  const __m512 table = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f);
  return {_mm512_permutexvar_ps(w, table)};
}
template <bool kHigh>
DS4_INLINE V v_e2m1_half(const uint8_t* p) {  // MXFP4: 16 low nibbles, or 16 high nibbles
  __m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if (kHigh) w = _mm512_srli_epi32(w, 4);
  const __m512 table = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f);
  return {_mm512_permutexvar_ps(w, table)};
}
DS4_INLINE V v_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
template <bool kHigh>
DS4_INLINE V v_u4_half(const uint8_t* p) {  // unsigned nibbles of 16 bytes
  __m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  w = kHigh ? _mm512_srli_epi32(w, 4) : _mm512_and_si512(w, _mm512_set1_epi32(15));
  return {_mm512_cvtepi32_ps(w)};
}

#elif defined(DS4_ISA_AVX2)

constexpr int kW = 8;
constexpr int kRegisters = 16;
struct V {
  __m256 v;
};
DS4_INLINE V v_zero() { return {_mm256_setzero_ps()}; }
DS4_INLINE V v_set(float x) { return {_mm256_set1_ps(x)}; }
DS4_INLINE V v_load(const float* p) { return {_mm256_loadu_ps(p)}; }
DS4_INLINE void v_store(float* p, V a) { _mm256_storeu_ps(p, a.v); }
DS4_INLINE V v_add(V a, V b) { return {_mm256_add_ps(a.v, b.v)}; }
DS4_INLINE V v_mul(V a, V b) { return {_mm256_mul_ps(a.v, b.v)}; }
DS4_INLINE V v_fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
DS4_INLINE V v_bf16(const uint16_t* p) {
  __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w, 16))};
}
DS4_INLINE V v_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
DS4_INLINE V v_e4m3_256th(const uint8_t* p) {
  __m128i w = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  __m128i h = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x80)), 8),
                           _mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x7f)), 7));
  return {_mm256_cvtph_ps(h)};
}
DS4_INLINE V v_e2m1_codes(__m256i w) {  // low 4 bits of each word
  const __m256 table = _mm256_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f);
  __m256 mag = _mm256_permutevar8x32_ps(table, w);
  __m256i sign = _mm256_slli_epi32(_mm256_and_si256(w, _mm256_set1_epi32(8)), 28);
  return {_mm256_or_ps(mag, _mm256_castsi256_ps(sign))};
}
DS4_INLINE V v_e2m1_pairs(const uint8_t* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, 4);
  __m256i w = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
  w = _mm256_or_si256(w, _mm256_slli_epi64(w, 28));
  return v_e2m1_codes(w);
}
template <bool kHigh>
DS4_INLINE V v_e2m1_half(const uint8_t* p) {
  __m256i w = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  if (kHigh) w = _mm256_srli_epi32(w, 4);
  return v_e2m1_codes(w);
}
DS4_INLINE V v_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
template <bool kHigh>
DS4_INLINE V v_u4_half(const uint8_t* p) {
  __m256i w = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  w = kHigh ? _mm256_srli_epi32(w, 4) : _mm256_and_si256(w, _mm256_set1_epi32(15));
  return {_mm256_cvtepi32_ps(w)};
}

#else

// Four lanes: NEON registers, or plain code that the compiler may or may not vectorise.
constexpr int kW = 4;
#if defined(DS4_ISA_NEON)
constexpr int kRegisters = 32;
struct V {
  float32x4_t v;
};
DS4_INLINE V v_zero() { return {vdupq_n_f32(0.f)}; }
DS4_INLINE V v_set(float x) { return {vdupq_n_f32(x)}; }
DS4_INLINE V v_load(const float* p) { return {vld1q_f32(p)}; }
DS4_INLINE void v_store(float* p, V a) { vst1q_f32(p, a.v); }
DS4_INLINE V v_add(V a, V b) { return {vaddq_f32(a.v, b.v)}; }
DS4_INLINE V v_mul(V a, V b) { return {vmulq_f32(a.v, b.v)}; }
DS4_INLINE V v_fma(V a, V b, V c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
DS4_INLINE V v_bf16(const uint16_t* p) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))};
}
DS4_INLINE V v_f16(const uint16_t* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))}; }
#else
constexpr int kRegisters = 16;
struct V {
  float v[4];
};
DS4_INLINE V v_set(float x) { return {{x, x, x, x}}; }
DS4_INLINE V v_zero() { return v_set(0.f); }
DS4_INLINE V v_load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
DS4_INLINE void v_store(float* p, V a) { std::memcpy(p, a.v, sizeof a.v); }
DS4_INLINE V v_add(V a, V b) { return {{a.v[0] + b.v[0], a.v[1] + b.v[1], a.v[2] + b.v[2], a.v[3] + b.v[3]}}; }
DS4_INLINE V v_mul(V a, V b) { return {{a.v[0] * b.v[0], a.v[1] * b.v[1], a.v[2] * b.v[2], a.v[3] * b.v[3]}}; }
DS4_INLINE V v_fma(V a, V b, V c) {
  return {{DS4_FMA(a.v[0], b.v[0], c.v[0]), DS4_FMA(a.v[1], b.v[1], c.v[1]), DS4_FMA(a.v[2], b.v[2], c.v[2]),
           DS4_FMA(a.v[3], b.v[3], c.v[3])}};
}
DS4_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t mag = h & 0x7fffu;
  const float normal = DS4_AS_FLOAT((mag << 13) + (112u << 23));
  const float special = DS4_AS_FLOAT((mag << 13) | 0x7f800000u);
  const float small = static_cast<float>(mag) * 5.9604644775390625e-8f;  // 2^-24
  const float v = mag >= 0x7c00u ? special : (mag < 0x0400u ? small : normal);
  return DS4_AS_FLOAT(DS4_AS_UINT(v) | sign);
}
DS4_INLINE V v_bf16(const uint16_t* p) {
  V r;
  for (int i = 0; i < 4; ++i) r.v[i] = DS4_AS_FLOAT(static_cast<uint32_t>(p[i]) << 16);
  return r;
}
DS4_INLINE V v_f16(const uint16_t* p) {
  V r;
  for (int i = 0; i < 4; ++i) r.v[i] = half_to_float(p[i]);
  return r;
}
#endif

template <class F>
DS4_INLINE V v_each(F f) {
  float t[4];
  for (int i = 0; i < 4; ++i) t[i] = f(i);
  return v_load(t);
}
DS4_INLINE V v_e4m3_256th(const uint8_t* p) {
  return v_each([&](int i) { return ds4_e4m3(p[i]) * 0.00390625f; });
}
DS4_INLINE float e2m1(uint32_t code) {
  const float mag = 0.5f * static_cast<float>(ds4_e2m1_twice(code & 7u));
  return DS4_AS_FLOAT(DS4_AS_UINT(mag) | ((code & 8u) << 28));
}
DS4_INLINE V v_e2m1_pairs(const uint8_t* p) {
  return v_each([&](int i) { return e2m1((p[i >> 1] >> ((i & 1) * 4)) & 15u); });
}
template <bool kHigh>
DS4_INLINE V v_e2m1_half(const uint8_t* p) {
  return v_each([&](int i) { return e2m1((p[i] >> (kHigh ? 4 : 0)) & 15u); });
}
DS4_INLINE V v_i8(const int8_t* p) {
  return v_each([&](int i) { return static_cast<float>(p[i]); });
}
template <bool kHigh>
DS4_INLINE V v_u4_half(const uint8_t* p) {
  return v_each([&](int i) { return static_cast<float>((p[i] >> (kHigh ? 4 : 0)) & 15u); });
}

#endif

// a * *p and a - *p. On AVX-512 the number is an operand in memory: Zen 4 broadcasts it there for nothing, and into a
// register with a shuffle, of which it has one a cycle. Compilers would share the register.
#if defined(DS4_ISA_AVX512)
DS4_INLINE V v_mul_at(V a, const float* p) {
  V r;
  asm("vmulps %2%{1to16%}, %1, %0" : "=v"(r.v) : "v"(a.v), "m"(*p));
  return r;
}
DS4_INLINE V v_sub_at(V a, const float* p) {
  V r;
  asm("vsubps %2%{1to16%}, %1, %0" : "=v"(r.v) : "v"(a.v), "m"(*p));
  return r;
}
#else
DS4_INLINE V v_mul_at(V a, const float* p) { return v_mul(a, v_set(*p)); }
#endif

// Keeps a loaded vector in its register: without it compilers load it again for every use.
DS4_INLINE void v_keep(V& a) {
#if defined(DS4_ISA_AVX512) || defined(DS4_ISA_AVX2)
  asm("" : "+v"(a.v));
#elif defined(DS4_ISA_NEON)
  asm("" : "+w"(a.v));
#else
  (void)a;
#endif
}

// Pairwise sums of neighbours: lane pairs of a, then of b, in an order that later calls undo (see pairwise_tree).
#if defined(DS4_ISA_AVX512)
DS4_INLINE V v_pairs(V a, V b) {
  return {_mm512_add_ps(_mm512_shuffle_ps(a.v, b.v, 0x88), _mm512_shuffle_ps(a.v, b.v, 0xdd))};
}
#elif defined(DS4_ISA_AVX2)
DS4_INLINE V v_pairs(V a, V b) {
  return {_mm256_add_ps(_mm256_shuffle_ps(a.v, b.v, 0x88), _mm256_shuffle_ps(a.v, b.v, 0xdd))};
}
#elif defined(DS4_ISA_NEON)
DS4_INLINE V v_pairs(V a, V b) { return {vpaddq_f32(a.v, b.v)}; }
#else
DS4_INLINE V v_pairs(V a, V b) { return {{a.v[0] + a.v[1], a.v[2] + a.v[3], b.v[0] + b.v[1], b.v[2] + b.v[3]}}; }
#endif

// Sum of kN vectors (4 or more, a power of two) of lanes, pairwise by index bit, the lowest first.
template <int kN>
DS4_INLINE float pairwise_tree(const V* t) {
  static_assert(kN % 4 == 0);
  // Two rounds of v_pairs turn four vectors into one whose 4-lane block q holds, for each of the four vectors, the
  // sum of its lanes 4q .. 4q+3: bits 0 and 1 are done. Then bits of q (inside a vector), then those of the vectors.
  constexpr int kQuads = kW / 4;
  float sum[kN][kQuads];
  for (int n = 0; n < kN; n += 4) {
    float block[kW];
    v_store(block, v_pairs(v_pairs(t[n], t[n + 1]), v_pairs(t[n + 2], t[n + 3])));
    for (int q = 0; q < kQuads; ++q)
      for (int j = 0; j < 4; ++j) sum[n + j][q] = block[4 * q + j];
  }
  for (int s = 1; s < kQuads; s <<= 1)
    for (int q = 0; q < kQuads; q += 2 * s)
      for (int n = 0; n < kN; ++n) sum[n][q] = sum[n][q] + sum[n][q + s];
  for (int s = 1; s < kN; s <<= 1)
    for (int n = 0; n < kN; n += 2 * s) sum[n][0] = sum[n][0] + sum[n + s][0];
  return sum[0][0];
}

#if defined(DS4_ISA_AVX512)
// 64 numbers in four registers.
struct Four {
  V a, b, c, d;
};
DS4_INLINE Four four_zeros() { return {v_zero(), v_zero(), v_zero(), v_zero()}; }
DS4_INLINE Four four_at(const float* p) {
  Four f{v_load(p), v_load(p + 16), v_load(p + 32), v_load(p + 48)};
  v_keep(f.a), v_keep(f.b), v_keep(f.c), v_keep(f.d);
  return f;
}
// Into memory; added to what is there unless they are the first.
DS4_INLINE void add_four(const Four& f, bool first, float* p) {
  v_store(p, first ? f.a : v_add(v_load(p), f.a));
  v_store(p + 16, first ? f.b : v_add(v_load(p + 16), f.b));
  v_store(p + 32, first ? f.c : v_add(v_load(p + 32), f.c));
  v_store(p + 48, first ? f.d : v_add(v_load(p + 48), f.d));
}

// Layouts of a run of numbers over vectors: kLayout 1 in order; 2 and 4: lane l of vector v holds element kLayout * l + v.
template <int kLayout>
DS4_INLINE void spread(V* v) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  const auto split = [&](V& a, V& b) {
    const __m512 e = _mm512_permutex2var_ps(a.v, even, b.v);
    b.v = _mm512_permutex2var_ps(a.v, odd, b.v);
    a.v = e;
  };
  if constexpr (kLayout == 2) split(v[0], v[1]);
  if constexpr (kLayout == 4) {
    split(v[0], v[1]);
    split(v[2], v[3]);
    split(v[0], v[2]);  // 0 mod 4, 2 mod 4
    split(v[1], v[3]);  // 1 mod 4, 3 mod 4
  }
}

// The tree (pairwise by index bit, the lowest first) of four runs of 64 numbers in a layout: run o at t + o * stride.
template <int kLayout>
DS4_INLINE void pairwise_tree4(const float* t, int stride, float* out) {
  V s[4];
  if constexpr (kLayout == 4) {
    for (int o = 0; o < 4; ++o) {  // bits 0 and 1 choose the vector
      const float* p = t + o * stride;
      s[o] = v_add(v_add(v_load(p), v_load(p + 16)), v_add(v_load(p + 32), v_load(p + 48)));
    }
  } else if constexpr (kLayout == 2) {
    for (int o = 0; o < 4; ++o) {  // bit 0 chooses the vector, bit 5 the pair of vectors
      const float* p = t + o * stride;
      s[o] = v_pairs(v_add(v_load(p), v_load(p + 16)), v_add(v_load(p + 32), v_load(p + 48)));
    }
  } else {
    for (int o = 0; o < 4; ++o) {  // block q of s[o]: for each of the four vectors, the sum of its lanes 4q .. 4q + 3
      const float* p = t + o * stride;
      s[o] = v_pairs(v_pairs(v_load(p), v_load(p + 16)), v_pairs(v_load(p + 32), v_load(p + 48)));
    }
  }
  // Sums over the four 128-bit blocks of a vector: neighbours first.
  const auto across = [](V a) -> V {
    const __m512 b = _mm512_add_ps(a.v, _mm512_shuffle_f32x4(a.v, a.v, 0xb1));
    return {_mm512_add_ps(b, _mm512_shuffle_f32x4(b, b, 0x4e))};
  };
  V all;
  if constexpr (kLayout == 4) {
    all = across(v_pairs(v_pairs(s[0], s[1]), v_pairs(s[2], s[3])));
  } else if constexpr (kLayout == 2) {
    all = v_pairs(across(v_pairs(s[0], s[1])), across(v_pairs(s[2], s[3])));
  } else {
    const auto blocks = [](V a, V b) -> V {  // neighbouring blocks of a, then of b
      return {_mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x88), _mm512_shuffle_f32x4(a.v, b.v, 0xdd))};
    };
    const V q = blocks(blocks(s[0], s[1]), blocks(s[2], s[3]));  // block o: four sums, one for each vector
    const V n = v_pairs(q, q);
    const V sums = v_pairs(n, n);
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    all = {_mm512_permutexvar_ps(first, sums.v)};
  }
  _mm_storeu_ps(out, _mm512_castps512_ps128(all.v));
}
#endif

// Reads one 16-bit float of any alignment, exactly.
DS4_INLINE float f16_scalar(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
#if defined(DS4_ISA_AVX512) || defined(DS4_ISA_AVX2)
  return _cvtsh_ss(h);
#elif defined(DS4_ISA_NEON)
  const uint16_t four[4] = {h, h, h, h};
  return vgetq_lane_f32(v_f16(four).v, 0);
#else
  return half_to_float(h);
#endif
}

DS4_CPU_NAMESPACE_END
