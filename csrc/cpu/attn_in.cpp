// linear (attention in): low-rank query and window row from one pass over the input; query up-projection.
#include "cpu/backend.h"
#include "cpu/row_ops.h"

namespace ds4::cpu::DS4_ISA {

void CpuBackend::attn_in(const AttnInArgs& a) {
  const int d = s_.hidden, hd = s_.head_dim, half = s_.rope_dim / 2;
  float* kv = need_temp(static_cast<size_t>(a.n) * hd);
  const XRows x{a.xq, d, nullptr};
  const Product products[2] = {{&a.w->wq_a, 0, s_.q_rank, x, a.qr, s_.q_rank, round_},
                               {&a.w->wkv, 0, hd, x, kv, hd, round_}};
  linear(products, 2, a.n, true);
  loop(a.n, [&](int64_t i, int) {
    float* qr = a.qr + i * s_.q_rank;
    norm_row(qr, a.w->q_norm, s_.q_rank, s_.norm_eps, round_, qr);
    if (quant_) fake_q8(qr, s_.q_rank);
    float* row = kv + i * hd;
    norm_row(row, a.w->kv_norm, hd, s_.norm_eps, round_, row);
    rotate_tail(row, hd, s_.rope_dim, a.rope.cos + i * half, a.rope.sin + i * half, 1.f, round_);
    pack_window_row(row, hd, a.window.row(a.position + i));
  });
}

void CpuBackend::attn_query(const AttnQueryArgs& a) {
  const int hd = s_.head_dim, half = s_.rope_dim / 2;
  const int64_t width = static_cast<int64_t>(s_.n_heads) * hd;
  linear(a.w->wq_b, XRows{a.qr, s_.q_rank, nullptr}, a.n, a.q, width, round_, true);
  loop(a.n, [&](int64_t i, int) {
    for (int h = 0; h < s_.n_heads; ++h)
      rotate_tail(a.q + i * width + h * hd, hd, s_.rope_dim, a.rope.cos + i * half, a.rope.sin + i * half, 1.f, round_);
  });
}

// Grouped low-rank output: each group of heads has its own first matrix (input not quantised), then one shared.
void CpuBackend::attn_out(const AttnOutArgs& a) {
  const int groups = s_.o_groups, rank = s_.o_rank, gd = s_.group_dim();
  const int64_t width = static_cast<int64_t>(s_.n_heads) * s_.head_dim;
  const int low = groups * rank;
  for (int g0 = 0; g0 < groups; g0 += 8) {
    Product products[8];
    int np = 0;
    for (int g = g0; g < groups && np < 8; ++g, ++np)
      products[np] = {&a.w->wo_a, g * rank, rank, XRows{a.o + static_cast<int64_t>(g) * gd, width, nullptr},
                      a.low + g * rank, low, round_};
    linear(products, np, a.n, true);
  }
  if (quant_) loop(a.n, [&](int64_t i, int) { fake_q8(a.low + i * low, low); });
  linear(a.w->wo_b, XRows{a.low, low, nullptr}, a.n, a.y, s_.hidden, round_, true);
}

}  // namespace ds4::cpu::DS4_ISA
