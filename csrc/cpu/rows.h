// Row products: out[i][r] = sum_k W[r][k] x[i][k] in the canonical order (docs/numerics.md, R1).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/isa.h"
#include "engine/weights.h"

namespace ds4::cpu::DS4_ISA {

constexpr int kLanes = 64;      // accumulators of one row product
constexpr int kSegment = 2048;  // elements after which the accumulators are folded into the totals

// Activation rows: row i is at base + (index ? index[i] : i) * stride.
struct XRows {
  const float* base;
  int64_t stride;
  const int32_t* index;
  const float* row(int i) const { return base + (index != nullptr ? index[i] : i) * stride; }
};

constexpr int kFewRows = 8;     // most activation rows of the kernels that are bound by memory

// Rows of a block when `total` of them, times n activation rows, are shared among the threads: small enough that all
// finish together, large enough that what a block begins with (streams that nothing prefetched, packing) does not count.
inline int64_t block_rows(int64_t total, int n_threads, int n) {
  const int64_t most = n <= kFewRows ? 256 : 128;
  const int64_t share = total / (static_cast<int64_t>(n_threads) * 6) & ~static_cast<int64_t>(7);
  return share < 8 ? 8 : (share > most ? most : share);
}

// Floats of scratch that dot_block needs for a matrix of k columns.
size_t dot_scratch(int k);

// out[i * ldo + (r - r0)] for rows r0 .. r0 + nr - 1 of m and i < n.
void dot_block(const Matrix& m, int r0, int nr, XRows x, int n, float* out, int64_t ldo, float* scratch);

// Sum of squares and plain dot product of f32 vectors, same order.
float dot_f32(const float* a, const float* b, int k);

// One row of any matrix type, decoded.
void decode_row(const Matrix& m, int r, float* out);

}  // namespace ds4::cpu::DS4_ISA
