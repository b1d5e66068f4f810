// The kernel of the matrix class: tiles of 4 weight rows and up to 6 activation rows, whose 16 accumulators are one
// vector a product and stay in registers for all of K. Both sides are packed as bfloat16 in the order of the innermost loop,
// which issues nothing but loads and VDPBF16PS. Each product adds its pairs in ascending order, so tiles, panels and
// batches do not show in a result.
#pragma once

#include "cpu/fast_decoders.h"
#include "cpu/row_tiles.h"

DS4_CPU_NAMESPACE_BEGIN

constexpr int kStep = 32;          // elements that one instruction takes of a row
constexpr int kMatrixRows = 4;     // weight rows of a tile
constexpr int kMatrixCols = 6;     // activation rows of a tile
constexpr int kMatrixPanel = 16;   // weight rows decoded together: a panel stays in the second-level cache
constexpr int kMatrixBatch = 192;  // activation rows packed together
constexpr int kChainLength = 12;

inline int padded(int k) { return (k + kStep - 1) / kStep * kStep; }

DS4_INLINE __m512 dp_pairs(__m512 acc, __m512i w, __m512i x) {
  return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x);
}

DS4_INLINE __m512i to_pairs(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

inline float dp_chain(int64_t rounds) {
  __m512 a[kChainLength];
  for (int i = 0; i < kChainLength; ++i) a[i] = _mm512_set1_ps(static_cast<float>(i));
  __m512i w = _mm512_set1_epi32(0x3c003c00), x = _mm512_set1_epi32(0x3c013c01);
  asm("" : "+v"(w), "+v"(x));
  for (int64_t k = 0; k < rounds; ++k)
    for (int i = 0; i < kChainLength; ++i) a[i] = dp_pairs(a[i], w, x);
  for (int i = 1; i < kChainLength; ++i) a[0] = _mm512_add_ps(a[0], a[i]);
  return _mm512_cvtss_f32(a[0]);
}

// The trees (neighbours first) of four vectors of accumulators.
DS4_INLINE __m128 trees_of(const __m512* a) {
  const V q = v_pairs(v_pairs({a[0]}, {a[1]}), v_pairs({a[2]}, {a[3]}));
  const __m512 b = _mm512_add_ps(q.v, _mm512_shuffle_f32x4(q.v, q.v, 0xb1));
  return _mm512_castps512_ps128(_mm512_add_ps(b, _mm512_shuffle_f32x4(b, b, 0x4e)));
}

// A tile: w [steps][kMatrixRows][kStep], x [steps][N][kStep]; the first `rows` sums of activation row j at out + j * ldo.
template <int N>
void matrix_tile(const uint16_t* w, const uint16_t* x, int steps, int rows, float* out, int64_t ldo) {
  __m512 a[N][kMatrixRows];
  for (int j = 0; j < N; ++j)
    for (int m = 0; m < kMatrixRows; ++m) a[j][m] = _mm512_setzero_ps();
  for (int i = 0; i < steps; ++i, w += kMatrixRows * kStep, x += N * kStep) {
    __m512i wv[kMatrixRows];
    for (int m = 0; m < kMatrixRows; ++m) {
      wv[m] = _mm512_loadu_si512(w + m * kStep);
      asm("" : "+v"(wv[m]));
    }
    for (int j = 0; j < N; ++j) {
      __m512i xv = _mm512_loadu_si512(x + j * kStep);
      asm("" : "+v"(xv));
      for (int m = 0; m < kMatrixRows; ++m) a[j][m] = dp_pairs(a[j][m], wv[m], xv);
    }
  }
  const auto mask = static_cast<__mmask8>((1 << rows) - 1);
  for (int j = 0; j < N; ++j) _mm_mask_storeu_ps(out + j * ldo, mask, trees_of(a[j]));
}

inline void matrix_tile_n(int n, const uint16_t* w, const uint16_t* x, int steps, int rows, float* out, int64_t ldo) {
  switch (n) {
    case 1: return matrix_tile<1>(w, x, steps, rows, out, ldo);
    case 2: return matrix_tile<2>(w, x, steps, rows, out, ldo);
    case 3: return matrix_tile<3>(w, x, steps, rows, out, ldo);
    case 4: return matrix_tile<4>(w, x, steps, rows, out, ldo);
    case 5: return matrix_tile<5>(w, x, steps, rows, out, ldo);
    default: return matrix_tile<6>(w, x, steps, rows, out, ldo);
  }
}

// n elements of f32 (at most kStep) as pairs, the rest zero.
DS4_INLINE __m512i part_to_pairs(const float* p, int n) {
  const uint32_t mask = n >= kStep ? 0xffffffffu : (1u << n) - 1u;
  const __m512 a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
  const __m512 b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), n > 16 ? p + 16 : p);
  return to_pairs(a, b);
}

