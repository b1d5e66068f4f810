// How the families issue row products with something folded in (metal/linear.h).
#pragma once

#include <algorithm>

#include "linear.h"
#include "metal_host/backend.h"
#include "tile_sizes.h"
#include "wide.h"

namespace ds4::metal {

// Arguments of row products (metal/linear.h) for rows row0 .. row0 + rows - 1 of m and n activation rows.
LinearParams linear_params(const Matrix& m, int row0, int rows, int n, int64_t x_stride, int64_t ldo);

// Which kernel makes them, and how it is launched: `linear`, whose simdgroups take two matrix rows and up to 8 activation rows
// each; `linear_split`, where few matrix rows have several segments; `linear_wide`, whose simdgroups take eight; or `linear_many`,
// tiles of 32 x 32.
struct LinearRun {
  const char* kernel;
  Constants constants;
  Grid grid;
  int threads;
  size_t threadgroup_bytes;
};
// Of args.rows rows with args.n activation rows from x on; sets what the kernel needs beside.
LinearRun linear_run(const Matrix& m, LinearParams& args, int flags, const float* x);

// Are products of this type and shape made by the kernels in which four lanes share a row (metal/wide_rows.h)?
bool use_wide(RowType type, int64_t cols, int64_t row_bytes, bool aligned);
int64_t wide_pitch(RowType type);  // 0: there is no such kernel
// Bytes in which a simdgroup of a kernel for so many activation rows stages weights, and so many of these rows.
int64_t wide_stage(RowType type, int64_t rows, int64_t staged, bool deep = false);
bool device_has(size_t threadgroup_bytes);
// Rows and activations begin where loads of 16 bytes may.
bool aligned_for(const Matrix& m, const float* x, int64_t x_stride);

// Do products with n activation rows, in so many tiles of metal/tiles.h, gain by them?
bool use_tiles(int64_t n, int64_t tiles);
constexpr int64_t kBatchBytes = int64_t{64} << 20;  // of scores that are made at a time, unless one row has more
constexpr int kMoeRows = 2048;                      // tokens whose experts are grouped together, at most
constexpr int64_t kPartFloats = int64_t{36} << 20;  // of the slots' products that are kept at a time (moe.cpp)
constexpr int kSegmentColumns = 2048;  // of the canonical order (metal/rows.h)
// TILE_FOLDS for rows of more than one segment.
int tile_flags(int64_t cols);

// Threadgroup memory of a row of `width` and the scratch of its norm (metal/norm.h).
size_t norm_bytes(int width);

inline int tile_rows(int n) { return std::min(n, kTileRows); }
// Scales of a matrix; types without any get the data, which the kernel then does not look at.
inline const uint8_t* scales(const Matrix& m) { return m.scale != nullptr ? m.scale : m.data; }


// Threadgroup memory of a row of `width` elements that a kernel norms (metal/norm.h).
inline size_t normed_bytes(int64_t width) { return static_cast<size_t>(width + 64 * ((width + 2047) / 2048) + 1) * sizeof(float); }
// Threadgroups of `size` that n need.
inline int64_t groups_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

}  // namespace ds4::metal
