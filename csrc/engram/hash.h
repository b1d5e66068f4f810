// Which table rows a position reads: a hash of the last n-grams of compressed token ids.
#pragma once

#include <cstdint>
#include <vector>

namespace ds4 {

class EngramHash {
 public:
  EngramHash() = default;
  // token_map: [vocab] token id -> compressed id. pad: the compressed id that stands for what is not there.
  // multipliers [tables][max_ngram]; primes and offsets (first row of a column's range) [tables][columns], size-major.
  // Throws CheckpointError when the lists do not fit together.
  EngramHash(int max_ngram, int n_heads, std::vector<uint32_t> token_map, uint32_t pad,
             std::vector<std::vector<uint64_t>> multipliers, std::vector<std::vector<uint64_t>> primes,
             std::vector<std::vector<uint64_t>> offsets);

  int max_ngram() const { return max_ngram_; }
  int columns() const { return (max_ngram_ - 1) * n_heads_; }
  int n_tables() const { return static_cast<int>(columns_.size()); }
  int64_t vocab() const { return static_cast<int64_t>(token_map_.size()); }

  // Rows of `table` for the n tokens that follow `history` tokens: out[n][columns]. `tokens` points at the first of
  // history + n tokens, of which the last max_ngram - 1 before a position matter. dead[i] != 0 marks positions (of
  // the same run) that belong to an image; may be null.
  void rows(int table, const int32_t* tokens, int64_t history, int64_t n, const uint8_t* dead, int64_t* out) const;

 private:
  struct Column {
    uint64_t prime, reciprocal, offset;  // reciprocal: floor(2^64 / prime)
  };
  static constexpr int kBlock = 128;  // positions that are mixed together

  void mix(const uint64_t* ids, const int* reach, int size, uint64_t multiplier, int n, uint64_t* mixed) const;

  int max_ngram_ = 4, n_heads_ = 0;
  std::vector<uint32_t> token_map_;
  uint64_t pad_ = 0;
  std::vector<std::vector<uint64_t>> multipliers_;
  std::vector<std::vector<Column>> columns_;
};

}  // namespace ds4
