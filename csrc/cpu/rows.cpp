#include "cpu/rows.h"

#include "cpu/decoders.h"
#include "cpu/pairs.h"
#include "cpu/row_blocks.h"
#include "cpu/row_tiles.h"
#include "cpu/short_rows.h"

DS4_CPU_NAMESPACE_BEGIN

// Pairwise by index bit, the lowest first.
DS4_INLINE float tree(const float* total) {
  V t[kGroups];
  for (int g = 0; g < kGroups; ++g) t[g] = v_load(total + g * kW);
  return pairwise_tree<kGroups>(t);
}

// Vectors of accumulators that one pass over a segment keeps in registers.
constexpr int pass_groups(int rows) {
  int g = kGroups;
  while (g > 1 && rows * g + 2 > kRegisters - 2) g /= 2;
  return g;
}

// The elements of the last segment that do not fill a vector, one by one.
template <class Dec>
void scalar_tail(const Dec& w, const float* x, int begin, int end, int seg0, float* segment) {
  for (int i = begin; i < end; ++i) {
    const int lane = (i - seg0) & (kLanes - 1);
    segment[lane] = DS4_FMA(w.at(i), x[i], segment[lane]);
  }
}

// Products of one weight row with R activation rows; the weight is decoded once.
template <int R, class Dec>
void dots(const Dec& w, const float* const* x, int k, float* out) {
  constexpr int G = pass_groups(R);
  alignas(64) float total[R][kLanes];
  const int k_vec = k - k % kW;
  for (int seg0 = 0; seg0 < k; seg0 += kSegment) {
    const int seg1 = seg0 + kSegment < k ? seg0 + kSegment : k;
    const int vec1 = seg1 < k_vec ? seg1 : k_vec;
    const bool ragged = vec1 < seg1;
    alignas(64) float segment[R][kLanes];
    for (int g0 = 0; g0 < kGroups; g0 += G) {
      V acc[R][G];
      for (int r = 0; r < R; ++r)
        for (int g = 0; g < G; ++g) acc[r][g] = v_zero();
      int i = seg0 + g0 * kW;
      for (; i + G * kW <= vec1; i += kLanes) {
        for (int g = 0; g < G; ++g) {
          const V wv = w.get(i + g * kW);
          for (int r = 0; r < R; ++r) acc[r][g] = v_fma(wv, v_load(x[r] + i + g * kW), acc[r][g]);
        }
      }
      for (int g = 0; g < G && i + (g + 1) * kW <= vec1; ++g) {
        const V wv = w.get(i + g * kW);
        for (int r = 0; r < R; ++r) acc[r][g] = v_fma(wv, v_load(x[r] + i + g * kW), acc[r][g]);
      }
      for (int r = 0; r < R; ++r)
        for (int g = 0; g < G; ++g) {
          float* t = total[r] + (g0 + g) * kW;
          if (ragged)
            v_store(segment[r] + (g0 + g) * kW, acc[r][g]);
          else
            v_store(t, seg0 == 0 ? acc[r][g] : v_add(v_load(t), acc[r][g]));
        }
    }
    if (ragged)
      for (int r = 0; r < R; ++r) {
        scalar_tail(w, x[r], vec1, seg1, seg0, segment[r]);
        for (int l = 0; l < kLanes; ++l) total[r][l] = seg0 == 0 ? segment[r][l] : total[r][l] + segment[r][l];
      }
  }
  for (int r = 0; r < R; ++r) out[r] = tree(total[r]);
}

// kTileRows decoded weight rows times N activation rows.
template <int N>
void tile(const float* const* w, const float* const* x, int k, float (*out)[kTileCols]) {
  constexpr int M = kTileRows;
  alignas(64) float total[M][N][kLanes];
  const int k_vec = k - k % kW;
  for (int seg0 = 0; seg0 < k; seg0 += kSegment) {
    const int seg1 = seg0 + kSegment < k ? seg0 + kSegment : k;
    const int vec1 = seg1 < k_vec ? seg1 : k_vec;
    const bool ragged = vec1 < seg1;
    alignas(64) float segment[M][N][kLanes];
    float(*into)[N][kLanes] = seg0 == 0 && !ragged ? total : segment;
    for (int g = 0; g < kGroups; ++g) {
      V acc[M][N];
      for (int m = 0; m < M; ++m)
        for (int j = 0; j < N; ++j) acc[m][j] = v_zero();
      for (int i = seg0 + g * kW; i + kW <= vec1; i += kLanes) {
        V xv[N];
        for (int j = 0; j < N; ++j) xv[j] = v_load(x[j] + i);
        for (int m = 0; m < M; ++m) {
          const V wv = v_load(w[m] + i);
          for (int j = 0; j < N; ++j) acc[m][j] = v_fma(wv, xv[j], acc[m][j]);
        }
      }
      for (int m = 0; m < M; ++m)
        for (int j = 0; j < N; ++j) {
          if (seg0 != 0 && !ragged)
            v_store(total[m][j] + g * kW, v_add(v_load(total[m][j] + g * kW), acc[m][j]));
          else
            v_store(into[m][j] + g * kW, acc[m][j]);
        }
    }
    if (ragged)
      for (int m = 0; m < M; ++m)
        for (int j = 0; j < N; ++j) {
          scalar_tail(DecF32{w[m]}, x[j], vec1, seg1, seg0, segment[m][j]);
          for (int l = 0; l < kLanes; ++l)
            total[m][j][l] = seg0 == 0 ? segment[m][j][l] : total[m][j][l] + segment[m][j][l];
        }
  }
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < N; ++j) out[m][j] = tree(total[m][j]);
}

