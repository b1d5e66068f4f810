// The loops over a whole row of logits, in a version for the baseline instruction set and one for AVX2 with FMA.
//
// Both are the same text and give the same bits: every float operation is one that IEEE 754 rounds correctly, maxima do
// not depend on order, and sums are of integers. Included by sampling.cpp only. No std containers here: their inline
// functions must not be emitted with a wider instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numerics.h"
#include "sampling/philox.h"

#if defined(__x86_64__) && !(defined(__AVX2__) && defined(__FMA__))
#define DS4_SAMPLING_WIDE 1
#endif

namespace ds4 {
namespace {

constexpr size_t kBlock = 64;
constexpr float kInf = __builtin_inff();

// A probability (or any number in [0, 1]) in units of 2^-40, cut off: sums of these are exact in any order.
inline __attribute__((always_inline)) uint64_t mass_of(float e) {
  const uint32_t u = DS4_AS_UINT(ds4_min(e, 1.0f));
  const uint32_t below_one = 127u - (u >> 23);
  const uint64_t significand = static_cast<uint64_t>((u & 0x7fffffu) | 0x800000u) << 17;
  return significand >> (below_one < 63u ? below_one : 63u);
}

struct Extremes {
  float max;      // NaN left out
  size_t n_nan;
};

inline __attribute__((always_inline)) Extremes extremes_body(const float* x, size_t n) {
  float lane[16];
  uint32_t nan[16];
  for (int j = 0; j < 16; ++j) lane[j] = -kInf, nan[j] = 0;
  size_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (size_t j = 0; j < 16; ++j) {
      lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
      nan[j] += x[i + j] != x[i + j] ? 1u : 0u;
    }
  for (; i < n; ++i) {
    lane[0] = x[i] > lane[0] ? x[i] : lane[0];
    nan[0] += x[i] != x[i] ? 1u : 0u;
  }
  Extremes found{-kInf, 0};
  for (int j = 0; j < 16; ++j) {
    found.max = ds4_max(found.max, lane[j]);
    found.n_nan += nan[j];
  }
  return found;
}

// out[i] = (x[i] - max) / temperature, and its maximum for every block. Returns how many are above -infinity.
inline __attribute__((always_inline)) size_t temper_body(const float* x, size_t n, float max, float temperature, float* out,
                                                         float* block_max) {
  size_t n_alive = 0;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = n - begin < kBlock ? n - begin : kBlock;
    float top = -kInf;
    uint32_t alive = 0;
    for (size_t j = 0; j < count; ++j) {
      const float z = (x[begin + j] - max) / temperature;
      out[begin + j] = z;
      top = z > top ? z : top;
      alive += z > -kInf ? 1u : 0u;
    }
    block_max[begin / kBlock] = top;
    n_alive += alive;
  }
  return n_alive;
}

// Sum of mass_of(exp((x[i] - max) / temperature)).
inline __attribute__((always_inline)) uint64_t mass_body(const float* x, size_t n, float max, float temperature) {
  uint64_t total = 0;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = n - begin < kBlock ? n - begin : kBlock;
    float e[kBlock];
    for (size_t j = 0; j < kBlock; ++j) e[j] = 0.0f;
    for (size_t j = 0; j < count; ++j) e[j] = ds4_exp((x[begin + j] - max) / temperature);
    for (size_t j = 0; j < kBlock; ++j) total += mass_of(e[j]);
  }
  return total;
}

// exp(z) for z <= 0 within 4e-6 of itself, and at least exp(-80): for what decides about time only.
inline __attribute__((always_inline)) float about_exp(float z) {
  const float c = z > -80.0f ? z : -80.0f;
  const float t = DS4_FMA(c, 1.44269504088896341f, 12582912.0f);  // 1.5 * 2^23: rounds to the nearest integer
  const float r = DS4_FMA(t - 12582912.0f, -0.69314718055994531f, c);
  float p = DS4_FMA(8.33333333333333333e-3f, r, 4.16666666666666667e-2f);
  p = DS4_FMA(p, r, 1.66666666666666667e-1f);
  p = DS4_FMA(p, r, 0.5f);
  p = DS4_FMA(p, r, 1.0f);
  p = DS4_FMA(p, r, 1.0f);
  return DS4_AS_FLOAT(DS4_AS_UINT(p) + (DS4_AS_UINT(t) << 23));  // p is normal, and so is the result
}

