// index: queries of the block selector as fp4 codes, and their head weights.
#include "cpu/backend.h"
#include "cpu/row_ops.h"

namespace ds4::cpu::DS4_ISA {

void CpuBackend::index_query(const IndexQueryArgs& a) {
  const int heads = s_.index_heads, dim = s_.index_dim, half = s_.rope_dim / 2, groups = dim / 32;
  const int width = heads * dim;
  float* q = need_temp(static_cast<size_t>(a.n) * width);
  const Product products[2] = {
      {&a.w->wq_b, 0, width, XRows{a.qr, s_.q_rank, nullptr}, q, width, round_},
      {&a.w->weights_proj, 0, heads, XRows{a.x, s_.hidden, nullptr}, a.weights, heads, round_}};
  linear(products, 2, a.n);
  const float factor = (1.0f / DS4_SQRT(static_cast<float>(dim))) * (1.0f / DS4_SQRT(static_cast<float>(heads)));
  loop(a.n, [&](int64_t i, int) {
    for (int h = 0; h < heads; ++h) {
      float* qh = q + i * width + h * dim;
      rotate_tail(qh, dim, s_.rope_dim, a.rope.cos + i * half, a.rope.sin + i * half, 1.f, round_);
      for (int g = 0; g < groups; ++g) {
        const float s = ds4_scale_q4_index(group_amax(qh + g * 32, 32));
        const float inv = 1.0f / s;
        a.scales[(i * heads + h) * groups + g] = 0.25f * s;
        int8_t* codes = a.codes + i * width + h * dim + g * 32;
        for (int k = 0; k < 32; ++k)
          codes[k] = static_cast<int8_t>(ds4_e2m1_twice(ds4_e2m1_code(qh[g * 32 + k] * inv)));
      }
      float& w = a.weights[i * heads + h];
      w = rounded(w * factor, round_);
    }
  });
}

}  // namespace ds4::cpu::DS4_ISA
