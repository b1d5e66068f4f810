// The k best of n scores: higher score first, then the lower index; -0 equals 0; NaN below everything.
//
// Exact: radix select over order-preserving keys: a histogram of the top bits finds the bin of the cut, the members of
// that bin are gathered and the exact cut among them is found by repeated partition. The result comes out in index order.
//
// Bounded, for long lists: the k-th largest of the maxima of disjoint sets is a lower bound of the k-th best score, because
// k sets hold a score as good. One pass finds the maxima, one gathers the few scores that reach the bound, and the exact
// method chooses among them. When too many reach it (many equal scores), the exact method does the whole list.
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

// top_k by the exact method.
inline int64_t top_k_exact(const float* scores, int64_t n, int64_t k, int32_t* out, uint64_t* bin) {
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

constexpr int kSetLanes = 16;

// Largest score of each of the sets {j, j + 16, j + 32, ...} of every `run` scores (a multiple of 16). NaN never counts.
inline void set_maxima(const float* scores, int64_t n_runs, int64_t run, float* maxima) {
  for (int64_t r = 0; r < n_runs; ++r) {
    float m[kSetLanes];
    for (int l = 0; l < kSetLanes; ++l) m[l] = -__builtin_inff();
    const float* s = scores + r * run;
    for (int64_t i = 0; i < run; i += kSetLanes)
      for (int l = 0; l < kSetLanes; ++l) m[l] = s[i + l] > m[l] ? s[i + l] : m[l];
    for (int l = 0; l < kSetLanes; ++l) maxima[r * kSetLanes + l] = m[l];
  }
}

// Scores of at least `bound` among scores[begin .. end - 1], with their positions; at most `room` (then room + 1).
inline int64_t gather_from(const float* scores, int64_t n, float bound, int32_t* where, float* what, int64_t room) {
  int64_t c = 0, i = 0;
#if defined(DS4_ISA_AVX512)
  const __m512 b = _mm512_set1_ps(bound);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 16 <= n; i += 16) {
    const __m512 s = _mm512_loadu_ps(scores + i);
    const __mmask16 hit = _mm512_cmp_ps_mask(s, b, _CMP_GE_OQ);
    if (hit == 0) continue;
    if (c + 16 > room) return room + 1;
    _mm512_mask_compressstoreu_ps(what + c, hit, s);
    _mm512_mask_compressstoreu_epi32(where + c, hit, _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i))));
    c += __builtin_popcount(hit);
  }
#endif
  for (; i < n; ++i) {
    if (!(scores[i] >= bound)) continue;
    if (c >= room) return room + 1;
    what[c] = scores[i];
    where[c++] = static_cast<int32_t>(i);
  }
  return c;
}

// Writes the positions (ascending) of the k best of n scores to out; returns how many. Scores of minus infinity are
// never chosen. `bin` holds n + 1 64-bit numbers of scratch.
inline int64_t top_k(const float* scores, int64_t n, int64_t k, int32_t* out, uint64_t* bin) {
  constexpr int64_t kShortest = 4096;
  const int64_t sets = 4 * k > 1024 ? 4 * k : 1024;  // so many that few scores but the best reach the bound
  int64_t run = n / (sets / kSetLanes + 1) / kSetLanes * kSetLanes;
  if (n < kShortest || run < 2 * kSetLanes) return top_k_exact(scores, n, k, out, bin);
  const int64_t n_runs = n / run, room = n / 8;
  float* maxima = reinterpret_cast<float*>(bin);               // n_runs * 16 <= n / 2 numbers
  float* what = reinterpret_cast<float*>(bin + n / 4);         // room + 16 numbers
  int32_t* where = reinterpret_cast<int32_t*>(bin + n / 4 + n / 8);
  uint64_t* inner = bin + n / 2;                               // n / 2 numbers
  set_maxima(scores, n_runs, run, maxima);
  if (top_k_exact(maxima, n_runs * kSetLanes, k, out, inner) < k) return top_k_exact(scores, n, k, out, bin);
  float bound = __builtin_inff();
  for (int64_t j = 0; j < k; ++j) bound = maxima[out[j]] < bound ? maxima[out[j]] : bound;
  const int64_t c = gather_from(scores, n, bound, where, what, room);
  if (c > room) return top_k_exact(scores, n, k, out, bin);
  const int64_t got = top_k_exact(what, c, k, out, inner);
  for (int64_t j = 0; j < got; ++j) out[j] = where[out[j]];
  return got;
}

DS4_CPU_NAMESPACE_END
