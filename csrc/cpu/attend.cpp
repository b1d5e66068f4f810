// attend: attention of all heads over the window and the selected compressed rows, with a sink, then un-rotation.
//
// List of a query: `window` places (its window rows in position order, then holes), then the selected entries in
// position order. Blocks of 64 places; running maximum; order of every sum: docs/numerics.md, R2 and R3.
#include "cpu/backend.h"
#include "cpu/row_ops.h"

namespace ds4::cpu::DS4_ISA {

namespace {

constexpr int kPlaces = 64;
constexpr int kDotLanes = 64;
constexpr int kDotVectors = kDotLanes / kW;

// Scores of `n` keys, 64 accumulators each; a head may have only 32 (then the upper half stays zero).
void key_scores(const float* q, const float* keys, int n, int hd, float scale, float* out) {
  for (int j = 0; j < n; ++j) {
    const float* k = keys + static_cast<int64_t>(j) * hd;
    V acc[kDotVectors];
    for (int g = 0; g < kDotVectors; ++g) acc[g] = v_zero();
    int i = 0;
    for (; i + kDotLanes <= hd; i += kDotLanes)
      for (int g = 0; g < kDotVectors; ++g) acc[g] = v_fma(v_load(q + i + g * kW), v_load(k + i + g * kW), acc[g]);
    for (int g = 0; i < hd; ++g, i += kW) acc[g] = v_fma(v_load(q + i), v_load(k + i), acc[g]);
    out[j] = pairwise_tree<kDotVectors>(acc) * scale;
  }
}

// o = o * alpha, then o += p_j v_j for ascending j.
void add_values(float* o, const float* values, const float* p, int n, int hd, float alpha, bool first) {
  constexpr int U = 4;
  const V va = v_set(alpha);
  for (int i = 0; i < hd; i += U * kW) {
    const int u_end = hd - i < U * kW ? (hd - i) / kW : U;
    V acc[U];
    for (int u = 0; u < u_end; ++u) acc[u] = first ? v_zero() : v_mul(v_load(o + i + u * kW), va);
    if (u_end == U)
      for (int j = 0; j < n; ++j) {
        const V pj = v_set(p[j]);
        const float* v = values + static_cast<int64_t>(j) * hd + i;
        for (int u = 0; u < U; ++u) acc[u] = v_fma(pj, v_load(v + u * kW), acc[u]);
      }
    else
      for (int j = 0; j < n; ++j)
        for (int u = 0; u < u_end; ++u)
          acc[u] = v_fma(v_set(p[j]), v_load(values + static_cast<int64_t>(j) * hd + i + u * kW), acc[u]);
    for (int u = 0; u < u_end; ++u) v_store(o + i + u * kW, acc[u]);
  }
}

// Sum of 64 places, pairwise by index bit, the lowest first; missing places count 0.
float sum_places(float* e, int n) {
  for (int j = n; j < kPlaces; ++j) e[j] = 0.f;
  V t[kPlaces / kW];
  for (int g = 0; g < kPlaces / kW; ++g) t[g] = v_load(e + g * kW);
  return pairwise_tree<kPlaces / kW>(t);
}

struct Softmax {
  float max = -1e30f, sum = 0.f;
  bool first = true;
};

void attend_block(const float* q, const float* keys, int n, int hd, float scale, bool round, Softmax& state, float* o) {
  if (n == 0) return;
  float s[kPlaces], p[kPlaces], e[kPlaces];
  key_scores(q, keys, n, hd, scale, s);
  float top = state.max;
  for (int j = 0; j < n; ++j) top = ds4_max(top, s[j]);
  const float alpha = ds4_exp(state.max - top);
  for (int j = 0; j < n; ++j) e[j] = ds4_exp(s[j] - top);
  for (int j = 0; j < n; ++j) p[j] = round ? ds4_bf16(e[j]) : e[j];
  state.sum = DS4_FMA(state.sum, alpha, sum_places(e, n));
  add_values(o, keys, p, n, hd, alpha, state.first);
  state.max = top;
  state.first = false;
}

}  // namespace

void CpuBackend::attend(const AttendArgs& a) {
  const int hd = s_.head_dim, heads = s_.n_heads, w = s_.window, half = s_.rope_dim / 2, topk = s_.index_topk;
  const float scale = 1.0f / DS4_SQRT(static_cast<float>(hd));
  const int most = w + (a.compressed != nullptr ? topk : 0);
  need_scratch(static_cast<size_t>(most) * hd);
  // With few rows the heads are shared out as well.
  int splits = 1;
  while (splits < heads && a.n * splits < 2 * pool_->n_threads()) splits *= 2;
  if (splits > heads) splits = heads;
  const int crb = s_.compressed_row_bytes();
  loop(static_cast<int64_t>(a.n) * splits, [&](int64_t task, int worker) {
    const int64_t i = task / splits;
    const int part = static_cast<int>(task % splits);
    const int h0 = heads * part / splits, h1 = heads * (part + 1) / splits;
    if (h0 == h1) return;
    const int64_t p = a.position + i;
    const int64_t first = p - w + 1 > 0 ? p - w + 1 : 0;
    const int n_window = static_cast<int>(p - first + 1);
    float* rows = scratch(worker);
    for (int j = 0; j < n_window; ++j) unpack_window_row(a.window.row(first + j), hd, rows + static_cast<int64_t>(j) * hd);
    const int n_more = a.compressed != nullptr ? a.n_selected[i] : 0;
    float* more = rows + static_cast<int64_t>(n_window) * hd;
    for (int j = 0; j < n_more; ++j)
      unpack_compressed_row(a.compressed + static_cast<int64_t>(a.selected[i * topk + j]) * crb, hd,
                            more + static_cast<int64_t>(j) * hd);
    for (int h = h0; h < h1; ++h) {
      const int64_t at = (i * heads + h) * hd;
      const float* q = a.q + at;
      float* o = a.o + at;
      Softmax state;
      // Places in the list: the window's are padded to `w`, so blocks start at the same places for every position.
      for (int b = 0; b < w + n_more; b += kPlaces) {
        const int end = b + kPlaces;
        const int w0 = b < n_window ? b : n_window, w1 = end < n_window ? end : n_window;
        const int m0 = b > w ? b - w : 0, m1 = end - w < n_more ? (end - w > 0 ? end - w : 0) : n_more;
        const int n_w = w1 - w0, n_m = m1 > m0 ? m1 - m0 : 0;
        // Window rows and entries are neighbours in scratch, so a mixed block is one run.
        const int64_t start = n_w > 0 ? w0 : n_window + m0;
        attend_block(q, rows + start * hd, n_w + n_m, hd, scale, round_, state, o);
      }
      const float total = state.sum + ds4_exp(a.sink[h] - state.max);
      for (int k = 0; k < hd; ++k) o[k] = rounded(o[k] / total, round_);
      if (a.o_raw != nullptr)
        for (int k = 0; k < hd; ++k) a.o_raw[at + k] = o[k];
      rotate_tail(o, hd, s_.rope_dim, a.rope.cos + i * half, a.rope.sin + i * half, -1.f, round_);
    }
  });
}

}  // namespace ds4::cpu::DS4_ISA