void tile_n(int n, const float* const* w, const float* const* x, int k, float (*out)[kTileCols]) {
  switch (n) {
    case 1: return tile<1>(w, x, k, out);
    case 2: return tile<2>(w, x, k, out);
    case 3: return tile<3>(w, x, k, out);
    case 4: return tile<4>(w, x, k, out);
    default: break;
  }
  if constexpr (kTileCols == 6) {
    if (n == 5) return tile<5>(w, x, k, out);
    return tile<6>(w, x, k, out);
  }
}

template <class Dec>
void decode(const Dec& w, int k, float* out) {
  int i = 0;
  for (; i + kW <= k; i += kW) v_store(out + i, w.get(i));
  for (; i < k; ++i) out[i] = w.at(i);
}

template <int R, class Make>
void few_rows(const Make& make, int r0, int nr, XRows x, int k, float* out, int64_t ldo) {
  const float* xp[R];
  for (int i = 0; i < R; ++i) xp[i] = x.row(i);
  for (int r = 0; r < nr; ++r) {
    float v[R];
    dots<R>(make(r0 + r), xp, k, v);
    for (int i = 0; i < R; ++i) out[i * ldo + r] = v[i];
  }
}

template <class Make>
void many_rows(const Make& make, int r0, int nr, XRows x, int n, int k, float* out, int64_t ldo, float* scratch) {
  for (int r = 0; r < nr; r += kTileRows) {
    const int m = nr - r < kTileRows ? nr - r : kTileRows;
    const float* w[kTileRows];
    for (int j = 0; j < kTileRows; ++j) {
      float* row = scratch + static_cast<int64_t>(j < m ? j : 0) * k;
      w[j] = row;
      if (j < m) decode(make(r0 + r + j), k, row);
    }
    for (int i = 0; i < n; i += kTileCols) {
      const int c = n - i < kTileCols ? n - i : kTileCols;
      const float* xp[kTileCols];
      for (int j = 0; j < c; ++j) xp[j] = x.row(i + j);
      float v[kTileRows][kTileCols];
      tile_n(c, w, xp, k, v);
      for (int j = 0; j < c; ++j)
        for (int q = 0; q < m; ++q) out[(i + j) * ldo + r + q] = v[q][j];
    }
  }
}

DS4_CPU_NAMESPACE_END

namespace ds4::cpu::DS4_ISA {

size_t dot_scratch(int k) {
  const int64_t few = few_scratch(k), blocks = block_scratch(k);
  return static_cast<size_t>(few > blocks ? few : blocks);
}

void dot_block(const Matrix& m, int r0, int nr, XRows x, int n, float* out, int64_t ldo, float* scratch) {
  const int k = m.cols;
  if (n > kFewRows && block_rows_fast(m, r0, nr, x, n, out, ldo, scratch)) return;
#if defined(DS4_ISA_AVX512)
  if (const PairRows pairs = pair_rows(); pairs != nullptr && n >= 1 && n <= kFewRows)
    if (pairs(m, r0, nr, {x.base, x.stride, x.index}, n, out, ldo, scratch)) return;
#endif
  if (n >= 1 && n <= kFewRows && few_rows_fast(m, r0, nr, x, n, out, ldo, scratch)) return;
  with_decoder(m, [&](auto make) {
    if (short_rows(make, r0, nr, x, n, k, out, ldo)) return;
    switch (n) {
      case 0: return;
      case 1: return few_rows<1>(make, r0, nr, x, k, out, ldo);
      case 2: return few_rows<2>(make, r0, nr, x, k, out, ldo);
      case 3: return few_rows<3>(make, r0, nr, x, k, out, ldo);
      case 4: return few_rows<4>(make, r0, nr, x, k, out, ldo);
      default: break;
    }
    if (kW >= 8 && k % kLanes == 0) return block_rows_of(PlainPanel<decltype(make)>{make}, r0, nr, x, n, k, out, ldo, scratch);
    many_rows(make, r0, nr, x, n, k, out, ldo, scratch);
  });
}

float dot_f32(const float* a, const float* b, int k) {
  float out;
  dots<1>(DecF32{a}, &b, k, &out);
  return out;
}

void decode_row(const Matrix& m, int r, float* out) {
  with_decoder(m, [&](auto make) { decode(make(r), m.cols, out); });
}

}  // namespace ds4::cpu::DS4_ISA
