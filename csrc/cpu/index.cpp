// index: queries of the block selector as fp4 codes, and their head weights.
#include "cpu/backend.h"
#include "cpu/row_ops.h"
#include "cpu/slices.h"

namespace ds4::cpu::DS4_ISA {

void CpuBackend::index_query(const IndexQueryArgs& a) {
  for (int64_t first = 0; first < a.n; first += kSliceRows)
    index_slice(a, first, static_cast<int>(a.n - first < kSliceRows ? a.n - first : kSliceRows));
}

void CpuBackend::index_slice(const IndexQueryArgs& a, int64_t first, int n) {
  const int heads = s_.index_heads, dim = s_.index_dim, half = s_.rope_dim / 2, groups = dim / 32;
  const int width = heads * dim;
  float* q = need_temp(static_cast<size_t>(n) * width);
  float* weights = a.weights + first * heads;
  const Product products[2] = {
      {&a.w->wq_b, 0, width, XRows{a.qr + first * s_.q_rank, s_.q_rank, nullptr}, q, width, round_},
      {&a.w->weights_proj, 0, heads, XRows{a.x + first * s_.hidden, s_.hidden, nullptr}, weights, heads, round_}};
  linear(products, 2, n);
  const float factor = (1.0f / DS4_SQRT(static_cast<float>(dim))) * (1.0f / DS4_SQRT(static_cast<float>(heads)));
  loop(n, [&](int64_t i, int) {
    for (int h = 0; h < heads; ++h) {
      float* qh = q + i * width + h * dim;
      rotate_tail(qh, dim, s_.rope_dim, a.rope.cos + (first + i) * half, a.rope.sin + (first + i) * half, 1.f, round_);
      for (int g = 0; g < groups; ++g) {
        const float s = ds4_scale_q4_index(group_amax(qh + g * 32, 32));
        const float inv = 1.0f / s;
        a.scales[((first + i) * heads + h) * groups + g] = 0.25f * s;
        int8_t* codes = a.codes + (first + i) * width + h * dim + g * 32;
        for (int k = 0; k < 32; ++k)
          codes[k] = static_cast<int8_t>(ds4_e2m1_twice(ds4_e2m1_code(qh[g * 32 + k] * inv)));
      }
      float& w = weights[i * heads + h];
      w = rounded(w * factor, round_);
    }
  });
}

}  // namespace ds4::cpu::DS4_ISA
