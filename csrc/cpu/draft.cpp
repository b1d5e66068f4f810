// draft: what only the drafter needs. Sums follow docs/numerics.md like everything else, so a row of any of these
// operations does not depend on how many rows a call has.
#include "cpu/attend_row.h"
#include "cpu/backend.h"
#include "cpu/hc_row.h"
#include "cpu/row_ops.h"

namespace ds4::cpu::DS4_ISA {

// Mean over the streams, added in stream order.
void CpuBackend::stream_mean(const StreamMeanArgs& a) {
  const int c = s_.n_streams, d = s_.hidden;
  const float share = 1.0f / static_cast<float>(c);
  loop(a.n, [&](int64_t i, int) {
    const float* stream = a.stream + i * c * d;
    float* out = a.out + i * a.stride;
    constexpr int kPart = 64;  // columns that stay in registers, so that the compiler makes vectors of them
    for (int k0 = 0; k0 < d; k0 += kPart) {
      const int m = d - k0 < kPart ? d - k0 : kPart;
      float v[kPart];
      for (int k = 0; k < m; ++k) v[k] = stream[k0 + k];
      for (int j = 1; j < c; ++j)
        for (int k = 0; k < m; ++k) v[k] = v[k] + stream[j * d + k0 + k];
      for (int k = 0; k < m; ++k) out[k0 + k] = rounded(v[k] * share, round_);
    }
  });
}

void CpuBackend::draft_main(const DraftMainArgs& a) {
  const int d = s_.hidden, wide = a.w->cols;
  const float* in = a.main;
  if (quant_) {
    float* temp = need_temp(static_cast<size_t>(a.n) * wide);
    loop(a.n, [&](int64_t i, int) {
      float* row = temp + i * wide;
      for (int k = 0; k < wide; ++k) row[k] = a.main[i * wide + k];
      fake_q8(row, wide);
    });
    in = temp;
  }
  linear(*a.w, XRows{in, wide, nullptr}, a.n, a.x, d, round_);
  loop(a.n, [&](int64_t i, int) {
    float* x = a.x + i * d;
    norm_row(x, a.norm, d, s_.norm_eps, round_, x);
    if (quant_) fake_q8(x, d);
  });
}

void CpuBackend::draft_window(const DraftWindowArgs& a) {
  const int hd = s_.head_dim, half = s_.rope_dim / 2;
  float* kv = need_temp(static_cast<size_t>(a.n) * hd);
  linear(a.w->wkv, XRows{a.x, s_.hidden, nullptr}, a.n, kv, hd, round_);
  loop(a.n, [&](int64_t i, int) {
    float* row = kv + i * hd;
    norm_row(row, a.w->kv_norm, hd, s_.norm_eps, round_, row);
    rotate_tail(row, hd, s_.rope_dim, a.rope.cos + i * half, a.rope.sin + i * half, 1.f, round_);
    pack_window_row(row, hd, a.window.row(a.position + i));
  });
}

// List of a query: `window` places (context rows in position order, then holes), then every row of the block.
void CpuBackend::draft_attend(const DraftAttendArgs& a) {
  const int hd = s_.head_dim, heads = s_.n_heads, w = s_.window, half = s_.rope_dim / 2;
  const float scale = 1.0f / DS4_SQRT(static_cast<float>(hd));
  const int n_context = static_cast<int>(a.position - a.first);
  need_scratch(static_cast<size_t>(n_context + a.n) * hd);
  loop(heads, [&](int64_t h, int worker) {
    float* rows = scratch(worker);
    for (int j = 0; j < n_context; ++j)
      unpack_window_row(a.window.row(a.first + j), hd, rows + static_cast<int64_t>(j) * hd);
    float* own = rows + static_cast<int64_t>(n_context) * hd;
    for (int j = 0; j < a.n; ++j) unpack_window_row(a.block.row(a.position + j), hd, own + static_cast<int64_t>(j) * hd);
    for (int i = 0; i < a.n; ++i) {
      const int64_t at = (static_cast<int64_t>(i) * heads + h) * hd;
      float* o = a.o + at;
      Softmax state;
      for (int b = 0; b < w + a.n; b += kPlaces) {
        const int end = b + kPlaces;
        const int c0 = b < n_context ? b : n_context, c1 = end < n_context ? end : n_context;
        const int m0 = b > w ? b - w : 0, m1 = end - w < a.n ? (end - w > 0 ? end - w : 0) : a.n;
        const int n_c = c1 - c0, n_m = m1 > m0 ? m1 - m0 : 0;
        const int64_t start = n_c > 0 ? c0 : n_context + m0;
        attend_block(a.q + at, rows + start * hd, n_c + n_m, hd, scale, round_, state, o);
      }
      const float total = state.sum + ds4_exp(a.sink[h] - state.max);
      for (int k = 0; k < hd; ++k) o[k] = rounded(o[k] / total, round_);
      rotate_tail(o, hd, s_.rope_dim, a.rope.cos + i * half, a.rope.sin + i * half, -1.f, round_);
    }
  });
}

namespace {

// Largest probability of a row: 64 accumulators, then pairwise.
float top_probability(const float* logits, int n) {
  float max = logits[0];
  for (int k = 1; k < n; ++k) max = ds4_max(max, logits[k]);
  alignas(64) float sum[kPlaces] = {};
  for (int k = 0; k < n; k += kPlaces) {
    const int m = n - k < kPlaces ? n - k : kPlaces;
    for (int j = 0; j < m; ++j) sum[j] = sum[j] + ds4_exp(logits[k + j] - max);
  }
  return 1.0f / sum_places(sum, kPlaces);
}

}  // namespace

void CpuBackend::collapse(const CollapseArgs& a) {
  const int c = s_.n_streams, d = s_.hidden;
  loop(a.n, [&](int64_t i, int) { collapse_row(a.stream + i * c * d, a.mix + i * c, c, d, round_, a.x + i * d); });
}

void CpuBackend::markov(const MarkovArgs& a) {
  const int d = s_.hidden, rank = a.embed->cols, vocab = s_.vocab;
  float* joined = need_temp(static_cast<size_t>(d + rank + vocab));
  float* bias = joined + d + rank;
  for (int k = 0; k < d; ++k) joined[k] = a.x[k];
  decode_row(*a.embed, a.previous, joined + d);
  round_row(joined + d, rank, round_);
  const Product products[2] = {{a.head, 0, vocab, XRows{joined + d, rank, nullptr}, bias, vocab, false},
                               {a.confidence, 0, 1, XRows{joined, d + rank, nullptr}, a.confidence_out, 1, false}};
  linear(products, a.confidence_out != nullptr ? 2 : 1, 1);
  for (int k = 0; k < vocab; ++k) a.logits[k] = a.base[k] + bias[k];
  if (a.top != nullptr) *a.top = top_probability(a.logits, vocab);
}

}  // namespace ds4::cpu::DS4_ISA
