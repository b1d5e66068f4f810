// hc: hyper-connection coefficients, collapse + norm, expand (notes: docs/numerics.md, R7).
#include "cpu/backend.h"
#include "cpu/hc_row.h"
#include "cpu/row_ops.h"

namespace ds4::cpu::DS4_ISA {

void CpuBackend::hc_read(const HcReadArgs& a) {
  const int c = s_.n_streams, d = s_.hidden, m = s_.mix_rows();
  float* z = need_temp(static_cast<size_t>(a.n) * m);
  linear(a.w->fn, XRows{a.stream, static_cast<int64_t>(c) * d, nullptr}, a.n, z, m, false);
  need_scratch(static_cast<size_t>(d));
  loop(a.n, [&](int64_t i, int worker) {
    const float* stream = a.stream + i * c * d;
    const float r = inverse_rms(stream, c * d, s_.norm_eps);
    float* zi = z + i * m;
    for (int j = 0; j < m; ++j) zi[j] = zi[j] * r;
    hc_coefficients(zi, a.w->scale, a.w->base, c, s_.sinkhorn_iters, s_.hc_eps, a.pre + i * c, a.post + i * c,
                    a.comb + i * c * c);
    float* flat = scratch(worker);
    collapse_row(stream, a.mix + i * c, c, d, round_, flat);
    float* x = a.x + i * d;
    norm_row(flat, a.w->norm, d, s_.norm_eps, round_, x);
    if (a.xq != a.x) {
      float* xq = a.xq + i * d;
      for (int k = 0; k < d; ++k) xq[k] = x[k];
      fake_q8(xq, d);
    }
  });
}

void CpuBackend::hc_write(const HcWriteArgs& a) {
  const int c = s_.n_streams, d = s_.hidden;
  loop(a.n, [&](int64_t i, int) {
    expand_row(a.y + i * d, a.post + i * c, a.comb + i * c * c, c, d, round_, a.stream + i * c * d);
  });
}

}  // namespace ds4::cpu::DS4_ISA
