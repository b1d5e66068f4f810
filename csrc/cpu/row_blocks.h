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
constexpr int kBatchCols = 48;                       // activation rows packed together: they stay in the second-level cache

// Floats of scratch: packed activations, a segment of the panel, totals of a panel.
constexpr int64_t block_scratch(int k) {
  return static_cast<int64_t>(kBatchCols) * k + static_cast<int64_t>(kPanelRows) * kSegment + static_cast<int64_t>(kPanelRows) * kBatchCols * kLanes;
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

// A segment of one weight row of a panel: [tile][group][step][row of the tile][kW].
template <class Dec>
void decode_panel_row(const Dec& w, int row, int seg0, int steps, float* out) {
  float* to = out + static_cast<int64_t>(row / kTileRows) * kTileRows * steps * kLanes + row % kTileRows * kW;
  for (int s = 0; s < steps; ++s)
    for (int g = 0; g < kGroups; ++g) v_store(to + (g * steps + s) * kTileRows * kW, w.get(seg0 + s * kLanes + g * kW));
}

// The products of a panel with the packed activations, added up: totals [tile of the panel][tile of x][m][j][64].
template <class Make>
void panel_totals(const Make& make, int r, int rows, const float* packed, int n, int k, float* panel, float* totals) {
  for (int seg0 = 0; seg0 < k; seg0 += kSegment) {
    const int steps = (k - seg0 < kSegment ? k - seg0 : kSegment) / kLanes;
    for (int q = 0; q < kPanelRows; ++q) decode_panel_row(make(r + (q < rows ? q : rows - 1)), q, seg0, steps, panel);
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

// k is a multiple of 64.
template <class Make>
void block_rows_of(const Make& make, int r0, int nr, XRows x, int n, int k, float* out, int64_t ldo, float* scratch) {
  float* panel = scratch + static_cast<int64_t>(kBatchCols) * k;
  float* totals = panel + static_cast<int64_t>(kPanelRows) * kSegment;
  for (int i0 = 0; i0 < n; i0 += kBatchCols) {
    const int b = n - i0 < kBatchCols ? n - i0 : kBatchCols;
    pack_block(x, i0, b, k, scratch);
    for (int r = 0; r < nr; r += kPanelRows) {
      const int rows = nr - r < kPanelRows ? nr - r : kPanelRows;
      panel_totals(make, r0 + r, rows, scratch, b, k, panel, totals);
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

DS4_CPU_NAMESPACE_END