// Activation rows i0 .. i0 + n - 1 by tile: [tile][step][row of the tile][kStep].
inline void matrix_pack(MatrixRows x, int i0, int n, int k, uint16_t* out) {
  const int wide = padded(k);
  for (int t = 0; t < n; t += kMatrixCols) {
    const int c = n - t < kMatrixCols ? n - t : kMatrixCols;
    uint16_t* tile = out + static_cast<int64_t>(t) * wide;
    for (int j = 0; j < c; ++j) {
      const float* row = x.row(i0 + t + j);
      for (int i = 0; i < k; i += kStep) _mm512_storeu_si512(tile + static_cast<int64_t>(i) * c + j * kStep, part_to_pairs(row + i, k - i));
    }
  }
}

// A weight row as pairs, a vector every kMatrixRows * kStep numbers: by the decoders of single rows ...
template <class Make>
struct PlainPairs {
  const Make& make;
  int k;
  void operator()(int r, int wide, uint16_t* to) const {
    const auto w = make(r);
    for (int i = 0; i < wide; i += kStep, to += kMatrixRows * kStep) {
      alignas(64) float t[kStep] = {};
      const int n = k - i < kStep ? k - i : kStep;
      int j = 0;
      for (; j + kW <= n; j += kW) v_store(t + j, w.get(i + j));
      for (; j < n; ++j) t[j] = w.at(i + j);
      _mm512_storeu_si512(to, to_pairs(_mm512_load_ps(t), _mm512_load_ps(t + 16)));
    }
  }
};

// ... by those that decode scales ahead ...
template <class Dec>
struct FastPairs {
  const Matrix& m;
  float* scales;
  void operator()(int r, int wide, uint16_t* to) const {
    Dec w(m, r, scales);
    for (int i = 0; i < wide; i += 2 * kStep, to += 2 * kMatrixRows * kStep) {
      unroll<2>([&](auto half) DS4_LAMBDA_INLINE {
        constexpr int e = decltype(half)::value * kStep;
        const __m512 a = w.template get<e>(i).v, b = w.template get<e + 16>(i).v;
        __m512i pairs;
        if constexpr (Dec::kLayout == 2)  // even elements and odd ones, of types whose values are bfloat16 already
          pairs = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16),
                                  _mm512_and_si512(_mm512_castps_si512(b), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
        else
          pairs = to_pairs(a, b);
        _mm512_storeu_si512(to + decltype(half)::value * kMatrixRows * kStep, pairs);
      });
    }
  }
};

struct Bf16Pairs {
  const Matrix& m;
  void operator()(int r, int wide, uint16_t* to) const {
    const uint8_t* p = m.data + r * m.row_bytes;
    for (int i = 0; i < wide; i += kStep, to += kMatrixRows * kStep) _mm512_storeu_si512(to, _mm512_loadu_si512(p + 2 * i));
  }
};

// ... and where sixteen values stand for a group of codes: they are rounded once, then looked up. The table is there
// twice, so that the fifth bit of an index may be anything.
struct E2m1Pairs {
  uint16_t v[256][32];
};
constexpr E2m1Pairs make_e2m1_pairs() {
  E2m1Pairs t{};
  const E2m1Tables f = make_e2m1_tables();
  for (int b = 0; b < 256; ++b)
    for (int c = 0; c < 32; ++c) t.v[b][c] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, f.v[b][c & 15]) >> 16);
  return t;
}
alignas(64) constexpr E2m1Pairs kE2m1Pairs = make_e2m1_pairs();

struct Mxfp4Pairs {
  const Matrix& m;
  void operator()(int r, int wide, uint16_t* to) const {
    const uint8_t* p = m.data + r * m.row_bytes;
    for (int i = 0; i < wide; i += kStep, p += 17, to += kMatrixRows * kStep) {
      const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 1)));
      const __m512i w = _mm512_inserti64x4(_mm512_castsi256_si512(codes), _mm256_srli_epi16(codes, 4), 1);
      _mm512_storeu_si512(to, _mm512_permutexvar_epi16(w, _mm512_load_si512(kE2m1Pairs.v[p[0]])));
    }
  }
};

struct Fp4Pairs {
  const Matrix& m;
  void operator()(int r, int wide, uint16_t* to) const {
    const uint8_t* p = m.data + r * m.row_bytes;
    const uint8_t* scale = m.scale + r * m.scale_row_bytes;
    for (int i = 0; i < wide; i += kStep, p += 16, ++scale, to += kMatrixRows * kStep) {
      const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      const __m512i w = _mm512_or_si512(codes, _mm512_slli_epi32(codes, 12));
      _mm512_storeu_si512(to, _mm512_permutexvar_epi16(w, _mm512_load_si512(kE2m1Pairs.v[*scale])));
    }
  }
};

