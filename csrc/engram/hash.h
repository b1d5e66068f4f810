// Which table rows a position reads: a hash of the last n-grams of compressed token ids.
#pragma once

#include <cstdint>
#include <vector>

namespace ds4 {

struct EngramHash {
  int max_ngram = 4, n_heads = 0;
  std::vector<uint32_t> token_map;               // [vocab] token id -> compressed id
  uint32_t pad = 0;                              // compressed id of the pad token
  std::vector<std::vector<uint64_t>> multipliers;  // [tables][max_ngram]
  std::vector<std::vector<uint64_t>> primes;       // [tables][(max_ngram - 1) n_heads], size-major
  std::vector<std::vector<uint64_t>> offsets;      // same, first row of the column's range

  int columns() const { return (max_ngram - 1) * n_heads; }

  // Rows of `table` for the n tokens that follow `history` tokens: out[n][columns]. `tokens` points at the first of
  // history + n tokens, of which the last max_ngram - 1 before a position matter. dead[i] != 0 marks positions (of
  // the same run) that belong to an image; may be null.
  void rows(int table, const int32_t* tokens, int64_t history, int64_t n, const uint8_t* dead, int64_t* out) const;
};

}  // namespace ds4