// About the sum of exp(x[i] - max), in a fixed order.
inline __attribute__((always_inline)) float about_sum_body(const float* x, size_t n, float max) {
  constexpr size_t kLanes = 32;
  float lane[kLanes];
  for (size_t j = 0; j < kLanes; ++j) lane[j] = 0.0f;
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (size_t j = 0; j < kLanes; ++j) lane[j] += about_exp(x[i + j] - max);
  for (; i < n; ++i) lane[0] += about_exp(x[i] - max);
  float sum = 0.0f;
  for (size_t j = 0; j < kLanes; ++j) sum += lane[j];
  return sum;
}

// words[i] = the noise word of token first + i, for a block of tokens (`first` is a multiple of 4).
// Returns whether one of the `count` tokens could reach `score`: tempered value plus the bound of its noise.
inline __attribute__((always_inline)) bool contest_body(const float* tempered, size_t count, uint64_t seed, int64_t position,
                                                        uint32_t first, float score, uint32_t* words) {
  constexpr size_t kQuads = kBlock / 4;
  const uint64_t p = static_cast<uint64_t>(position);
  uint32_t c0[kQuads], c1[kQuads], c2[kQuads], c3[kQuads];
  for (size_t q = 0; q < kQuads; ++q) {
    c0[q] = first / 4 + static_cast<uint32_t>(q);
    c1[q] = static_cast<uint32_t>(p);
    c2[q] = static_cast<uint32_t>(p >> 32);
    c3[q] = static_cast<uint32_t>(NoisePurpose::draw);
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (size_t q = 0; q < kQuads; ++q) philox_round(c0[q], c1[q], c2[q], c3[q], key0, key1);
    philox_next_key(key0, key1);
  }
  for (size_t q = 0; q < kQuads; ++q) {
    words[4 * q] = c0[q];
    words[4 * q + 1] = c1[q];
    words[4 * q + 2] = c2[q];
    words[4 * q + 3] = c3[q];
  }
  uint32_t hopeful = 0;
  for (size_t i = 0; i < count; ++i) hopeful |= tempered[i] + gumbel_bound(words[i]) >= score ? 1u : 0u;
  return hopeful != 0;
}

// DS4_PASS(result, name, (parameters), (arguments)): name(wide, ...) runs one of the two versions.
#define DS4_STRIP(...) __VA_ARGS__
#ifdef DS4_SAMPLING_WIDE
#define DS4_PASS(result, name, parameters, arguments)                                                          \
  __attribute__((target("avx2,fma"), flatten, noinline)) result name##_wide(DS4_STRIP parameters) {            \
    return name##_body(DS4_STRIP arguments);                                                                   \
  }                                                                                                            \
  __attribute__((noinline)) result name##_plain(DS4_STRIP parameters) { return name##_body(DS4_STRIP arguments); } \
  result name(bool wide, DS4_STRIP parameters) {                                                               \
    return wide ? name##_wide(DS4_STRIP arguments) : name##_plain(DS4_STRIP arguments);                        \
  }
#else
#define DS4_PASS(result, name, parameters, arguments) \
  result name(bool, DS4_STRIP parameters) { return name##_body(DS4_STRIP arguments); }
#endif

DS4_PASS(Extremes, extremes, (const float* x, size_t n), (x, n))
DS4_PASS(size_t, temper, (const float* x, size_t n, float max, float temperature, float* out, float* block_max),
         (x, n, max, temperature, out, block_max))
DS4_PASS(uint64_t, mass, (const float* x, size_t n, float max, float temperature), (x, n, max, temperature))
DS4_PASS(float, about_sum, (const float* x, size_t n, float max), (x, n, max))
DS4_PASS(bool, contest,
         (const float* tempered, size_t count, uint64_t seed, int64_t position, uint32_t first, float score, uint32_t* words),
         (tempered, count, seed, position, first, score, words))

#undef DS4_PASS
#undef DS4_STRIP

inline bool wide_available() {
#ifdef DS4_SAMPLING_WIDE
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

}  // namespace
}  // namespace ds4
