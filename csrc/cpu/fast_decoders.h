// Decoders for the fast row kernels: what costs much (scales) is decoded ahead, a chunk of 256 elements at a time, so that
// the inner loop only expands codes. The values are those of decoders.h, to the last bit.
//
// One decoder per weight row. get<E>(i): vector E / kW of the 64 elements from i on; prepare(i): scales of the chunk
// that starts at i; fetch(i, ahead): prefetches.
// kLayout says which elements a vector holds: 1 those in order, 2 and 4 every second or fourth (lane l of vector v of a
// run of 16 * kLayout elements holds element kLayout * l + v): some codes are cheaper to expand so. Activations are
// packed in the same layout and the tree undoes it.
#pragma once

#include "cpu/decoders.h"
#include "cpu/half_table.h"

DS4_CPU_NAMESPACE_BEGIN

constexpr int kChunk = 256;

#if defined(__x86_64__)
DS4_INLINE bool on_amd() { return __builtin_cpu_is("amd") != 0; }
DS4_INLINE bool on_intel() { return __builtin_cpu_is("intel") != 0; }
#else
DS4_INLINE bool on_amd() { return false; }
DS4_INLINE bool on_intel() { return false; }
#endif

// Weights are fetched ahead. One distance into the first level is flat between 1 and 3 KiB. Where decoding takes little
// time (twice), Zen 4 is faster with two: far ahead into the second level, since only 24 misses of its first level can
// be under way, and from there a little ahead.
constexpr int kAhead = 1536, kNear = 768, kFar = 2560;  // bytes
struct Fetch {
  int near = on_amd() ? kNear : kAhead;
  bool far = on_amd();
  DS4_INLINE void line(const uint8_t* p) const { __builtin_prefetch(p + kAhead, 0, 3); }
  DS4_INLINE void twice(const uint8_t* p) const {
    if (far) __builtin_prefetch(p + kFar, 0, 2);
    __builtin_prefetch(p + near, 0, 3);
  }
};

struct FastBase {
  static constexpr int kLayout = 1;
  static constexpr int kRun = 64;  // elements of one turn
  static constexpr bool kPrepares = false;
  static constexpr bool kAddsRun = false;  // has add_run(i, x, acc): the products of a run, row by row
  static constexpr bool kWide = false;  // two bytes and more an element: fetched ahead only where that pays
  static constexpr int64_t floats(int) { return 0; }
  DS4_INLINE void prepare(int) {}
  static DS4_INLINE V add(V w, V x, V acc) { return v_fma(w, x, acc); }
};

struct FastF32 : FastBase {
  const float* p;
  FastF32() = default;
  FastF32(const Matrix& m, int r, float*) : p(reinterpret_cast<const float*>(m.data + r * m.row_bytes)) {}
  template <int E>
  DS4_INLINE V get(int i) const {
    return v_load(p + i + E);
  }
  DS4_INLINE void fetch(int, const Fetch&) const {}
};

struct Fast16 : FastBase {
  const uint16_t* p;
  Fast16() = default;
  Fast16(const Matrix& m, int r, float*) : p(reinterpret_cast<const uint16_t*>(m.data + r * m.row_bytes)) {}
  static constexpr bool kWide = true;
  DS4_INLINE void fetch(int i, const Fetch& ahead) const {
    ahead.line(reinterpret_cast<const uint8_t*>(p + i));
    ahead.line(reinterpret_cast<const uint8_t*>(p + i + 32));
  }
};

struct FastF16 : Fast16 {
  using Fast16::Fast16;
  template <int E>
  DS4_INLINE V get(int i) const {
    return v_f16(p + i + E);
  }
};

struct FastBf16 : Fast16 {
  using Fast16::Fast16;
#if defined(DS4_ISA_AVX512)
  static constexpr int kLayout = 2;
  template <int E>
  DS4_INLINE V get(int i) const {
    const __m512i pair = _mm512_loadu_si512(p + i + (E & 32));
    return {_mm512_castsi512_ps((E & 16) != 0 ? _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))
                                              : _mm512_slli_epi32(pair, 16))};
  }
