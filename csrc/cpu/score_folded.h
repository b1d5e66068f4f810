// Index scores once more, for machines with 8-bit dot products and rows of 128 elements: all four groups of a key and a
// head in one integer sum, so that numbers are converted, scaled and rounded once a head instead of once a group.
//
// Scales are powers of two. Where those of a head lie within a factor of 8 its codes are shifted to the least of them, and
// so are those of a key; both still fit into a byte. The sum over 128 elements is then exact in f32, as the sum of the
// four group terms is, so both are the same number; what a common power of two is taken out of rounds as before, as long
// as nothing comes near the ends of the exponent's range, which is looked at. A head that does not fit is done by groups; two
// blocks of keys of which one does not fit are left to score.h.
#pragma once

#include "cpu/score.h"

namespace ds4::cpu {
bool has_bf16_products();  // AVX-512-BF16 (dispatch.cpp)
}

DS4_CPU_NAMESPACE_BEGIN

#if defined(DS4_ISA_AVX512)

constexpr int kFoldDim = 128, kFoldGroups = kFoldDim / 32;
constexpr int kFoldSpread = 3;                      // between the exponents of the scales of a head or a key
constexpr int kFoldBias = 12 << kFoldSpread;        // makes bytes of a query unsigned, as the instruction wants one side
constexpr int kFoldRange = 30, kFoldKeyRange = 20;  // of exponents: 2^24 * 2^(30 + 30 + 20) * heads is far from the ends

// How values are rounded: not, by integer arithmetic, by AVX-512-BF16.
enum class Rounding { none, integers, instruction };

struct FoldedQuad {                        // four heads
  uint32_t codes[kFoldDim / 4][4];         // four biased codes of a head, in the order of the keys
  float weights[4];                        // folded: times the common scale
  float scales[kFoldGroups][4];            // where it is not
  bool folded;
};

struct FoldedKeys {  // 16 index rows
  alignas(64) int32_t codes[kFoldDim / 4][kScoreRows];  // four signed bytes of a row
  alignas(64) int32_t shift[kFoldGroups][kScoreRows];
  alignas(64) int32_t start[kFoldGroups][kScoreRows];  // what takes the bias off again
  alignas(64) float scale[kScoreRows];
  bool fits;
};

inline bool within(float x, int range) {  // a normal number whose exponent is at most so far from that of 1
  const int e = static_cast<int>((DS4_AS_UINT(x) >> 23) & 255u) - 127;
  return e >= -range && e <= range;
}

inline bool has_folded_scores() {
  static const bool has = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
  return has;
}

inline Rounding folded_rounding(bool round) {
  return !round ? Rounding::none : has_bf16_products() ? Rounding::instruction : Rounding::integers;
}

// False where a call's numbers are not what folding is exact for. out: [heads / 4].
inline bool fold_query(const int8_t* codes, const float* scales, const float* weights, int heads, FoldedQuad* out) {
  bool fits = heads % 4 == 0;
  for (int i = 0; i < heads * kFoldDim; ++i) fits = fits && codes[i] <= 12 && codes[i] >= -12;
  for (int i = 0; i < heads * kFoldGroups; ++i)
    fits = fits && within(scales[i], kFoldRange) && (DS4_AS_UINT(scales[i]) & 0x807fffffu) == 0u;
  for (int h = 0; h < heads; ++h) fits = fits && (weights[h] == 0.f || within(weights[h], kFoldRange));
  if (!fits) return false;
  for (int first = 0; first < heads; first += 4, ++out) {
    float least[4];
    out->folded = true;
    for (int x = 0; x < 4; ++x) {
      const float* s = scales + (first + x) * kFoldGroups;
      float most = least[x] = s[0];
      for (int g = 1; g < kFoldGroups; ++g) least[x] = s[g] < least[x] ? s[g] : least[x], most = s[g] > most ? s[g] : most;
      out->folded = out->folded && most <= least[x] * static_cast<float>(1 << kFoldSpread);
    }
    for (int x = 0; x < 4; ++x) {
      const int h = first + x;
      out->weights[x] = out->folded ? weights[h] * least[x] : weights[h];
      for (int g = 0; g < kFoldGroups; ++g) {
        const float s = out->scales[g][x] = scales[h * kFoldGroups + g];
        const int times = out->folded ? static_cast<int>(s / least[x]) : 1;
        const int8_t* q = codes + h * kFoldDim + g * 32;
        for (int j = 0; j < 8; ++j) {  // even elements of 8, then odd ones
          uint32_t four = 0;
          for (int i = 0; i < 4; ++i)
            four |= static_cast<uint32_t>(q[8 * (j / 2) + 2 * i + j % 2] * times + kFoldBias) << (8 * i);
          out->codes[g * 8 + j][x] = four;
        }
      }
    }
  }
  return true;
}

