// Row products with VDPBF16PS in the canonical order, where nothing is lost: the instruction adds two products to each
// accumulator, one after the other, each with one rounding. Elements i and i + 64 are such a pair (the first in the
// upper half), so weights and activations that are bfloat16 numbers anyway give the bits of two fused multiply-adds.
#pragma once

#include <cstdint>

#include "cpu/matrix.h"

namespace ds4::cpu {

// out[i * ldo + (r - r0)] for rows r0 .. r0 + nr - 1 of m and 1 <= n <= 8. False, and nothing written: this matrix or
// these activations are not of that kind. Scratch as for dot_block.
using PairRows = bool (*)(const Matrix& m, int r0, int nr, MatrixRows x, int n, float* out, int64_t ldo,
                          float* scratch);

// What this processor has; null where it has none, or one that rounds otherwise.
PairRows pair_rows();

}  // namespace ds4::cpu
