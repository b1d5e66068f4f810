// linear: row products of every family, and the activation quantiser.
#include "linear.h"

#include "metal_host/backend.h"
#include "metal_host/products.h"

namespace ds4::metal {

LinearParams linear_params(const Matrix& m, int row0, int rows, int n, int64_t x_stride, int64_t ldo) {
  LinearParams args{};
  args.row_bytes = static_cast<uint64_t>(m.row_bytes);
  args.scale_row_bytes = static_cast<uint32_t>(m.scale_row_bytes);
  args.n = static_cast<uint32_t>(n);
  args.rows = static_cast<uint32_t>(rows);
  args.cols = static_cast<uint32_t>(m.cols);
  args.row0 = static_cast<uint32_t>(row0);
  args.x_stride = static_cast<uint32_t>(x_stride);
  args.ldo = static_cast<uint32_t>(ldo);
  args.group_rows = static_cast<uint32_t>(rows);
  return args;
}

Constants linear_constants(const Matrix& m, int n, int flags) {
  Constants c;
  c.type = static_cast<int32_t>(m.type);
  c.rows = tile_rows(n);
  c.flags = flags;
  return c;
}

Grid linear_grid(int rows, int n) {
  constexpr int kPer = LINEAR_OUTPUTS * LINEAR_SIMDGROUPS;
  return {(rows + kPer - 1) / kPer, (n + LINEAR_TILE - 1) / LINEAR_TILE};
}

void MetalBackend::linear(const Product& p, int n) {
  LinearParams args = linear_params(*p.m, p.row0, p.rows, n, p.x_stride, p.ldo);
  if (p.group_rows > 0) {
    args.group_rows = static_cast<uint32_t>(p.group_rows);
    args.group_x = static_cast<uint32_t>(p.group_x);
  }
  encode("linear", linear_constants(*p.m, n, p.round && round_ ? LINEAR_ROUND : 0), args,
         {fixed(p.m->data), fixed(scales(*p.m)), reads(p.x, n * p.x_stride), writes(p.out, (n - 1) * p.ldo + p.rows), absent(), absent(),
          absent(), absent(), absent()},
         linear_grid(p.rows, n), LINEAR_SIMDGROUPS * kLanes);
}

void MetalBackend::linear(const Matrix& m, const float* x, int64_t x_stride, int n, float* out, int64_t ldo, bool round) {
  linear(Product{&m, 0, m.rows, x, x_stride, out, ldo, round}, n);
}

void MetalBackend::quantise(float* x, int64_t stride, int width, int n) {
  if (!quant_) return;
  const QuantiseParams args{static_cast<uint32_t>(stride), static_cast<uint32_t>(width)};
  encode("quantise", {}, args, {updates(x, n * stride)}, Grid{(width + 31) / 32, n}, kLanes);
}

}  // namespace ds4::metal
