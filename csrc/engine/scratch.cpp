#include "engine/scratch.h"

namespace ds4 {

namespace {

struct Layout {
  uint8_t* base;
  size_t used = 0;
  template <class T>
  T* take(int64_t n) {
    T* p = base != nullptr ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (static_cast<size_t>(n) * sizeof(T) + 255) & ~size_t{255};
    return p;
  }
};

}  // namespace

ScratchBytes lay_out(const Shape& s, Activations activations, int64_t n, int64_t n_logits, uint8_t* own, uint8_t* host, Scratch* out) {
  Layout a{own}, h{host};
  Scratch t{};
  const int64_t c = s.n_streams, d = s.hidden, heads = static_cast<int64_t>(s.n_heads) * s.head_dim;
  t.tokens = h.take<int32_t>(n);
  t.stream = a.take<float>(n * c * d);
  t.mix = a.take<float>(n * c);
  t.pre = a.take<float>(n * c);
  t.post = a.take<float>(n * c);
  t.comb = a.take<float>(n * c * c);
  t.x = a.take<float>(n * d);
  t.xq = activations == Activations::fp8 ? a.take<float>(n * d) : t.x;
  t.qr = a.take<float>(n * s.q_rank);
  t.q = a.take<float>(n * heads);
  t.o = a.take<float>(n * heads);
  t.low = a.take<float>(n * s.o_groups * s.o_rank);
  t.y = a.take<float>(n * d);
  const int64_t angles = (n + 1) * (s.rope_dim / 2);
  t.cos = h.take<float>(angles);
  t.sin = h.take<float>(angles);
  t.yarn_cos = h.take<float>(angles);
  t.yarn_sin = h.take<float>(angles);
  t.index_codes = a.take<int8_t>(n * s.index_heads * s.index_dim);
  t.index_scales = a.take<float>(n * s.index_heads * (s.index_dim / 32));
  t.index_weights = a.take<float>(n * s.index_heads);
  t.selected = a.take<int32_t>(n * s.index_topk);
  t.n_selected = a.take<int32_t>(n);
  t.blocks = a.take<int32_t>(n * s.candidate_blocks);
  t.n_blocks = a.take<int32_t>(n);
  t.route_scores = a.take<float>(n * s.n_experts);
  t.experts = a.take<int32_t>(n * s.top_k);
  t.expert_weights = a.take<float>(n * s.top_k);
  t.mid = a.take<float>(n * (s.top_k + 1) * s.expert_dim);
  t.head_x = a.take<float>(n_logits * d);
  t.logits = h.take<float>(n_logits * s.vocab);
  if (out != nullptr) *out = t;
  return {a.used, h.used};
}

Scratch Scratch::from(const Shape& s, int64_t row) const {
  Scratch t = *this;
  const int64_t c = s.n_streams, d = s.hidden, heads = static_cast<int64_t>(s.n_heads) * s.head_dim;
  const int64_t half = s.rope_dim / 2;
  t.tokens += row;
  t.stream += row * c * d;
  t.mix += row * c;
  t.pre += row * c;
  t.post += row * c;
  t.comb += row * c * c;
  t.x += row * d;
  t.xq += row * d;
  t.qr += row * s.q_rank;
  t.q += row * heads;
  t.o += row * heads;
  t.low += row * s.o_groups * s.o_rank;
  t.y += row * d;
  t.cos += row * half;
  t.sin += row * half;
  t.yarn_cos += row * half;
  t.yarn_sin += row * half;
  t.index_codes += row * s.index_heads * s.index_dim;
  t.index_scales += row * s.index_heads * (s.index_dim / 32);
  t.index_weights += row * s.index_heads;
  t.selected += row * s.index_topk;
  t.n_selected += row;
  t.blocks += row * s.candidate_blocks;
  t.n_blocks += row;
  t.route_scores += row * s.n_experts;
  t.experts += row * s.top_k;
  t.expert_weights += row * s.top_k;
  t.mid += row * (s.top_k + 1) * s.expert_dim;
  return t;
}

}  // namespace ds4
