// The k best of n scores: higher score first, then the lower index; -0 equals 0; NaN and minus infinity are never chosen.
// The result comes out in index order.
//
// The cut (the k-th best score) is found bit by bit: the largest number that at least k scores reach. Each bit is one
// pass of comparisons, so a short list is done at once. A long list is thinned out first: the k-th largest of the
// maxima of disjoint sets is a lower bound of the cut, because k sets hold a score as good. One pass finds the maxima,
// one keeps the few scores that reach the bound. Sets are {j, j + S, j + 2 S, ...}, so that neighbours, which tend to
// be alike, are in different ones. Two kinds of list keep many scores: where most are equal to the bound, the bound is
// the cut; any other is cut bit by bit as it is, at most 32 passes.
#pragma once

#include "cpu/simd.h"

DS4_CPU_NAMESPACE_BEGIN

// The inverse of ds4_order_key, but for zeros and NaN.
DS4_INLINE float score_of_key(uint32_t key) { return DS4_AS_FLOAT((key & 0x80000000u) != 0u ? key & 0x7fffffffu : ~key); }

// How many scores reach t, or are above it.
template <bool kAbove>
inline int64_t count_from(const float* s, int64_t n, float t) {
  int64_t i = 0, c = 0;
#if defined(DS4_ISA_AVX512)
  const __m512 bound = _mm512_set1_ps(t);
  __m512i sum[4];
  for (int j = 0; j < 4; ++j) sum[j] = _mm512_setzero_si512();
  const __m512i one = _mm512_set1_epi32(1);
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) {
      const __mmask16 hit = _mm512_cmp_ps_mask(_mm512_loadu_ps(s + i + 16 * j), bound, kAbove ? _CMP_GT_OQ : _CMP_GE_OQ);
      sum[j] = _mm512_mask_add_epi32(sum[j], hit, sum[j], one);
    }
  c = _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_add_epi32(sum[0], sum[1]), _mm512_add_epi32(sum[2], sum[3])));
#endif
  int32_t rest = 0;
  for (; i < n; ++i) rest += (kAbove ? s[i] > t : s[i] >= t) ? 1 : 0;
  return c + rest;
}

// The largest number that at least k scores reach, but for the lowest `coarse` bits, which may be too low: between
// `low` (reached by k scores) and `high` (no score is above it).
inline float kth_best(const float* s, int64_t n, int64_t k, float low, float high, int coarse) {
  const uint32_t lo = ds4_order_key(low), hi = ds4_order_key(high);
  if (lo == hi) return low;
  int bit = 31 - __builtin_clz(lo ^ hi);
  uint32_t t = lo & ~((2u << bit) - 1u);
  for (; bit >= coarse; --bit)
    if (count_from<false>(s, n, score_of_key(t | (1u << bit))) >= k) t |= 1u << bit;
  const float cut = score_of_key(t);
  return cut >= low ? cut : low;  // coarse bits, or a number that is flushed to zero
}

// The positions (`where` names them, or they are themselves) of all scores above `cut` and of the first `ties` equal to it.
inline int64_t take_from(const float* s, const int32_t* where, int64_t n, float cut, int64_t ties, int32_t* out) {
  int64_t m = 0, i = 0;
#if defined(DS4_ISA_AVX512)
  const __m512 t = _mm512_set1_ps(cut);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 16 <= n; i += 16) {
    const __m512 v = _mm512_loadu_ps(s + i);
    uint32_t equal = _mm512_cmp_ps_mask(v, t, _CMP_EQ_OQ);
    uint32_t hit = _mm512_cmp_ps_mask(v, t, _CMP_GT_OQ);
    if ((hit | equal) == 0) continue;
    if (ties == 0) {
      equal = 0;
    } else {
      while (__builtin_popcount(equal) > ties) equal &= ~(0x80000000u >> __builtin_clz(equal));  // the highest index goes
      ties -= __builtin_popcount(equal);
    }
    hit |= equal;
    if (hit == 0) continue;
    const __m512i at = where != nullptr ? _mm512_loadu_si512(where + i) : _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
    const int c = __builtin_popcount(hit);
    _mm512_mask_storeu_epi32(out + m, static_cast<__mmask16>((1u << c) - 1u), _mm512_maskz_compress_epi32(static_cast<__mmask16>(hit), at));
    m += c;
  }
#endif
  for (; i < n; ++i) {
    if (!(s[i] >= cut)) continue;
    if (s[i] == cut && --ties < 0) {
      ties = 0;
      continue;
    }
    out[m++] = where != nullptr ? where[i] : static_cast<int32_t>(i);
  }
  return m;
}

#if defined(DS4_ISA_AVX512)
// Appends the scores s[at .. at + 15] that `hit` names; writes 16 places.
DS4_INLINE void keep_sixteen(const float* s, int64_t at, __mmask16 hit, int32_t* where, float* what, int64_t& c) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_ps(what + c, _mm512_maskz_compress_ps(hit, _mm512_loadu_ps(s + at)));
  _mm512_storeu_si512(where + c, _mm512_maskz_compress_epi32(hit, _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(at)))));
  c += __builtin_popcount(hit);
}
#endif

