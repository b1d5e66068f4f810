// Counter-based noise: the same (seed, position, token) gives the same number on every machine, in any order.
//
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11). The key is the seed;
// the counter is (token / 4, position low, position high, purpose) and token % 4 picks one of the four output words, so
// four neighbouring tokens share one block. docs/sampling.md has the definition.
#pragma once

#include <cstdint>

#include "numerics.h"

namespace ds4 {

struct PhiloxBlock {
  uint32_t word[4];
};

// What a counter is used for, so that two uses of one seed never meet.
enum class NoisePurpose : uint32_t { draw = 0, child_seed = 1 };

inline void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t key0, uint32_t key1) {
  const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
  const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
  c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
  c1 = static_cast<uint32_t>(p1);
  c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
  c3 = static_cast<uint32_t>(p0);
}

inline void philox_next_key(uint32_t& key0, uint32_t& key1) {
  key0 += 0x9E3779B9u;
  key1 += 0xBB67AE85u;
}

inline PhiloxBlock philox4x32_10(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  auto& c = counter.word;
  for (int round = 0; round < 10; ++round) {
    philox_round(c[0], c[1], c[2], c[3], key0, key1);
    philox_next_key(key0, key1);
  }
  return counter;
}

inline PhiloxBlock noise_block(uint64_t seed, int64_t position, uint32_t index, NoisePurpose purpose) {
  const uint64_t p = static_cast<uint64_t>(position);
  return philox4x32_10({{index, static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32), static_cast<uint32_t>(purpose)}},
                       static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// Words of the four tokens 4 * i_quad .. 4 * i_quad + 3.
inline PhiloxBlock token_words(uint64_t seed, int64_t position, uint32_t i_quad) {
  return noise_block(seed, position, i_quad, NoisePurpose::draw);
}

// Standard Gumbel noise -log(-log(1 - v)) of a word, v = (word + 1/2) / 2^32. Where 1 - v is near 1 (the tail that
// decides draws) -log(1 - v) is computed from the small v, so all 32 bits count; v itself is rounded to f32 once.
inline float gumbel_of(uint32_t word) {
  const bool upper_half = (word >> 31) != 0;
  const uint32_t twice = ((upper_half ? ~word : word) << 1) | 1u;        // 2^33 times min(v, 1 - v)
  const float small = static_cast<float>(twice) * 1.16415321826934814453125e-10f;  // 2^-33, exact
  const float exponential = upper_half ? -ds4_log(small) : ds4_log1p01(small / (1.0f - small));
  return -ds4_log(exponential);
}

// The noise is never above (log(2^33) = 22.87) nor below (-log(22.87) = -3.13) these.
constexpr float kGumbelMax = 22.9f;

// A cheap bound: gumbel_of(word) <= gumbel_bound(word), by at least 0.0005, which covers the rounding of the sums it is
// used in. From -log(1 - v) >= v >= 2^exponent(v); 0.3665 = -log(log 2) is the most that v above 1/2 can give.
inline float gumbel_bound(uint32_t word) {
  const int32_t as_signed = static_cast<int32_t>(word);
  const float v = (static_cast<float>(as_signed) + 0.5f) * 2.3283064365386962890625e-10f;  // 2^-32
  const int32_t exponent = static_cast<int32_t>(DS4_AS_UINT(v) >> 23) - 127;
  const float bound = static_cast<float>(-exponent) * 0.69315f + 0.001f;
  return as_signed < 0 ? 0.37f : bound;
}

}  // namespace ds4