#define DS4_FOLD_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi")))

// Twice the value of an e2m1 code, shifted: of[16 * shift + code].
struct FoldCodes {
  alignas(64) int8_t of[64];
  constexpr FoldCodes() : of{} {
    constexpr int kTwice[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    for (int i = 0; i < 64; ++i) of[i] = static_cast<int8_t>((i % 16 < 8 ? 1 : -1) * (kTwice[i % 8] << (i / 16)));
  }
};
inline constexpr FoldCodes kFoldCodes;

// The scales of 16 rows: shifts, the common scale, whether all of them fit.
inline void fold_scales(const uint8_t* const* rows, FoldedKeys& to) {
  alignas(64) uint32_t four[kScoreRows];
  for (int e = 0; e < kScoreRows; ++e) std::memcpy(&four[e], rows[e] + kFoldDim / 2, 4);
  __m512i c[kFoldGroups], least, most;
  for (int g = 0; g < kFoldGroups; ++g) {
    c[g] = _mm512_and_si512(_mm512_srli_epi32(_mm512_load_si512(four), static_cast<unsigned>(8 * g)), _mm512_set1_epi32(255));
    least = g == 0 ? c[g] : _mm512_min_epi32(least, c[g]);
    most = g == 0 ? c[g] : _mm512_max_epi32(most, c[g]);
  }
  const __m512i spread = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
  for (int g = 0; g < kFoldGroups; ++g)  // sixteen times the shift in every byte of a row
    _mm512_store_si512(to.shift[g], _mm512_shuffle_epi8(_mm512_slli_epi32(_mm512_sub_epi32(c[g], least), 4), spread));
  _mm512_store_ps(to.scale, _mm512_castsi512_ps(_mm512_slli_epi32(least, 23)));
  const __mmask16 wide = _mm512_cmpgt_epi32_mask(_mm512_sub_epi32(most, least), _mm512_set1_epi32(kFoldSpread));
  const __mmask16 low = _mm512_cmplt_epi32_mask(least, _mm512_set1_epi32(127 - kFoldKeyRange));
  const __mmask16 high = _mm512_cmpgt_epi32_mask(most, _mm512_set1_epi32(127 + kFoldKeyRange));
  to.fits = (wide | low | high) == 0;
}

// One group of 16 rows, after fold_scales: their bytes turned, widened, shifted.
DS4_FOLD_TARGET DS4_INLINE void fold_group(const uint8_t* const* rows, int g, FoldedKeys& to) {
  const auto part = [&](int e) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[e] + 16 * g));
  };
  __m512i r[4], t[4];
  for (int i = 0; i < 4; ++i) {  // rows i, 4 + i, 8 + i, 12 + i, 128 bits each
    r[i] = _mm512_inserti32x4(_mm512_castsi128_si512(part(i)), part(4 + i), 1);
    r[i] = _mm512_inserti32x4(r[i], part(8 + i), 2);
    r[i] = _mm512_inserti32x4(r[i], part(12 + i), 3);
  }
  for (int i = 0; i < 2; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  r[0] = _mm512_unpacklo_epi64(t[0], t[2]), r[1] = _mm512_unpackhi_epi64(t[0], t[2]);
  r[2] = _mm512_unpacklo_epi64(t[1], t[3]), r[3] = _mm512_unpackhi_epi64(t[1], t[3]);
  const __m512i low = _mm512_set1_epi8(15), one = _mm512_set1_epi8(1);
  const __m512i table = _mm512_load_si512(kFoldCodes.of), shift = _mm512_load_si512(to.shift[g]);
  __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int i = 0; i < 4; ++i) {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    const __m512i even = _mm512_permutexvar_epi8(_mm512_ternarylogic_epi32(r[i], low, shift, kAndOr), table);
    const __m512i odd = _mm512_permutexvar_epi8(_mm512_ternarylogic_epi32(_mm512_srli_epi16(r[i], 4), low, shift, kAndOr), table);
    sum[0] = _mm512_dpbusd_epi32(sum[0], one, even), sum[1] = _mm512_dpbusd_epi32(sum[1], one, odd);
    _mm512_store_si512(to.codes[8 * g + 2 * i], even);
    _mm512_store_si512(to.codes[8 * g + 2 * i + 1], odd);
  }
  const __m512i all = _mm512_add_epi32(sum[0], sum[1]);  // times -96
  _mm512_store_si512(to.start[g], _mm512_sub_epi32(_mm512_slli_epi32(all, 5), _mm512_slli_epi32(all, 7)));
}

