// draft: what only the drafter needs, but for its attention (attend.cpp).
#include "draft.h"

#include <algorithm>

#include "metal_host/backend.h"
#include "metal_host/products.h"

namespace ds4::metal {

void MetalBackend::stream_mean(const StreamMeanArgs& a) {
  const int64_t n = a.n, c = s_.n_streams, d = s_.hidden;
  if (n == 0) return;
  DraftRowsArgs p{};
  p.streams = static_cast<uint32_t>(c);
  p.width = static_cast<uint32_t>(d);
  p.stride = static_cast<uint32_t>(a.stride);
  p.share = 1.0f / static_cast<float>(c);
  encode("stream_mean", {}, p, {reads(a.stream, n * c * d), writes(a.out, (n - 1) * a.stride + d)}, {groups_of(d, DRAFT_THREADS), n},
         DRAFT_THREADS);
}

void MetalBackend::collapse(const CollapseArgs& a) {
  const int64_t n = a.n, c = s_.n_streams, d = s_.hidden;
  DraftRowsArgs p{};
  p.streams = static_cast<uint32_t>(c);
  p.width = static_cast<uint32_t>(d);
  encode("collapse", {}, p, {reads(a.stream, n * c * d), reads(a.mix, n * c), writes(a.x, n * d)}, {groups_of(d, DRAFT_THREADS), n},
         DRAFT_THREADS);
}

void MetalBackend::draft_main(const DraftMainArgs& a) {
  const int64_t n = a.n, d = s_.hidden, wide = a.w->cols;
  const float* in = a.main;
  if (quant_) {
    float* quantised = temp<float>(Temp::draft_main, n * wide);
    DraftRowsArgs p{};
    p.width = static_cast<uint32_t>(wide);
    encode("draft_quantise", {}, p, {reads(a.main, n * wide), writes(quantised, n * wide)}, {groups_of(wide, DRAFT_THREADS), n}, DRAFT_THREADS);
    in = quantised;
  }
  linear(*a.w, in, wide, a.n, a.x, d, true);
  DraftRowsArgs p{};
  p.width = static_cast<uint32_t>(d);
  p.eps = s_.norm_eps;
  encode("draft_norm", {}, p, {updates(a.x, n * d), fixed(a.norm)}, {n}, DRAFT_THREADS, normed_bytes(d));
}

void MetalBackend::draft_window(const DraftWindowArgs& a) {
  const int64_t n = a.n, hd = s_.head_dim, angles = n * (s_.rope_dim / 2);
  float* kv = temp<float>(Temp::window_rows, n * hd);
  linear(a.w->wkv, a.x, s_.hidden, a.n, kv, hd, true);
  DraftRowsArgs p{};
  p.width = static_cast<uint32_t>(hd);
  p.rope_dim = static_cast<uint32_t>(s_.rope_dim);
  p.position = static_cast<uint32_t>(a.position);
  p.capacity = static_cast<uint32_t>(a.window.capacity);
  p.row_bytes = static_cast<uint32_t>(a.window.row_bytes);
  p.eps = s_.norm_eps;
  encode("draft_pack", {}, p,
         {reads(kv, n * hd), fixed(a.w->kv_norm), reads(a.rope.cos, angles), reads(a.rope.sin, angles),
          updates(a.window.base, a.window.capacity * a.window.row_bytes)},
         {n}, DRAFT_THREADS, normed_bytes(hd));
}

void MetalBackend::markov(const MarkovArgs& a) {
  const int64_t d = s_.hidden, rank = a.embed->cols, vocab = s_.vocab, runs = groups_of(vocab, MARKOV_RUN);
  float* joined = temp<float>(Temp::markov_joined, d + rank);
  float* bias = temp<float>(Temp::markov_bias, vocab);
  float* maxima = temp<float>(Temp::markov_sums, runs);
  MarkovParams p{};
  p.row_bytes = static_cast<uint64_t>(a.embed->row_bytes);
  p.scale_row_bytes = static_cast<uint32_t>(a.embed->scale_row_bytes);
  p.previous = static_cast<uint32_t>(a.previous);
  p.vocab = static_cast<uint32_t>(vocab);
  p.hidden = static_cast<uint32_t>(d);
  p.rank = static_cast<uint32_t>(rank);
  p.groups = static_cast<uint32_t>(runs);
  Constants type;
  type.type = static_cast<int32_t>(a.embed->type);
  encode("markov_join", type, p, {fixed(a.embed->data), fixed(scales(*a.embed)), reads(a.x, d), writes(joined, d + rank)},
         {groups_of(std::max(d, rank), 2 * DRAFT_THREADS)}, DRAFT_THREADS);
  linear(*a.head, joined + d, rank, 1, bias, vocab, false);
  if (a.confidence_out != nullptr) linear(*a.confidence, joined, d + rank, 1, a.confidence_out, 1, false);
  encode("markov_logits", {}, p, {reads(a.base, vocab), reads(bias, vocab), writes(a.logits, vocab), writes(maxima, runs)}, {runs},
         MARKOV_THREADS, MARKOV_THREADS / 32 * sizeof(float));
  if (a.top == nullptr) return;
  encode("markov_top", {}, p, {reads(a.logits, vocab), reads(maxima, runs), writes(a.top, 1)}, {1}, MARKOV_THREADS,
         MARKOV_RUN * sizeof(float));
}

}  // namespace ds4::metal