// Scores of at least `bound` with their positions; at most `room`, else room + 1.
inline int64_t gather_from(const float* s, int64_t n, float bound, int32_t* where, float* what, int64_t room) {
  int64_t c = 0, i = 0;
#if defined(DS4_ISA_AVX512)
  const __m512 b = _mm512_set1_ps(bound);
  for (; i + 64 <= n; i += 64) {  // mostly nothing: four vectors, one question
    __mmask16 hit[4];
    for (int j = 0; j < 4; ++j) hit[j] = _mm512_cmp_ps_mask(_mm512_loadu_ps(s + i + 16 * j), b, _CMP_GE_OQ);
    if ((hit[0] | hit[1] | hit[2] | hit[3]) == 0) continue;
    if (c + 64 > room) return room + 1;
    for (int j = 0; j < 4; ++j)
      if (hit[j] != 0) keep_sixteen(s, i + 16 * j, hit[j], where, what, c);
  }
#endif
  for (; i < n; ++i) {
    if (!(s[i] >= bound)) continue;
    if (c >= room) return room + 1;
    what[c] = s[i];
    where[c++] = static_cast<int32_t>(i);
  }
  return c;
}

// Largest score of each of the `sets` (a multiple of 16) sets {j, j + sets, ...}. NaN never counts.
inline void set_maxima(const float* s, int64_t n, int sets, float* maxima) {
  for (int j = 0; j < sets; ++j) maxima[j] = -__builtin_inff();
  int64_t i = 0;
#if defined(DS4_ISA_AVX512)
  for (; i + 4 * sets <= n; i += 4 * sets)
    for (int j = 0; j < sets; j += 16) {
      __m512 m = _mm512_loadu_ps(maxima + j);  // the second operand is the answer when the first is NaN
      for (int64_t q = 0; q < 4; ++q) m = _mm512_max_ps(_mm512_loadu_ps(s + i + q * sets + j), m);
      _mm512_storeu_ps(maxima + j, m);
    }
#endif
  for (; i < n; i += sets) {
    const int64_t most = n - i < sets ? n - i : sets;
    for (int64_t j = 0; j < most; ++j) maxima[j] = s[i + j] > maxima[j] ? s[i + j] : maxima[j];
  }
}

inline float best_of(const float* s, int64_t n) {
  float lane[16];
  for (float& m : lane) m = -__builtin_inff();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int l = 0; l < 16; ++l) lane[l] = s[i + l] > lane[l] ? s[i + l] : lane[l];
  for (; i < n; ++i) lane[0] = s[i] > lane[0] ? s[i] : lane[0];
  float m = lane[0];
  for (int l = 1; l < 16; ++l) m = lane[l] > m ? lane[l] : m;
  return m;
}

// The choice by its cut, which is at least `low`; more than k scores are above minus infinity.
inline int64_t top_k_cut(const float* s, const int32_t* where, int64_t n, int64_t k, float low, int32_t* out) {
  const float cut = kth_best(s, n, k, low, best_of(s, n), 0);
  return take_from(s, where, n, cut, k - count_from<true>(s, n, cut), out);
}

constexpr int kCoarseBits = 12;  // a bound of the cut need not be exact

// Writes the positions (ascending) of the k best of n scores to out; returns how many. Scores of minus infinity are
// never chosen. `bin` holds n + 1 64-bit numbers of scratch.
inline int64_t top_k(const float* scores, int64_t n, int64_t k, int32_t* out, uint64_t* bin) {
  constexpr int64_t kShortest = 4096;
  const float lowest = -3.402823466e38f, none = -__builtin_inff();
  if (k <= 0) return 0;
  const int64_t sets = ((4 * k > 1024 ? 4 * k : 1024) + 15) & ~int64_t{15};  // many: few but the best reach the bound
  if (n < kShortest || 8 * sets > n) {
    if (count_from<true>(scores, n, none) <= k) return take_from(scores, nullptr, n, none, 0, out);
    return top_k_cut(scores, nullptr, n, k, lowest, out);
  }
  float* maxima = reinterpret_cast<float*>(bin);  // sets <= n / 8 numbers
  set_maxima(scores, n, static_cast<int>(sets), maxima);
  if (count_from<true>(maxima, sets, none) < k) {  // nearly everything is minus infinity
    if (count_from<true>(scores, n, none) <= k) return take_from(scores, nullptr, n, none, 0, out);
    return top_k_cut(scores, nullptr, n, k, lowest, out);
  }
  const float bound = kth_best(maxima, sets, k, lowest, best_of(maxima, sets), kCoarseBits);
  const int64_t room = n / 2;
  float* what = reinterpret_cast<float*>(bin + n / 8);
  int32_t* where = reinterpret_cast<int32_t*>(bin + n / 8 + n / 4);
  const int64_t c = gather_from(scores, n, bound, where, what, room);
  if (c <= room) return top_k_cut(what, where, c, k, bound, out);
  // Many equal scores: the cut is often the least of the maxima that count.
  const float exact = kth_best(maxima, sets, k, bound, best_of(maxima, sets), 0);
  const int64_t above = count_from<true>(scores, n, exact);
  if (above < k) return take_from(scores, nullptr, n, exact, k - above, out);
  return top_k_cut(scores, nullptr, n, k, exact, out);
}

DS4_CPU_NAMESPACE_END