struct Q4KPairs {
  const Matrix& m;
  static DS4_INLINE __m512i table(const float* t) {
    const __m512 codes = _mm512_setr_ps(0.f, 1.f, 2.f, 3.f, 4.f, 5.f, 6.f, 7.f, 8.f, 9.f, 10.f, 11.f, 12.f, 13.f, 14.f, 15.f);
    const __m512 values = _mm512_fmsub_ps(codes, _mm512_set1_ps(t[0]), _mm512_set1_ps(t[8]));
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(values));
  }
  void operator()(int r, int wide, uint16_t* to) const {
    const uint8_t* p = m.data + r * m.row_bytes;
    for (int i = 0; i < wide; i += kChunk, p += 144) {
      alignas(64) float t[16];
      FastQ4K<false>::block_scales(p, t);
      for (int pair = 0; pair < 4; ++pair, to += 2 * kMatrixRows * kStep) {
        const __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16 + pair * 32)));
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(w, table(t + 2 * pair)));
        _mm512_storeu_si512(to + kMatrixRows * kStep, _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 4), table(t + 2 * pair + 1)));
      }
    }
  }
};

// Floats of scratch: packed activations, a panel, scales of a row.
inline size_t matrix_scratch(int k) {
  const int64_t wide = padded(k);
  return static_cast<size_t>((kMatrixBatch + kMatrixPanel) * wide / 2 + wide / 8 + 64);
}

// Activation rows in batches of equal size, since each batch decodes the weights anew.
template <class Decode>
void matrix_block_of(const Decode& decode, int r0, int nr, MatrixRows x, int n, int k, float* out, int64_t ldo, float* scratch) {
  const int wide = padded(k);
  uint16_t* packed = reinterpret_cast<uint16_t*>(scratch);
  uint16_t* panel = packed + static_cast<int64_t>(kMatrixBatch) * wide;
  const int batches = (n + kMatrixBatch - 1) / kMatrixBatch, tiles = (n + kMatrixCols - 1) / kMatrixCols;
  const int batch = batches == 0 ? 0 : (tiles + batches - 1) / batches * kMatrixCols;
  for (int i0 = 0; i0 < n; i0 += batch) {
    const int b = n - i0 < batch ? n - i0 : batch;
    matrix_pack(x, i0, b, k, packed);
    for (int r = 0; r < nr; r += kMatrixPanel) {
      const int rows = nr - r < kMatrixPanel ? nr - r : kMatrixPanel;
      const int whole = (rows + kMatrixRows - 1) / kMatrixRows * kMatrixRows;
      for (int q = 0; q < whole; ++q)  // [tile][step][row of the tile][kStep]
        decode(r0 + r + (q < rows ? q : rows - 1), wide, panel + static_cast<int64_t>(q / kMatrixRows) * kMatrixRows * wide + q % kMatrixRows * kStep);
      for (int t = 0; t < b; t += kMatrixCols) {
        const int c = b - t < kMatrixCols ? b - t : kMatrixCols;
        for (int q = 0; q < rows; q += kMatrixRows)
          matrix_tile_n(c, panel + static_cast<int64_t>(q) * wide, packed + static_cast<int64_t>(t) * wide, wide / kStep,
                        rows - q < kMatrixRows ? rows - q : kMatrixRows, out + (i0 + t) * ldo + r + q, ldo);
      }
    }
  }
}

inline void matrix_block(const Matrix& m, int r0, int nr, MatrixRows x, int n, float* out, int64_t ldo, float* scratch) {
  const int k = m.cols;
  const auto block = [&](const auto& decode) { matrix_block_of(decode, r0, nr, x, n, k, out, ldo, scratch); };
  if (k % kChunk == 0) {
    if (m.type == RowType::bf16) return block(Bf16Pairs{m});
    if (m.type == RowType::mxfp4) return block(Mxfp4Pairs{m});
    if (m.type == RowType::fp4_row) return block(Fp4Pairs{m});
    if (m.type == RowType::q4_k) return block(Q4KPairs{m});
  }
  float* scales = scratch + matrix_scratch(k) - padded(k) / 8 - 64;
  if (with_fast_decoder(m, [&](auto tag) {
        using Dec = typename decltype(tag)::type;
        if constexpr (!Dec::kPrepares) block(FastPairs<Dec>{m, scales});
      }))
    return;
  with_decoder(m, [&](auto make) { block(PlainPairs<decltype(make)>{make, k}); });
}

DS4_CPU_NAMESPACE_END
