// How the families issue row products with something folded in (metal/linear.h).
#pragma once

#include <algorithm>

#include "linear.h"
#include "metal_host/backend.h"

namespace ds4::metal {

// Arguments, function constants and grid of the kernel "linear" for rows row0 .. row0 + rows - 1 of m and n activation rows.
LinearParams linear_params(const Matrix& m, int row0, int rows, int n, int64_t x_stride, int64_t ldo);
Constants linear_constants(const Matrix& m, int n, int flags);
Grid linear_grid(int rows, int n);

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
