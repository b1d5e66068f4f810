// Products of the second numeric class, "matrix" (docs/numerics.md): weights and activations in bfloat16, pairs of them
// added to 16 accumulators. One table for each instruction set; only the native one is fast.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/weights.h"

namespace ds4::cpu {

// Activation row i is at base + (index ? index[i] : i) * stride.
struct MatrixRows {
  const float* base;
  int64_t stride;
  const int32_t* index;
  const float* row(int i) const { return base + (index != nullptr ? index[i] : i) * stride; }
};

struct MatrixClass {
  bool native;  // by the instruction that the class is made for; else emulated, for tests
  int batch;    // activation rows handled together
  size_t (*scratch)(int k);  // floats that block() needs
  // out[i * ldo + (r - r0)] for rows r0 .. r0 + nr - 1 of m and i < n, any n.
  void (*block)(const Matrix& m, int r0, int nr, MatrixRows x, int n, float* out, int64_t ldo, float* scratch);
  // Does the instruction compute what the class is defined by? (Emulations do.)
  bool (*agrees)();
  // For benchmarks: multiplies and adds in registers, flops(rounds) operations.
  float (*chain)(int64_t rounds);
  int64_t (*flops)(int64_t rounds);
};

}  // namespace ds4::cpu
