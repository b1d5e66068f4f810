#include "cpu/ops.h"

#include "cpu/hc_row.h"
#include "cpu/row_ops.h"
#include "cpu/topk.h"

namespace ds4::cpu::DS4_ISA {

namespace {

template <class F>
void map(const float* x, int64_t n, float* out, F f) {
  for (int64_t i = 0; i < n; ++i) out[i] = f(x[i]);
}

void unary(Unary kind, const float* x, int64_t n, float* out) {
  switch (kind) {
    case Unary::exp: return map(x, n, out, ds4_exp);
    case Unary::log: return map(x, n, out, ds4_log);
    case Unary::sigmoid: return map(x, n, out, ds4_sigmoid);
    case Unary::softplus: return map(x, n, out, ds4_softplus);
    case Unary::silu: return map(x, n, out, ds4_silu);
    case Unary::bf16: return map(x, n, out, ds4_bf16);
    case Unary::to_e4m3: return map(x, n, out, ds4_to_e4m3);
    case Unary::rsqrt: return map(x, n, out, ds4_rsqrt);
  }
}

void product(const Matrix& m, const float* x, int n, float* out, float* scratch) {
  dot_block(m, 0, m.rows, XRows{x, m.cols, nullptr}, n, out, m.rows, scratch);
}

void pack(RowFormat format, const float* x, int dim, uint8_t* row) {
  switch (format) {
    case RowFormat::window: return pack_window_row(x, dim, row);
    case RowFormat::compressed: return pack_compressed_row(x, dim, row);
    case RowFormat::index: return pack_index_row(x, dim, row);
  }
}

void unpack(RowFormat format, const uint8_t* row, int dim, float* out) {
  switch (format) {
    case RowFormat::window: return unpack_window_row(row, dim, out);
    case RowFormat::compressed: return unpack_compressed_row(row, dim, out);
    case RowFormat::index:
      for (int i = 0; i < dim; ++i) {
        const uint32_t code = (row[i / 2] >> ((i & 1) * 4)) & 15u;
        out[i] = 0.5f * static_cast<float>(ds4_e2m1_twice(code)) * ds4_e8m0(row[dim / 2 + i / 32]);
      }
  }
}

void product_block(const Matrix& m, int r0, int nr, const float* x, int n, float* out, int64_t ldo, float* scratch) {
  dot_block(m, r0, nr, XRows{x, m.cols, nullptr}, n, out, ldo, scratch);
}

uint64_t read_bytes(const uint8_t* p, size_t bytes) {
  constexpr int kWords = 64;
  uint64_t sum[kWords] = {};
  size_t i = 0;
  for (; i + kWords * 8 <= bytes; i += kWords * 8)
    for (int j = 0; j < kWords; ++j) {
      uint64_t v;
      std::memcpy(&v, p + i + j * 8, 8);
      sum[j] ^= v;
    }
  for (; i < bytes; ++i) sum[0] ^= p[i];
  for (int j = 1; j < kWords; ++j) sum[0] ^= sum[j];
  return sum[0];
}

constexpr int kChains = 12;

float fma_chain(int64_t rounds) {
  V a[kChains];
  for (int i = 0; i < kChains; ++i) a[i] = v_set(static_cast<float>(i));
  const V m = v_set(0.999f), c = v_set(0.1f);
  for (int64_t k = 0; k < rounds; ++k)
    for (int i = 0; i < kChains; ++i) a[i] = v_fma(a[i], m, c);
  for (int i = 1; i < kChains; ++i) a[0] = v_add(a[0], a[i]);
  float out[kW];
  v_store(out, a[0]);
  return out[0];
}

int64_t fma_flops(int64_t rounds) { return rounds * kChains * kW * 2; }

}  // namespace

const Ops* ops();
const Ops* ops() {
  static const Ops table{unary,   dot_scratch, product, decode_row,      norm_row,     rotate_tail, fake_q8,
                         pack,    unpack,      hc_coefficients, collapse_row, expand_row,  product_block,
                         block_rows, read_bytes, fma_chain, fma_flops, top_k};
  return &table;
}

}  // namespace ds4::cpu::DS4_ISA
