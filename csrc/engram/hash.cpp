#include "engram/hash.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "base/error.h"

namespace ds4 {

namespace {

// r mod p without a division. The quotient estimate is the true one or one less, because r < 2^64.
inline uint64_t remainder(uint64_t r, uint64_t p, uint64_t reciprocal) {
  const uint64_t q = static_cast<uint64_t>((static_cast<unsigned __int128>(r) * reciprocal) >> 64);
  const uint64_t left = r - q * p;
  return left >= p ? left - p : left;
}

}  // namespace

EngramHash::EngramHash(int max_ngram, int n_heads, std::vector<uint32_t> token_map, uint32_t pad,
                       std::vector<std::vector<uint64_t>> multipliers, std::vector<std::vector<uint64_t>> primes,
                       std::vector<std::vector<uint64_t>> offsets)
    : max_ngram_(max_ngram),
      n_heads_(n_heads),
      token_map_(std::move(token_map)),
      pad_(pad),
      multipliers_(std::move(multipliers)) {
  const auto refuse = [](const std::string& what) { throw CheckpointError("[engram] hash constants: " + what); };
  if (max_ngram < 2 || n_heads < 1) refuse("expected n-grams of at least 2 tokens and at least one head");
  if (primes.size() != multipliers_.size() || offsets.size() != multipliers_.size())
    refuse("expected multipliers, primes and offsets of the same tables");
  for (size_t t = 0; t < primes.size(); ++t) {
    const size_t n = static_cast<size_t>(columns());
    if (multipliers_[t].size() != static_cast<size_t>(max_ngram) || primes[t].size() != n || offsets[t].size() != n)
      refuse("table " + std::to_string(t) + ": expected " + std::to_string(max_ngram) + " multipliers and " +
             std::to_string(n) + " primes and offsets");
    std::vector<Column> of_table;
    for (size_t c = 0; c < n; ++c) {
      const uint64_t p = primes[t][c];
      if (p < 2 || p >= (uint64_t{1} << 62)) refuse("prime " + std::to_string(p) + " is out of range");
      // floor(2^64 / p) from 2^64 - 1, which differs only where p divides 2^64.
      const uint64_t most = ~uint64_t{0};
      of_table.push_back({p, most / p + (most % p == p - 1 ? 1 : 0), offsets[t][c]});
    }
    columns_.push_back(std::move(of_table));
  }
}

// Adds look-back `size` to the mixed value of n positions; ids points at the first of them.
void EngramHash::mix(const uint64_t* ids, const int* reach, int size, uint64_t multiplier, int n,
                     uint64_t* mixed) const {
  const uint64_t* back = ids - size;
  for (int i = 0; i < n; ++i) mixed[i] ^= (size < reach[i] ? back[i] : pad_) * multiplier;
}

void EngramHash::rows(int table, const int32_t* tokens, int64_t history, int64_t n, const uint8_t* dead,
                      int64_t* out) const {
  const int n_columns = columns(), back = max_ngram_ - 1;
  const uint64_t* m = multipliers_[static_cast<size_t>(table)].data();
  const Column* column = columns_[static_cast<size_t>(table)].data();
  std::vector<uint64_t> ids(static_cast<size_t>(back + kBlock), pad_);
  int reach[kBlock];
  uint64_t mixed[kBlock];
  // How many positions, this one first, an n-gram may use before it meets a dead one or the start.
  int run = 0;
  const auto step = [&](int64_t at) { return run = dead != nullptr && dead[at] != 0 ? 0 : std::min(run + 1, max_ngram_); };
  for (int64_t at = std::max<int64_t>(0, history - back); at < history; ++at) step(at);

  for (int64_t first = 0; first < n; first += kBlock) {
    const int size = static_cast<int>(std::min<int64_t>(kBlock, n - first));
    const int64_t at = history + first;
    for (int i = -back; i < size; ++i)
      if (at + i >= 0) ids[static_cast<size_t>(back + i)] = token_map_[static_cast<size_t>(tokens[at + i])];
    for (int i = 0; i < size; ++i) {
      reach[i] = step(at + i);
      mixed[i] = 0;
    }
    mix(ids.data() + back, reach, 0, m[0], size, mixed);
    for (int s = 1; s <= back; ++s) {
      mix(ids.data() + back, reach, s, m[s], size, mixed);
      const Column* c = column + (s - 1) * n_heads_;
      int64_t* to = out + first * n_columns + (s - 1) * n_heads_;
      for (int i = 0; i < size; ++i, to += n_columns)
        for (int h = 0; h < n_heads_; ++h)
          to[h] = static_cast<int64_t>(remainder(mixed[i], c[h].prime, c[h].reciprocal) + c[h].offset);
    }
  }
}

}  // namespace ds4
