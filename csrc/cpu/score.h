// Scores of 16 index rows against one query: exact integer products of fp4 codes per group of 32, then scaled group
// terms, heads in ascending order (docs/numerics.md, R4).
#pragma once

#include "cpu/simd.h"

DS4_CPU_NAMESPACE_BEGIN

constexpr int kScoreRows = 16;

// Twice the two e2m1 values of a byte as two int16 (low nibble in the low half).
struct PairTable {
  int32_t v[256];
};

inline void fill_pair_table(PairTable& t) {
  for (uint32_t b = 0; b < 256; ++b) {
    const uint32_t lo = static_cast<uint32_t>(ds4_e2m1_twice(b & 15u)) & 0xffffu;
    const uint32_t hi = static_cast<uint32_t>(ds4_e2m1_twice(b >> 4)) << 16;
    t.v[b] = static_cast<int32_t>(hi | lo);
  }
}

struct KeyBlock {  // 16 index rows, element pairs first
  int32_t* pairs;  // [dim / 2][16]
  float* scales;   // [dim / 32][16]
};

inline void load_keys(const PairTable& table, const uint8_t* const* rows, int n, int dim, KeyBlock out) {
  for (int e = 0; e < kScoreRows; ++e) {
    const uint8_t* row = rows[e < n ? e : 0];
    for (int b = 0; b < dim / 2; ++b) out.pairs[b * kScoreRows + e] = table.v[row[b]];
    for (int g = 0; g < dim / 32; ++g) out.scales[g * kScoreRows + e] = ds4_e8m0(row[dim / 2 + g]);
  }
}

// acc[e] = sum over 16 pairs of the products of query and key codes.
DS4_INLINE void group_products(const int32_t* pairs, const int32_t* query, int32_t* acc) {
#if defined(DS4_ISA_AVX512)
  __m512i s = _mm512_setzero_si512();
  for (int b = 0; b < 16; ++b)
    s = _mm512_add_epi32(s, _mm512_madd_epi16(_mm512_loadu_si512(pairs + b * 16), _mm512_set1_epi32(query[b])));
  _mm512_storeu_si512(acc, s);
#elif defined(DS4_ISA_AVX2)
  __m256i s0 = _mm256_setzero_si256(), s1 = _mm256_setzero_si256();
  for (int b = 0; b < 16; ++b) {
    const __m256i q = _mm256_set1_epi32(query[b]);
    const __m256i* p = reinterpret_cast<const __m256i*>(pairs + b * 16);
    s0 = _mm256_add_epi32(s0, _mm256_madd_epi16(_mm256_loadu_si256(p), q));
    s1 = _mm256_add_epi32(s1, _mm256_madd_epi16(_mm256_loadu_si256(p + 1), q));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc), s0);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc) + 1, s1);
#else
  for (int e = 0; e < kScoreRows; ++e) acc[e] = 0;
  for (int b = 0; b < 16; ++b) {
    const int32_t q0 = static_cast<int16_t>(query[b] & 0xffff), q1 = query[b] >> 16;
    for (int e = 0; e < kScoreRows; ++e) {
      const int32_t p = pairs[b * kScoreRows + e];
      acc[e] += static_cast<int16_t>(p & 0xffff) * q0 + (p >> 16) * q1;
    }
  }
#endif
}

// out[e] = score of key e. query: [heads][dim / 2] int16 pairs; scales [heads][dim / 32] (a quarter of the scale).
inline void score_keys(KeyBlock keys, const int32_t* query, const float* scales, const float* weights, int heads,
                       int dim, bool round, float* out) {
  const int groups = dim / 32;
  float total[kScoreRows] = {};
  for (int h = 0; h < heads; ++h) {
    float d[kScoreRows];
    for (int g = 0; g < groups; ++g) {
      int32_t acc[kScoreRows];
      group_products(keys.pairs + g * 16 * kScoreRows, query + (h * groups + g) * 16, acc);
      const float s = scales[h * groups + g];
      const float* ks = keys.scales + g * kScoreRows;
      if (g == 0)
        for (int e = 0; e < kScoreRows; ++e) d[e] = (static_cast<float>(acc[e]) * s) * ks[e];
      else
        for (int e = 0; e < kScoreRows; ++e) d[e] = d[e] + (static_cast<float>(acc[e]) * s) * ks[e];
    }
    const float w = weights[h];
    if (round)
      for (int e = 0; e < kScoreRows; ++e) total[e] = total[e] + ds4_bf16(ds4_max(ds4_bf16(d[e]), 0.f) * w);
    else
      for (int e = 0; e < kScoreRows; ++e) total[e] = total[e] + ds4_max(d[e], 0.f) * w;
  }
  for (int e = 0; e < kScoreRows; ++e) out[e] = round ? ds4_bf16(total[e]) : total[e];
}

