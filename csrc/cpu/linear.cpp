// linear: several matrices times several activation rows in one parallel loop.
#include "cpu/backend.h"
#include "cpu/row_ops.h"

namespace ds4::cpu::DS4_ISA {

namespace {
constexpr int kMaxProducts = 8;
constexpr int kBatch = 96;  // activation rows of one task: they stay in the second-level cache
}  // namespace

void CpuBackend::linear(const Product* products, int n_products, int n, bool heavy) {
  const bool wide = heavy && matrix();
  int k = 0;
  int64_t total_rows = 0;
  for (int p = 0; p < n_products; ++p) {
    k = products[p].m->cols > k ? products[p].m->cols : k;
    total_rows += products[p].rows;
  }
  need_scratch(wide ? matrix_.scratch(k) : dot_scratch(k));
  const int batch = wide ? matrix_.batch : kBatch;
  const int64_t block = block_rows(total_rows, pool_->n_threads(), n);
  int64_t first[kMaxProducts + 1];
  first[0] = 0;
  for (int p = 0; p < n_products; ++p) first[p + 1] = first[p] + (products[p].rows + block - 1) / block;
  const int64_t n_blocks = first[n_products];
  const int64_t n_batches = (n + batch - 1) / batch;
  loop(n_blocks * n_batches, [&](int64_t task, int worker) {
    const int64_t b = task % n_blocks;
    const int i0 = static_cast<int>(task / n_blocks) * batch;
    const int rows_x = n - i0 < batch ? n - i0 : batch;
    int p = 0;
    while (b >= first[p + 1]) ++p;
    const Product& q = products[p];
    const int r0 = static_cast<int>((b - first[p]) * block);
    const int nr = q.rows - r0 < block ? q.rows - r0 : static_cast<int>(block);
    XRows x = q.x;
    if (x.index != nullptr)
      x.index += i0;
    else
      x.base += i0 * x.stride;
    float* out = q.out + i0 * q.ldo + r0;
    if (wide)
      matrix_.block(*q.m, q.row0 + r0, nr, {x.base, x.stride, x.index}, rows_x, out, q.ldo, scratch(worker));
    else
      dot_block(*q.m, q.row0 + r0, nr, x, rows_x, out, q.ldo, scratch(worker));
    if (q.round)
      for (int i = 0; i < rows_x; ++i) round_row(out + i * q.ldo, nr, true);
  });
}

void CpuBackend::linear(const Matrix& m, XRows x, int n, float* out, int64_t ldo, bool round, bool heavy) {
  const Product p{&m, 0, m.rows, x, out, ldo, round};
  linear(&p, 1, n, heavy);
}

}  // namespace ds4::cpu::DS4_ISA
