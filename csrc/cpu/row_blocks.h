// Many activation rows: blocks of decoded weight rows times blocks of activation rows, all packed in the order in which
// the innermost loop reads them, so that it runs out of the first-level cache.
//
// A segment is walked in kGroups passes; a pass holds one vector of the 64 accumulators of each product of a tile
// (kTileRows x kTileCols) in registers. What a pass reads of a weight panel and of a tile of activations is contiguous.
// Canonical order as everywhere: ascending elements, segments, tree.
#pragma once

#include "cpu/decoders.h"
#include "cpu/row_tiles.h"

DS4_CPU_NAMESPACE_BEGIN

constexpr int kTileRows = kRegisters == 32 ? 4 : 2;  // weight rows of a tile
constexpr int kTileCols = kRegisters == 32 ? 6 : 4;  // activation rows of a tile
constexpr int kPanelRows = 8;                        // weight rows decoded together: a pass of them is 16 KB
constexpr int kBatchCols = 66;                       // activation rows packed together: they stay in the second-level cache

// Floats of scratch: packed activations, a segment of the panel, totals of a panel, scales of a row.
constexpr int64_t block_scratch(int k) {
  return static_cast<int64_t>(kBatchCols) * k + static_cast<int64_t>(kPanelRows) * kSegment + static_cast<int64_t>(kPanelRows) * kBatchCols * kLanes +
         k / 8 + 64;
}

// One pass of a tile: w [steps][kTileRows][kW], x [steps][N][kW]; totals [kTileRows][N][64].
template <int N>
void block_pass(const float* w, const float* x, int steps, bool first, float* totals) {
  V acc[kTileRows][N];
  for (int m = 0; m < kTileRows; ++m)
    for (int j = 0; j < N; ++j) acc[m][j] = v_zero();
  for (int i = 0; i < steps; ++i, w += kTileRows * kW, x += N * kW) {
    V wv[kTileRows];
    for (int m = 0; m < kTileRows; ++m) {
      wv[m] = v_load(w + m * kW);
      v_keep(wv[m]);
    }
    for (int j = 0; j < N; ++j) {
      V xv = v_load(x + j * kW);
      v_keep(xv);
      for (int m = 0; m < kTileRows; ++m) acc[m][j] = v_fma(wv[m], xv, acc[m][j]);
    }
  }
  for (int m = 0; m < kTileRows; ++m)
    for (int j = 0; j < N; ++j) {
      float* t = totals + (m * N + j) * kLanes;
      v_store(t, first ? acc[m][j] : v_add(v_load(t), acc[m][j]));
    }
}

inline void block_pass_n(int n, const float* w, const float* x, int steps, bool first, float* totals) {
  switch (n) {
    case 1: return block_pass<1>(w, x, steps, first, totals);
    case 2: return block_pass<2>(w, x, steps, first, totals);
    case 3: return block_pass<3>(w, x, steps, first, totals);
    case 4: return block_pass<4>(w, x, steps, first, totals);
    default: break;
  }
  if constexpr (kTileCols == 6) {
    if (n == 5) return block_pass<5>(w, x, steps, first, totals);
    return block_pass<6>(w, x, steps, first, totals);
  }
}

// Activation rows i0 .. i0 + n - 1 by tile, segment, group: [tile][segment][group][step][row of the tile][kW].
inline void pack_block(XRows x, int i0, int n, int k, float* out) {
  for (int t = 0; t < n; t += kTileCols) {
    const int c = n - t < kTileCols ? n - t : kTileCols;
    float* tile = out + static_cast<int64_t>(t) * k;
    for (int j = 0; j < c; ++j) {
      const float* row = x.row(i0 + t + j);
      for (int seg0 = 0; seg0 < k; seg0 += kSegment) {
        const int steps = ((k - seg0 < kSegment ? k - seg0 : kSegment)) / kLanes;
        for (int s = 0; s < steps; ++s)
          for (int g = 0; g < kGroups; ++g)
            v_store(tile + static_cast<int64_t>(seg0) * c + ((g * steps + s) * c + j) * kW, v_load(row + seg0 + s * kLanes + g * kW));
      }
    }
  }
}

// Where a row of a panel begins: [tile][group][step][row of the tile][kW].
DS4_INLINE float* panel_row(float* panel, int row, int steps) {
  return panel + static_cast<int64_t>(row / kTileRows) * kTileRows * steps * kLanes + row % kTileRows * kW;
}

// A segment of a weight row into its panel, by the decoders of single rows ...
template <class Make>
struct PlainPanel {
  const Make& make;
  void operator()(int r, int seg0, int steps, float* to) const {
    const auto w = make(r);
    for (int s = 0; s < steps; ++s)
      for (int g = 0; g < kGroups; ++g) v_store(to + (g * steps + s) * kTileRows * kW, w.get(seg0 + s * kLanes + g * kW));
  }
};