#if defined(DS4_ISA_AVX512)
// The same scores by 8-bit dot products (VNNI), where the machine has them: keys as unsigned bytes code + 12, whose
// excess of 12 times the sum of the query's codes is taken off in the start value. Integers, so exact in any order.
constexpr int kByteKeyBias = 12;

inline bool has_byte_dots() {
  static const bool has = __builtin_cpu_supports("avx512vnni") != 0;
  return has;
}

// What four heads bring to a group of 32 elements, in the order in which the kernel below reads it: one stream of them.
struct ByteQuery {
  int32_t quads[8][4];  // four codes of a head, in the order of the keys: even elements of 8, then odd ones
  int32_t start[4];
  float scales[4];
};

// heads is a multiple of 4; out: [heads / 4][dim / 32].
inline void byte_query(const int8_t* codes, const float* scales, int heads, int dim, ByteQuery* out) {
  const int groups = dim / 32;
  for (int h = 0; h < heads; ++h)
    for (int g = 0; g < groups; ++g) {
      const int8_t* q = codes + (h * groups + g) * 32;
      ByteQuery& to = out[(h / 4) * groups + g];
      int32_t sum = 0;
      for (int i = 0; i < 32; ++i) sum += q[i];
      to.start[h % 4] = -kByteKeyBias * sum;
      to.scales[h % 4] = scales[h * groups + g];
      for (int j = 0; j < 8; ++j) {
        int8_t four[4];
        for (int i = 0; i < 4; ++i) four[i] = q[8 * (j / 2) + 2 * i + j % 2];
        std::memcpy(&to.quads[j][h % 4], four, 4);
      }
    }
}

// Sixteen dwords of each of sixteen rows, turned: out[c] holds dword c of all rows.
inline void turn_sixteen(const uint8_t* const* rows, int n, int at, __m512i* out) {
  __m512i r[16], t[16];
  for (int e = 0; e < 16; ++e) r[e] = _mm512_loadu_si512(rows[e < n ? e : 0] + at);
  for (int e = 0; e < 16; e += 2) {
    t[e] = _mm512_unpacklo_epi32(r[e], r[e + 1]);
    t[e + 1] = _mm512_unpackhi_epi32(r[e], r[e + 1]);
  }
  for (int e = 0; e < 16; e += 4)  // r[e + j]: dwords j, 4 + j, 8 + j, 12 + j of rows e .. e + 3, a 128-bit block each
    for (int j = 0; j < 2; ++j) {
      r[e + 2 * j] = _mm512_unpacklo_epi64(t[e + j], t[e + 2 + j]);
      r[e + 2 * j + 1] = _mm512_unpackhi_epi64(t[e + j], t[e + 2 + j]);
    }
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), b = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88), d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    out[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    out[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    out[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    out[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

// Keys of 16 rows: [dim / 4][16] quads of bytes; scales [dim / 32][16].
inline void load_byte_keys(const uint8_t* const* rows, int n, int dim, KeyBlock out) {
  const __m512i low = _mm512_set1_epi8(15);
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));  // twice the value, plus 12
  const auto expand = [&](__m512i w, int c) {
    _mm512_storeu_si512(out.pairs + (2 * c) * kScoreRows, _mm512_shuffle_epi8(table, _mm512_and_si512(w, low)));
    _mm512_storeu_si512(out.pairs + (2 * c + 1) * kScoreRows,
                        _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(w, 4), low)));
  };
  int c = 0;
  for (; c + 16 <= dim / 8; c += 16) {
    __m512i turned[16];
    turn_sixteen(rows, n, c * 4, turned);
    for (int j = 0; j < 16; ++j) expand(turned[j], c + j);
  }
  for (; c < dim / 8; ++c) {
    alignas(64) int32_t column[kScoreRows];
    for (int e = 0; e < kScoreRows; ++e) std::memcpy(&column[e], rows[e < n ? e : 0] + c * 4, 4);
    expand(_mm512_load_si512(column), c);
  }
  for (int g = 0; g < dim / 32; ++g) {
    alignas(64) uint32_t codes[kScoreRows];
    for (int e = 0; e < kScoreRows; ++e) codes[e] = rows[e < n ? e : 0][dim / 2 + g];
    for (int e = 0; e < kScoreRows; ++e) out.scales[g * kScoreRows + e] = DS4_AS_FLOAT(codes[e] << 23);  // as ds4_e8m0
  }
}

