// Single pieces of the CPU arithmetic, for tests: each instruction set has one table.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/weights.h"

namespace ds4::cpu {

enum class Unary : int { exp, log, sigmoid, softplus, silu, bf16, to_e4m3, rsqrt };
enum class RowFormat : int { window, compressed, index };

struct Ops {
  void (*unary)(Unary kind, const float* x, int64_t n, float* out);
  size_t (*product_scratch)(int k);
  // out [n][rows]
  void (*product)(const Matrix& m, const float* x, int n, float* out, float* scratch);
  void (*decode)(const Matrix& m, int row, float* out);
  void (*norm)(const float* x, const float* weight, int n, float eps, bool round, float* out);
  void (*rotate)(float* x, int dim, int rope_dim, const float* cos, const float* sin, float sign, bool round);
  void (*fake_q8)(float* x, int n);
  void (*pack)(RowFormat format, const float* x, int dim, uint8_t* row);
  void (*unpack)(RowFormat format, const uint8_t* row, int dim, float* out);
  void (*hc_coefficients)(const float* z, const float* scale, const float* base, int c, int iters, float eps,
                          float* pre, float* post, float* comb);
  void (*collapse)(const float* stream, const float* mix, int c, int d, bool round, float* out);
  void (*expand)(const float* y, const float* post, const float* comb, int c, int d, bool round, float* stream);
  // Rows r0 .. r0 + nr - 1 times n activation rows: out[i * ldo + r - r0].
  void (*product_block)(const Matrix& m, int r0, int nr, const float* x, int n, float* out, int64_t ldo, float* scratch);
  // Rows of a block, as the engine shares out a matrix.
  int64_t (*block_rows)(int64_t total, int n_threads, int n);
  // For benchmarks: reads memory; multiplies and adds in registers, fma_flops(rounds) operations.
  uint64_t (*read)(const uint8_t* p, size_t bytes);
  float (*fma_chain)(int64_t rounds);
  int64_t (*fma_flops)(int64_t rounds);
  // bin: n + 1 numbers of scratch
  int64_t (*top_k)(const float* scores, int64_t n, int64_t k, int32_t* out, uint64_t* bin);
};

}  // namespace ds4::cpu