#else
  template <int E>
  DS4_INLINE V get(int i) const {
    return v_bf16(p + i + E);
  }
#endif
};

// scale_256 of every scale byte.
struct Fp8Scales {
  float v[256];
};
constexpr Fp8Scales make_fp8_scales() {
  Fp8Scales t{};
  for (uint32_t b = 0; b < 256; ++b) t.v[b] = __builtin_bit_cast(float, (b + 8u > 255u ? 255u : b + 8u) << 23);
  return t;
}
alignas(64) constexpr Fp8Scales kFp8Scales = make_fp8_scales();

struct FastFp8 : FastBase {
  const uint8_t* p;
  const uint8_t* scale;
  FastFp8() = default;
  FastFp8(const Matrix& m, int r, float*)
      : p(m.data + r * m.row_bytes), scale(m.scale + (m.type == RowType::fp8_block ? r >> 5 : r) * m.scale_row_bytes) {}
#if defined(DS4_ISA_AVX512)
  static constexpr int kLayout = 2;
  template <int E>
  DS4_INLINE V get(int i) const {
    // A code in the upper byte of a 16-bit word, moved down by one, is a half float but for the copied sign. All 64 codes
    // at once: where a caller wants all four vectors, the compiler shares the work.
    __m512i w = _mm512_loadu_si512(p + i);
    if constexpr ((E & 16) == 0) w = _mm512_slli_epi16(w, 8);
    w = _mm512_and_si512(_mm512_srai_epi16(w, 1), _mm512_set1_epi16(static_cast<short>(0xbf80)));
    const __m256i half = E < 32 ? _mm512_castsi512_si256(w) : _mm512_extracti64x4_epi64(w, 1);
    return v_mul_at({_mm512_cvtph_ps(half)}, &kFp8Scales.v[scale[(i >> 5) + (E >> 5)]]);
  }
#else
  template <int E>
  DS4_INLINE V get(int i) const {
    return v_mul_at(v_e4m3_256th(p + i + E), &kFp8Scales.v[scale[(i >> 5) + (E >> 5)]]);
  }
#endif
  DS4_INLINE void fetch(int i, const Fetch& ahead) const { ahead.line(p + i); }
};