// bf16 rounding of a value that is a number, or a NaN whose lower half is zero (what arithmetic with a bf16 NaN gives).
DS4_INLINE __m512 bf16_numbers(__m512 x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Four heads at a time for kBlocks x 16 keys, from integers to what they add to the scores; heads is a multiple of 4. Two
// blocks of keys share each number of the query: a machine with one wide load a cycle (Zen 4) waits for those otherwise.
// Where values are rounded, weights are bf16 numbers. relu comes before the rounding, which changes nothing and leaves no
// NaN to round; nor does it tell a sum that began with zero from one that began with its first term, which may be -0.
template <bool kRound, int kBlocks>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))) void score_byte_heads(
    const KeyBlock* keys, const ByteQuery* query, const float* weights, int heads, int dim, float* total) {
  const int groups = dim / 32;
  __m512 sum[kBlocks];
  for (int b = 0; b < kBlocks; ++b) sum[b] = _mm512_setzero_ps();
  for (int h = 0; h < heads; h += 4) {
    __m512 d[kBlocks][4];
    for (int b = 0; b < kBlocks; ++b)
      for (int x = 0; x < 4; ++x) d[b][x] = _mm512_setzero_ps();
    for (int g = 0; g < groups; ++g, ++query) {
      __m512i acc[kBlocks][4];
      for (int x = 0; x < 4; ++x)
        for (int b = 0; b < kBlocks; ++b) acc[b][x] = _mm512_set1_epi32(query->start[x]);
      for (int j = 0; j < 8; ++j) {
        __m512i key[kBlocks];
        for (int b = 0; b < kBlocks; ++b) key[b] = _mm512_loadu_si512(keys[b].pairs + (g * 8 + j) * kScoreRows);
        for (int x = 0; x < 4; ++x) {
          const __m512i quad = _mm512_set1_epi32(query->quads[j][x]);
          for (int b = 0; b < kBlocks; ++b) acc[b][x] = _mm512_dpbusd_epi32(acc[b][x], key[b], quad);
        }
      }
      for (int b = 0; b < kBlocks; ++b) {
        const __m512 ks = _mm512_loadu_ps(keys[b].scales + g * kScoreRows);
        for (int x = 0; x < 4; ++x)
          d[b][x] = _mm512_add_ps(
              d[b][x], _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(acc[b][x]), _mm512_set1_ps(query->scales[x])), ks));
      }
    }
    for (int x = 0; x < 4; ++x) {
      const __m512 w = _mm512_set1_ps(weights[h + x]);
      for (int b = 0; b < kBlocks; ++b) {
        const __m512 positive = _mm512_max_ps(d[b][x], _mm512_setzero_ps());  // NaN gives the second operand
        if constexpr (kRound)
          sum[b] = _mm512_add_ps(sum[b], bf16_numbers(_mm512_mul_ps(bf16_numbers(positive), w)));
        else
          sum[b] = _mm512_add_ps(sum[b], _mm512_mul_ps(positive, w));
      }
    }
  }
  for (int b = 0; b < kBlocks; ++b) _mm512_storeu_ps(total + b * kScoreRows, sum[b]);
}

// Scores of kBlocks x 16 keys.
template <int kBlocks>
void score_byte_keys(const KeyBlock* keys, const ByteQuery* query, const float* weights, int heads, int dim, bool round, float* out) {
  float total[kBlocks * kScoreRows];
  if (round)
    score_byte_heads<true, kBlocks>(keys, query, weights, heads, dim, total);
  else
    score_byte_heads<false, kBlocks>(keys, query, weights, heads, dim, total);
  for (int e = 0; e < kBlocks * kScoreRows; ++e) out[e] = round ? ds4_bf16(total[e]) : total[e];
}
#endif

DS4_CPU_NAMESPACE_END
