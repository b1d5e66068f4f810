// The k best of n scores: higher score first, then the lower index; -0 equals 0; NaN below everything.
//
// Radix select over order-preserving keys: a histogram of the top bits finds the bin of the cut, the members of
// that bin are gathered and the exact cut among them is found by repeated partition. The result comes out in index order.
#pragma once

#include "cpu/simd.h"

DS4_CPU_NAMESPACE_BEGIN

constexpr int kTopBits = 11;
constexpr int kTopBins = 1 << kTopBits;

// Descending order of (key, then lower index) as one number.
DS4_INLINE uint64_t ranked(uint32_t key, int64_t i) { return (static_cast<uint64_t>(key) << 32) | (0xffffffffu - static_cast<uint32_t>(i)); }

// The value of the r-th largest (r >= 1) of m numbers; reorders them.
inline uint64_t nth_largest(uint64_t* v, int64_t m, int64_t r) {
  int64_t lo = 0, hi = m - 1, want = r - 1;
  while (lo < hi) {
    const int64_t mid = lo + (hi - lo) / 2;
    const uint64_t a = v[lo], b = v[mid], c = v[hi];
    const uint64_t pivot = a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b));
    int64_t i = lo, j = hi;
    while (i <= j) {
      while (v[i] > pivot) ++i;
      while (v[j] < pivot) --j;
      if (i <= j) {
        const uint64_t t = v[i];
        v[i++] = v[j];
        v[j--] = t;
      }
    }
    if (want <= j)
      hi = j;
    else if (want >= i)
      lo = i;
    else
      return v[want];
  }
  return v[want];
}

// Writes the positions (ascending) of the k best of n scores to out; returns how many. Scores of minus infinity are
// never chosen. `bin` holds n 64-bit numbers of scratch.
inline int64_t top_k(const float* scores, int64_t n, int64_t k, int32_t* out, uint64_t* bin) {
  const uint32_t none = ds4_order_key(DS4_AS_FLOAT(0xff800000u));
  int64_t live = 0;
  uint32_t histogram[kTopBins];
  std::memset(histogram, 0, sizeof histogram);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = ds4_order_key(scores[i]);
    if (key <= none) continue;
    ++live;
    ++histogram[key >> (32 - kTopBits)];
  }
  int64_t m = 0;
  if (live <= k) {
    for (int64_t i = 0; i < n; ++i)
      if (ds4_order_key(scores[i]) > none) out[m++] = static_cast<int32_t>(i);
    return m;
  }
  int64_t above = 0;
  int b = kTopBins - 1;
  while (above + histogram[b] < k) above += histogram[b--];
  int64_t members = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = ds4_order_key(scores[i]);
    if (static_cast<int>(key >> (32 - kTopBits)) == b && key > none) bin[members++] = ranked(key, i);
  }
  const uint64_t cut = nth_largest(bin, members, k - above);
  for (int64_t i = 0; i < n; ++i)
    if (ranked(ds4_order_key(scores[i]), i) >= cut) out[m++] = static_cast<int32_t>(i);
  return m;
}

DS4_CPU_NAMESPACE_END