// 16 e2m1 values times 2^(b - 127) for every scale byte b: one look-up decodes and scales. (Where a product leaves the
// normal range the table holds a subnormal that arithmetic then flushes, as the product itself would be.)
struct E2m1Tables {
  float v[256][16];
};
constexpr E2m1Tables make_e2m1_tables() {
  E2m1Tables t{};
  const float half[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  for (uint32_t b = 1; b < 255; ++b) {
    const float scale = __builtin_bit_cast(float, b << 23);
    for (int c = 0; c < 8; ++c) {
      // 2^127 * 6 would not be a constant: the largest exponents saturate by hand.
      const bool over = (b == 254 && half[c] >= 2.f) || (b == 253 && half[c] >= 4.f);
      const float v = over ? __builtin_inff() : half[c] * scale;
      t.v[b][c] = v;
      t.v[b][c + 8] = -v;
    }
  }
  for (int c = 0; c < 8; ++c) {
    t.v[0][c] = 0.f;
    t.v[0][c + 8] = -0.f;
    t.v[255][c] = c == 0 ? __builtin_nanf("") : __builtin_inff();
    t.v[255][c + 8] = c == 0 ? __builtin_nanf("") : -__builtin_inff();
  }
  return t;
}

#if defined(DS4_ISA_AVX512)
alignas(64) constexpr E2m1Tables kE2m1Tables = make_e2m1_tables();
template <bool kHigh>
DS4_INLINE V e2m1_scaled(const uint8_t* codes, uint32_t scale) {
  __m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  if constexpr (kHigh) w = _mm512_srli_epi32(w, 4);
  return {_mm512_permutexvar_ps(w, _mm512_load_ps(kE2m1Tables.v[scale]))};
}
#endif

struct FastFp4Row : FastBase {
  const uint8_t* p;
  const uint8_t* scale;
  FastFp4Row() = default;
  FastFp4Row(const Matrix& m, int r, float*) : p(m.data + r * m.row_bytes), scale(m.scale + r * m.scale_row_bytes) {}
#if defined(DS4_ISA_AVX512)
  static constexpr int kLayout = 2;
  template <int E>
  DS4_INLINE V get(int i) const {
    return e2m1_scaled<(E & 16) != 0>(p + ((i + (E & 32)) >> 1), scale[(i >> 5) + (E >> 5)]);
  }
#else
  template <int E>
  DS4_INLINE V get(int i) const {
    return v_mul(v_e2m1_pairs(p + ((i + E) >> 1)), v_set(ds4_e8m0(scale[(i >> 5) + (E >> 5)])));
  }
#endif
  DS4_INLINE void fetch(int i, const Fetch& ahead) const { ahead.line(p + (i >> 1)); }
};

struct FastMxfp4 : FastBase {
  const uint8_t* p;
  FastMxfp4() = default;
  FastMxfp4(const Matrix& m, int r, float*) : p(m.data + r * m.row_bytes) {}
  template <int E>
  DS4_INLINE V get(int i) const {
    const uint8_t* b = p + ((i >> 5) + (E >> 5)) * 17;
#if defined(DS4_ISA_AVX512)
    return e2m1_scaled<(E & 16) != 0>(b + 1, b[0]);
#else
    return v_mul(v_e2m1_half<(E & 16) != 0>(b + 1 + (E & 15)), v_set(ds4_e8m0(b[0])));
#endif
  }
  DS4_INLINE void fetch(int i, const Fetch& ahead) const { ahead.line(p + (i >> 5) * 17); }
};

struct Bytes16 {
  uint8_t v[16];
};

struct FastQ8_0 : FastBase {
  const uint8_t* p;
  const float* half;
  FastQ8_0() = default;
  FastQ8_0(const Matrix& m, int r, float*) : p(m.data + r * m.row_bytes), half(half_table()) {}
  template <int E>
  DS4_INLINE V get(int i) const {
    const uint8_t* b = p + ((i >> 5) + (E >> 5)) * 34;
    uint16_t h;
    std::memcpy(&h, b, 2);
    return v_mul_at(v_i8(reinterpret_cast<const int8_t*>(b + 2 + (E & 31))), half + h);
  }
#if defined(DS4_ISA_AVX512)
  // All four pipes of Zen 4 are busy here, and it hands them out as instructions arrive: vector after vector, 64 elements
  // take 8 cycles, and 10 where a compiler puts equal instructions together.
  static constexpr bool kAddsRun = true;
  DS4_INLINE void add_run(int i, const Four& x, Four& acc) const {
    const uint8_t* b = p + (i >> 5) * 34;
    add_block(b, x.a, x.b, acc.a, acc.b);
    add_block(b + 34, x.c, x.d, acc.c, acc.d);
  }
  DS4_INLINE void add_block(const uint8_t* b, V x0, V x1, V& acc0, V& acc1) const {
    uint16_t h;
    std::memcpy(&h, b, 2);
    __m512 w0, w1;
    asm("vpmovsxbd %[q0], %[w0]\n\tvcvtdq2ps %[w0], %[w0]\n\t"
        "vmulps %[s]%{1to16%}, %[w0], %[w0]\n\tvfmadd231ps %[x0], %[w0], %[a0]\n\t"
        "vpmovsxbd %[q1], %[w1]\n\tvcvtdq2ps %[w1], %[w1]\n\t"
        "vmulps %[s]%{1to16%}, %[w1], %[w1]\n\tvfmadd231ps %[x1], %[w1], %[a1]"
        : [a0] "+v"(acc0.v), [a1] "+v"(acc1.v), [w0] "=&v"(w0), [w1] "=&v"(w1)
        : [q0] "m"(*reinterpret_cast<const Bytes16*>(b + 2)), [q1] "m"(*reinterpret_cast<const Bytes16*>(b + 18)),
          [s] "m"(half[h]), [x0] "v"(x0.v), [x1] "v"(x1.v));
  }
#endif
  DS4_INLINE void fetch(int i, const Fetch& ahead) const {
    const uint8_t* b = p + (i >> 5) * 34;
    ahead.twice(b);
    if ((i & 960) == 0) ahead.twice(b + 64);  // 68 bytes a turn: one line more every sixteen turns
  }
};

// kTwoSteps: for processors with adders beside the multipliers, where a broadcast into a register costs a shuffle: AMD's.
template <bool kTwoSteps>
struct FastQ4K : FastBase {
  const uint8_t* p;
  float* s;  // per 256: eight d * scale, eight dmin * min
  static constexpr bool kPrepares = true;
  static constexpr int64_t floats(int k) { return k / 16; }
  FastQ4K() = default;
  FastQ4K(const Matrix& m, int r, float* scratch) : p(m.data + r * m.row_bytes), s(scratch) {}
  DS4_INLINE void prepare(int i) { block_scales(p + (i >> 8) * 144, s + (i >> 8) * 16); }
#if defined(DS4_ISA_AVX512)
  static DS4_INLINE void block_scales(const uint8_t* b, float* out) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    const __m128i low = _mm_and_si128(_mm_srlv_epi32(_mm_shuffle_epi32(x, _MM_SHUFFLE(2, 2, 1, 1)), _mm_setr_epi32(0, 2, 0, 2)),
                                      _mm_setr_epi32(0x3f3f3f3f, 0x30303030, 0x3f3f3f3f, 0x30303030));
    const __m128i high = _mm_and_si128(_mm_srlv_epi32(_mm_shuffle_epi32(x, _MM_SHUFFLE(3, 3, 3, 3)), _mm_setr_epi32(0, 0, 0, 4)),
                                       _mm_setr_epi32(0, 0x0f0f0f0f, 0, 0x0f0f0f0f));
    const __m512 q = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_or_si128(low, high)));
    const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512 d = _mm512_permutexvar_ps(which, _mm512_castps128_ps512(_mm_cvtph_ps(x)));
    _mm512_storeu_ps(out, _mm512_mul_ps(q, d));
  }
  // A group of 32 elements has sixteen possible values: made once, then looked up.
  template <int E>
  DS4_INLINE V get(int i) const {
    const int block = i >> 8, pair = (i >> 6) & 3;
    const uint8_t* q = p + block * 144 + 16 + pair * 32 + (E & 31);
    const float* t = s + block * 16 + pair * 2 + (E >> 5);
    __m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    if constexpr (E >= 32) w = _mm512_srli_epi32(w, 4);
    return {_mm512_permutexvar_ps(w, values(all_codes(), t).v)};
  }
  static DS4_INLINE __m512 all_codes() {
    return _mm512_setr_ps(0.f, 1.f, 2.f, 3.f, 4.f, 5.f, 6.f, 7.f, 8.f, 9.f, 10.f, 11.f, 12.f, 13.f, 14.f, 15.f);
  }
  // As FastQ8_0: the order of instructions matters. Two tables, then each sixteen codes in both.
  static constexpr bool kAddsRun = kTwoSteps;
  DS4_INLINE void add_run(int i, const Four& x, Four& acc) const {
    const int block = i >> 8, pair = (i >> 6) & 3;
    const auto* q = reinterpret_cast<const Bytes16*>(p + block * 144 + 16 + pair * 32);
    const float* t = s + block * 16 + pair * 2;
    const __m512 codes = all_codes();
    __m512 low, high, w, v;
    asm("vmulps %[d0]%{1to16%}, %[codes], %[low]\n\tvsubps %[m0]%{1to16%}, %[low], %[low]\n\t"
        "vmulps %[d1]%{1to16%}, %[codes], %[high]\n\tvsubps %[m1]%{1to16%}, %[high], %[high]\n\t"
        "vpmovzxbd %[q0], %[w]\n\tvpermps %[low], %[w], %[v]\n\tvfmadd231ps %[x0], %[v], %[a0]\n\t"
        "vpsrld $4, %[w], %[w]\n\tvpermps %[high], %[w], %[v]\n\tvfmadd231ps %[x2], %[v], %[a2]\n\t"
        "vpmovzxbd %[q1], %[w]\n\tvpermps %[low], %[w], %[v]\n\tvfmadd231ps %[x1], %[v], %[a1]\n\t"
        "vpsrld $4, %[w], %[w]\n\tvpermps %[high], %[w], %[v]\n\tvfmadd231ps %[x3], %[v], %[a3]"
        : [a0] "+v"(acc.a.v), [a1] "+v"(acc.b.v), [a2] "+v"(acc.c.v), [a3] "+v"(acc.d.v), [low] "=&v"(low),
          [high] "=&v"(high), [w] "=&v"(w), [v] "=&v"(v)
        : [d0] "m"(t[0]), [m0] "m"(t[8]), [d1] "m"(t[1]), [m1] "m"(t[9]), [q0] "m"(q[0]), [q1] "m"(q[1]),
          [codes] "v"(codes), [x0] "v"(x.a.v), [x1] "v"(x.b.v), [x2] "v"(x.c.v), [x3] "v"(x.d.v));
  }
  // d * scale * code - dmin * min, rounded once: the product has 21 bits, so it is exact by itself as well.
  static DS4_INLINE V values(__m512 codes, const float* t) {
    if constexpr (kTwoSteps) return v_sub_at(v_mul_at({codes}, t), t + 8);
    return {_mm512_fmsub_ps(codes, _mm512_set1_ps(t[0]), _mm512_set1_ps(t[8]))};
  }
