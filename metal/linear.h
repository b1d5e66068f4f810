// linear: row products of one matrix with many activation rows, and what may follow them in the same dispatch.
#pragma once

#include "compat.h"

// Bits of fc_flags.
#define LINEAR_ROUND 1       // results are rounded to bf16
#define LINEAR_ROTATE 2      // pairs at the end of every head are rotated
#define LINEAR_EXPAND 4      // the result goes into the streams as well (hc_write)
#define LINEAR_SCORE 8       // sqrt(softplus(result))

#define LINEAR_OUTPUTS 2     // matrix rows of a simdgroup
#define LINEAR_SIMDGROUPS 4  // of a threadgroup
#define LINEAR_TILE 8        // activation rows of a threadgroup
#define LINEAR_SPLIT 8       // simdgroups of a threadgroup of linear_split, at most

struct LinearParams {
  uint64_t row_bytes;
  uint32_t scale_row_bytes;
  uint32_t n, rows, cols;  // activation rows, matrix rows, columns
  uint32_t row0;           // first matrix row
  uint32_t x_stride, ldo;  // floats
  uint32_t group_rows, group_x;  // row r reads x + (r / group_rows) * group_x
  uint32_t head_dim, rope_dim;   // LINEAR_ROTATE
  uint32_t streams;              // LINEAR_EXPAND
  uint32_t x_at, out_at;         // floats in front of the first row
  uint32_t area, tiles;          // linear_wide: bytes of threadgroup memory of a simdgroup, tiles of a threadgroup
};

struct QuantiseParams {
  uint32_t stride, width;
};
