// Decoders of weights that are bfloat16 numbers: pairs of them, as VDPBF16PS takes them (cpu/pairs.h).
//
// One decoder per weight row. get<E>(i): 16 pairs of the 128 elements from i on; the upper half of a pair is of the
// first 64, the lower of the others. kLayout as in fast_decoders.h, in both halves.
#pragma once

#include "cpu/fast_decoders.h"
#include "cpu/row_tiles.h"

DS4_CPU_NAMESPACE_BEGIN

struct PairBase : FastBase {
  static constexpr int kRun = 2 * kLanes;
  static constexpr bool kAddsRun = true;
  static DS4_INLINE V add(V w, V x, V acc) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_castps_si512(w.v), (__m512bh)_mm512_castps_si512(x.v))};
  }
};

template <class Dec>
DS4_INLINE void add_pairs(const Dec& w, int i, const Four& x, Four& acc) {
  acc.a = Dec::add(w.template get<0>(i), x.a, acc.a);
  acc.b = Dec::add(w.template get<16>(i), x.b, acc.b);
  acc.c = Dec::add(w.template get<32>(i), x.c, acc.c);
  acc.d = Dec::add(w.template get<48>(i), x.d, acc.d);
}

DS4_INLINE V pairs_of(__m512i words) { return {_mm512_castsi512_ps(words)}; }

struct PairBf16 : PairBase {
  static constexpr int kLayout = 2;
  static constexpr bool kWide = true;
  const uint16_t* p;
  PairBf16() = default;
  PairBf16(const Matrix& m, int r, float*) : p(reinterpret_cast<const uint16_t*>(m.data + r * m.row_bytes)) {}
  template <int E>
  DS4_INLINE V get(int i) const {
    const __m512i a = _mm512_loadu_si512(p + i + (E & 32)), c = _mm512_loadu_si512(p + i + 64 + (E & 32));
    if constexpr ((E & 16) == 0) return pairs_of(_mm512_mask_blend_epi16(0xaaaaaaaau, c, _mm512_slli_epi32(a, 16)));
    return pairs_of(_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(c, 16), a));
  }
  DS4_INLINE void add_run(int i, const Four& x, Four& acc) const { add_pairs(*this, i, x, acc); }
  DS4_INLINE void fetch(int i, const Fetch& ahead) const {
    for (int j = 0; j < 128; j += 32) ahead.line(reinterpret_cast<const uint8_t*>(p + i + j));
  }
};

// The upper halves of kE2m1Tables, which hold all of its values.
struct E2m1Words {
  uint16_t v[256][16];
};
constexpr E2m1Words make_e2m1_words() {
  E2m1Words t{};
  const E2m1Tables wide = make_e2m1_tables();
  for (int b = 0; b < 256; ++b)
    for (int c = 0; c < 16; ++c) t.v[b][c] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, wide.v[b][c]) >> 16);
  return t;
}
alignas(64) constexpr E2m1Words kE2m1Words = make_e2m1_words();

// Byte kLower + j of a register into the lower half, byte kUpper + j into the upper half of lane j.
struct ByteMap {
  uint8_t at[64];
};
template <int kLower, int kUpper>
constexpr ByteMap make_byte_map() {
  ByteMap t{};
  for (int j = 0; j < 16; ++j) {
    t.at[4 * j] = kLower + j;
    t.at[4 * j + 2] = kUpper + j;
  }
  return t;
}
template <int kLower, int kUpper>
alignas(64) constexpr ByteMap kByteMap = make_byte_map<kLower, kUpper>();
template <int kLower, int kUpper>
DS4_INLINE __m512i spread_bytes(__m512i bytes) {
  return _mm512_permutexvar_epi8(_mm512_load_si512(kByteMap<kLower, kUpper>.at), bytes);
}

// Nibbles (low or high of the bytes of both halves) looked up, each with the scale of its half.
template <bool kHigh>
DS4_INLINE V e2m1_pairs(__m512i bytes, uint32_t lower_scale, uint32_t upper_scale) {
  const __m512i nibbles = kHigh ? _mm512_srli_epi32(bytes, 4) : bytes;
  const __m512i mask = _mm512_set1_epi32(0x000f000f), upper = _mm512_set1_epi32(0x00100000);
  const __m512i codes = _mm512_ternarylogic_epi32(nibbles, mask, upper, 0xea);  // nibbles & mask | upper
  const auto half = [](uint32_t scale) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(kE2m1Words.v[scale]));
  };
  const __m512i table = _mm512_inserti64x4(_mm512_castsi256_si512(half(lower_scale)), half(upper_scale), 1);
  return pairs_of(_mm512_permutexvar_epi16(codes, table));
}

struct PairMxfp4 : PairBase {
  const uint8_t* p;
  PairMxfp4() = default;
  PairMxfp4(const Matrix& m, int r, float*) : p(m.data + r * m.row_bytes) {}
  // Four blocks of 17 bytes; blocks 0 and 2 lie in the first 64 bytes of the 68, blocks 1 and 3 in the last.
  template <int E>
  DS4_INLINE V get(int i) const {
    const uint8_t* b = p + (i >> 5) * 17;
    constexpr bool kHigh = (E & 16) != 0;
    if constexpr (E < 32) return e2m1_pairs<kHigh>(spread_bytes<35, 1>(_mm512_loadu_si512(b)), b[34], b[0]);
    return e2m1_pairs<kHigh>(spread_bytes<48, 14>(_mm512_loadu_si512(b + 4)), b[51], b[17]);
  }
  DS4_INLINE void add_run(int i, const Four& x, Four& acc) const { add_pairs(*this, i, x, acc); }
  DS4_INLINE void fetch(int i, const Fetch& ahead) const {
    const uint8_t* b = p + (i >> 5) * 17;
    ahead.twice(b);
    if ((i & 1920) == 0) ahead.twice(b + 64);  // 68 bytes a turn: one line more every sixteen turns
  }
};

struct PairFp4Row : PairBase {
  static constexpr int kLayout = 2;
  const uint8_t* p;
  const uint8_t* scale;
  PairFp4Row() = default;
  PairFp4Row(const Matrix& m, int r, float*) : p(m.data + r * m.row_bytes), scale(m.scale + r * m.scale_row_bytes) {}
  template <int E>
  DS4_INLINE V get(int i) const {
    const uint8_t* s = scale + (i >> 5) + (E >> 5);
    constexpr int first = (E >> 5) * 16;
    return e2m1_pairs<(E & 16) != 0>(spread_bytes<32 + first, first>(_mm512_loadu_si512(p + (i >> 1))), s[2], s[0]);
  }
  DS4_INLINE void add_run(int i, const Four& x, Four& acc) const { add_pairs(*this, i, x, acc); }
  DS4_INLINE void fetch(int i, const Fetch& ahead) const { ahead.twice(p + (i >> 1)); }
};

DS4_CPU_NAMESPACE_END