// ... and by those that decode scales ahead, where vectors hold elements in order.
template <class Dec>
struct FastPanel {
  const Matrix& m;
  float* scales;
  void operator()(int r, int seg0, int steps, float* to) const {
    Dec w(m, r, scales);
    for (int s = 0; s < steps; ++s) {
      const int i = seg0 + s * kLanes;
      if (Dec::kPrepares && i % kChunk == 0) w.prepare(i);
      unroll<kGroups>([&](auto gi) DS4_LAMBDA_INLINE {
        constexpr int g = decltype(gi)::value;
        v_store(to + (g * steps + s) * kTileRows * kW, w.template get<g * kW>(i));
      });
    }
  }
};

// The products of a panel with the packed activations, added up: totals [tile of the panel][tile of x][m][j][64].
template <class Decode>
void panel_totals(const Decode& decode, int r, int rows, const float* packed, int n, int k, float* panel, float* totals) {
  for (int seg0 = 0; seg0 < k; seg0 += kSegment) {
    const int steps = (k - seg0 < kSegment ? k - seg0 : kSegment) / kLanes;
    for (int q = 0; q < kPanelRows; ++q) decode(r + (q < rows ? q : rows - 1), seg0, steps, panel_row(panel, q, steps));
    for (int g = 0; g < kGroups; ++g)
      for (int t = 0; t < n; t += kTileCols) {
        const int c = n - t < kTileCols ? n - t : kTileCols;
        const float* x = packed + static_cast<int64_t>(t) * k + static_cast<int64_t>(seg0) * c + static_cast<int64_t>(g) * steps * c * kW;
        for (int p = 0; p < kPanelRows; p += kTileRows)
          block_pass_n(c, panel + static_cast<int64_t>(p) * steps * kLanes + static_cast<int64_t>(g) * steps * kTileRows * kW, x, steps,
                       seg0 == 0, totals + (static_cast<int64_t>(p) * n + kTileRows * t) * kLanes + g * kW);
      }
  }
}

// k is a multiple of 64. Activation rows in batches of equal size, since each batch decodes the weights anew.
template <class Decode>
void block_rows_of(const Decode& decode, int r0, int nr, XRows x, int n, int k, float* out, int64_t ldo, float* scratch) {
  float* panel = scratch + static_cast<int64_t>(kBatchCols) * k;
  float* totals = panel + static_cast<int64_t>(kPanelRows) * kSegment;
  const int batches = (n + kBatchCols - 1) / kBatchCols, tiles = (n + kTileCols - 1) / kTileCols;
  const int batch = (tiles + batches - 1) / batches * kTileCols;
  for (int i0 = 0; i0 < n; i0 += batch) {
    const int b = n - i0 < batch ? n - i0 : batch;
    pack_block(x, i0, b, k, scratch);
    for (int r = 0; r < nr; r += kPanelRows) {
      const int rows = nr - r < kPanelRows ? nr - r : kPanelRows;
      panel_totals(decode, r0 + r, rows, scratch, b, k, panel, totals);
      for (int p = 0; p < kPanelRows; p += kTileRows)
        for (int t = 0; t < b; t += kTileCols) {
          const int c = b - t < kTileCols ? b - t : kTileCols;
          float sums[kTileRows * kTileCols];
          trees<1>(reinterpret_cast<const float(*)[kLanes]>(totals + (static_cast<int64_t>(p) * b + kTileRows * t) * kLanes), kTileRows * c, sums);
          for (int m = 0; m < kTileRows && p + m < rows; ++m)
            for (int j = 0; j < c; ++j) out[(i0 + t + j) * ldo + r + p + m] = sums[m * c + j];
        }
    }
  }
}

// The scales of a row stand behind everything else.
inline float* block_scales_room(int k, float* scratch) { return scratch + block_scratch(k) - k / 8 - 64; }

// False: this matrix has no decoder of that kind.
inline bool block_rows_fast(const Matrix& m, int r0, int nr, XRows x, int n, float* out, int64_t ldo, float* scratch) {
#if defined(DS4_ISA_AVX512) || defined(DS4_ISA_AVX2)
  bool done = false;
  with_fast_decoder(m, [&](auto tag) {
    using Dec = typename decltype(tag)::type;
    if constexpr (Dec::kLayout == 1) {
      block_rows_of(FastPanel<Dec>{m, block_scales_room(m.cols, scratch)}, r0, nr, x, n, m.cols, out, ldo, scratch);
      done = true;
    }
  });
  return done;
#else
  (void)m, (void)r0, (void)nr, (void)x, (void)n, (void)out, (void)ldo, (void)scratch;
  return false;
#endif
}

DS4_CPU_NAMESPACE_END