// Both to bf16. By instruction they come out in another order (FoldOrder), as its result is two vectors in one.
template <Rounding kRounding>
DS4_INLINE void round_two(__m512& a, __m512& b) {
  if constexpr (kRounding == Rounding::instruction) {
    __m512i v;  // as text: this file is compiled for machines without it, too
    __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(v) : "v"(b), "v"(a));
    a = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  } else if constexpr (kRounding == Rounding::integers) {
    a = bf16_numbers(a), b = bf16_numbers(b);
  }
}

// Where number i of two vectors is after round_two by instruction, twice.
struct FoldOrder {
  int32_t at[2 * kScoreRows];
  constexpr FoldOrder() : at{} {
    for (int i = 0; i < 2 * kScoreRows; ++i) {
      int p = i;
      for (int turn = 0; turn < 2; ++turn) p = (p % 2) * kScoreRows + p / 2;
      at[i] = p;
    }
  }
};

// The rows of two blocks.
struct FoldRows {
  const uint8_t* row[2][kScoreRows];
};

// Both blocks; of two that do not fit together only the scales.
DS4_FOLD_TARGET inline void fold_rows(const FoldRows& rows, FoldedKeys* to) {
  for (int b = 0; b < 2; ++b) fold_scales(rows.row[b], to[b]);
  for (int b = 0; b < 2 && to[0].fits && to[1].fits; ++b)
    for (int g = 0; g < kFoldGroups; ++g) fold_group(rows.row[b], g, to[b]);
}

// Adds the products of eight quads of four heads and two blocks of keys. As text: the compiler copies all eight sums each time.
#define DS4_FOLD_QUAD(key, quad)                                                     \
  "vmovdqa64 " #key "(%[k0]), %[a]\n\tvmovdqa64 " #key "(%[k1]), %[b]\n\t"            \
  "vpbroadcastd " #quad "(%[q]), %[c]\n\tvpbroadcastd 4+" #quad "(%[q]), %[d]\n\t"    \
  "vpdpbusd %[a], %[c], %[x0]\n\tvpdpbusd %[b], %[c], %[y0]\n\t"                      \
  "vpdpbusd %[a], %[d], %[x1]\n\tvpdpbusd %[b], %[d], %[y1]\n\t"                      \
  "vpbroadcastd 8+" #quad "(%[q]), %[c]\n\tvpbroadcastd 12+" #quad "(%[q]), %[d]\n\t" \
  "vpdpbusd %[a], %[c], %[x2]\n\tvpdpbusd %[b], %[c], %[y2]\n\t"                      \
  "vpdpbusd %[a], %[d], %[x3]\n\tvpdpbusd %[b], %[d], %[y3]\n\t"
DS4_INLINE void fold_dots(const FoldedKeys* keys, const FoldedQuad& q, int g, __m512i (&acc)[2][4]) {
  __m512i a, b, c, d;
  __asm__(DS4_FOLD_QUAD(0, 0) DS4_FOLD_QUAD(64, 16) DS4_FOLD_QUAD(128, 32) DS4_FOLD_QUAD(192, 48)
          DS4_FOLD_QUAD(256, 64) DS4_FOLD_QUAD(320, 80) DS4_FOLD_QUAD(384, 96) DS4_FOLD_QUAD(448, 112)
          : [x0] "+v"(acc[0][0]), [x1] "+v"(acc[0][1]), [x2] "+v"(acc[0][2]), [x3] "+v"(acc[0][3]), [y0] "+v"(acc[1][0]),
            [y1] "+v"(acc[1][1]), [y2] "+v"(acc[1][2]), [y3] "+v"(acc[1][3]), [a] "=&v"(a), [b] "=&v"(b), [c] "=&v"(c),
            [d] "=&v"(d)
          : [k0] "r"(keys[0].codes[8 * g]), [k1] "r"(keys[1].codes[8 * g]), [q] "r"(q.codes[8 * g]),
            "m"(keys[0].codes), "m"(keys[1].codes), "m"(q.codes));
}