#else
  static DS4_INLINE void block_scales(const uint8_t* b, float* out) {
    uint32_t w[3];
    std::memcpy(w, b + 4, 12);
    const uint32_t six[4] = {w[0] & 0x3f3f3f3fu, (w[2] & 0x0f0f0f0fu) | ((w[0] >> 2) & 0x30303030u), w[1] & 0x3f3f3f3fu,
                             ((w[2] >> 4) & 0x0f0f0f0fu) | ((w[1] >> 2) & 0x30303030u)};
    const float d = f16_scalar(b), m = f16_scalar(b + 2);
    for (int j = 0; j < 16; ++j) out[j] = (j < 8 ? d : m) * static_cast<float>((six[j >> 2] >> (8 * (j & 3))) & 255u);
  }
  template <int E>
  DS4_INLINE V get(int i) const {
    const int block = i >> 8, pair = (i >> 6) & 3;
    const float* t = s + block * 16 + pair * 2 + (E >> 5);
    return v_fma(v_set(t[0]), v_u4_half<(E >= 32)>(p + block * 144 + 16 + pair * 32 + (E & 31)), v_set(-t[8]));
  }
#endif
  DS4_INLINE void fetch(int i, const Fetch& ahead) const { ahead.line(p + (i >> 8) * 144 + ((i >> 6) & 3) * 36); }
};

// Calls f(tag) with the fast decoder type of this matrix; false when it has none or its rows do not fit one.
template <class T>
struct Type {
  using type = T;
};
template <class F>
DS4_INLINE bool with_fast_decoder(const Matrix& m, F f) {
  if (m.cols % kChunk != 0) return false;
  switch (m.type) {
    case RowType::f32: return f(Type<FastF32>{}), true;
    case RowType::f16: return f(Type<FastF16>{}), true;
    case RowType::bf16: return f(Type<FastBf16>{}), true;
    case RowType::fp8_block:
    case RowType::fp8_row: return f(Type<FastFp8>{}), true;
    case RowType::fp4_row: return f(Type<FastFp4Row>{}), true;
    case RowType::mxfp4: return f(Type<FastMxfp4>{}), true;
    case RowType::q8_0: return f(Type<FastQ8_0>{}), true;
    case RowType::q4_k:
      if (kW == 16 && on_amd()) return f(Type<FastQ4K<true>>{}), true;
      return f(Type<FastQ4K<false>>{}), true;
    case RowType::q2_k:
    case RowType::iq2_xxs: return false;
  }
  return false;
}

DS4_CPU_NAMESPACE_END
