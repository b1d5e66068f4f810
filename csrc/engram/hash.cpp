#include "engram/hash.h"

#include <cstddef>

namespace ds4 {

void EngramHash::rows(int table, const int32_t* tokens, int64_t history, int64_t n, const uint8_t* dead,
                      int64_t* out) const {
  const auto& m = multipliers[table];
  const auto& p = primes[table];
  const auto& o = offsets[table];
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = history + i;
    bool cut = false;  // once a look-back falls on a dead position or before the start, all older ones are pad
    uint64_t r = 0;
    int column = 0;
    for (int s = 0; s < max_ngram; ++s) {
      cut = cut || at - s < 0 || (dead != nullptr && dead[at - s] != 0);
      const uint64_t id = cut ? pad : token_map[static_cast<size_t>(tokens[at - s])];
      r ^= id * m[s];
      if (s == 0) continue;
      for (int h = 0; h < n_heads; ++h, ++column)
        out[i * columns() + column] = static_cast<int64_t>(r % p[column] + o[column]);
    }
  }
}

}  // namespace ds4