// relu of the products of four heads and two blocks of keys, without the keys' scales.
DS4_FOLD_TARGET DS4_INLINE void fold_products(const FoldedKeys* keys, const __m512i* start, const FoldedQuad& q, __m512 (&d)[2][4]) {
  __m512i acc[2][4];
  if (q.folded) {
    for (int b = 0; b < 2; ++b)
      for (int x = 0; x < 4; ++x) acc[b][x] = start[b];
    for (int g = 0; g < kFoldGroups; ++g) fold_dots(keys, q, g, acc);
    for (int b = 0; b < 2; ++b)
      for (int x = 0; x < 4; ++x) d[b][x] = _mm512_cvtepi32_ps(_mm512_max_epi32(acc[b][x], _mm512_setzero_si512()));
    return;
  }
  for (int b = 0; b < 2; ++b)
    for (int x = 0; x < 4; ++x) d[b][x] = _mm512_setzero_ps();
  for (int g = 0; g < kFoldGroups; ++g) {
    for (int b = 0; b < 2; ++b)
      for (int x = 0; x < 4; ++x) acc[b][x] = _mm512_load_si512(keys[b].start[g]);
    fold_dots(keys, q, g, acc);
    for (int b = 0; b < 2; ++b)
      for (int x = 0; x < 4; ++x)
        d[b][x] = _mm512_add_ps(d[b][x], _mm512_mul_ps(_mm512_cvtepi32_ps(acc[b][x]), _mm512_set1_ps(q.scales[g][x])));
  }
  for (int b = 0; b < 2; ++b)
    for (int x = 0; x < 4; ++x) d[b][x] = _mm512_max_ps(d[b][x], _mm512_setzero_ps());
}

// Scores of two blocks of keys. Meanwhile the `next` two are made ready (none if null): shuffles and shifts in the shadow of
// products, which wait for other units.
template <Rounding kRounding>
DS4_FOLD_TARGET void score_two_blocks(const FoldedKeys* keys, const FoldedQuad* query, int heads, FoldedKeys* next, const FoldRows& rows,
                                  float* out) {
  const int units = next == nullptr ? 0 : 2 * (1 + kFoldGroups);
  __m512i start[2];
  __m512 sum[2];
  for (int b = 0; b < 2; ++b) {
    sum[b] = _mm512_setzero_ps();
    start[b] = _mm512_load_si512(keys[b].start[0]);
    for (int g = 1; g < kFoldGroups; ++g) start[b] = _mm512_add_epi32(start[b], _mm512_load_si512(keys[b].start[g]));
  }
  for (int i = 0, unit = 0; i < heads / 4; ++i) {
    __m512 d[2][4];
    fold_products(keys, start, query[i], d);
    for (; unit * (heads / 4) < units * (i + 1); ++unit) {
      const int b = unit / (1 + kFoldGroups), g = unit % (1 + kFoldGroups) - 1;
      if (g < 0)
        fold_scales(rows.row[b], next[b]);
      else
        fold_group(rows.row[b], g, next[b]);
    }
    for (int x = 0; x < 4; ++x) {
      const __m512 w = _mm512_set1_ps(query[i].weights[x]);
      round_two<kRounding>(d[0][x], d[1][x]);
      d[0][x] = _mm512_mul_ps(d[0][x], w), d[1][x] = _mm512_mul_ps(d[1][x], w);
      round_two<kRounding>(d[0][x], d[1][x]);
      for (int b = 0; b < 2; ++b) sum[b] = _mm512_add_ps(sum[b], d[b][x]);
    }
  }
  static constexpr FoldOrder kOrder;
  for (int b = 0; b < 2; ++b) {
    __m512 total = sum[b];
    if constexpr (kRounding == Rounding::instruction)
      total = _mm512_permutex2var_ps(sum[0], _mm512_loadu_si512(kOrder.at + b * kScoreRows), sum[1]);
    total = _mm512_mul_ps(total, _mm512_load_ps(keys[b].scale));
    _mm512_storeu_ps(out + b * kScoreRows, kRounding == Rounding::none ? total : bf16_numbers(total));
  }
}

inline void score_folded(Rounding rounding, const FoldedKeys* keys, const FoldedQuad* query, int heads, FoldedKeys* next,
                         const FoldRows& rows, float* out) {
  switch (rounding) {
    case Rounding::none: return score_two_blocks<Rounding::none>(keys, query, heads, next, rows, out);
    case Rounding::integers: return score_two_blocks<Rounding::integers>(keys, query, heads, next, rows, out);
    case Rounding::instruction: return score_two_blocks<Rounding::instruction>(keys, query, heads, next, rows, out);
  }
}
#endif

DS4_CPU_NAMESPACE_END
