// moe: the whole router in one operation; routed and shared experts in two parallel loops.
#include "cpu/backend.h"
#include "cpu/row_ops.h"
#include "cpu/slices.h"
#include "cpu/topk.h"

namespace ds4::cpu::DS4_ISA {

void CpuBackend::route(const RouteArgs& a) {
  const int n_experts = s_.n_experts, k = s_.top_k;
  linear(a.w->gate, XRows{a.x, s_.hidden, nullptr}, a.n, a.scores, n_experts, false);
  need_scratch(static_cast<size_t>(n_experts) * 4);
  loop(a.n, [&](int64_t i, int worker) {
    float* s = a.scores + i * n_experts;
    float* biased = scratch(worker);
    uint64_t* bin = reinterpret_cast<uint64_t*>(biased + ((n_experts + 1) & ~1));
    for (int e = 0; e < n_experts; ++e) s[e] = DS4_SQRT(ds4_softplus(s[e]));
    for (int e = 0; e < n_experts; ++e) biased[e] = s[e] + a.w->bias[e];
    int32_t* chosen = a.experts + i * k;
    int got = static_cast<int>(top_k(biased, n_experts, k, chosen, bin));
    // Scores that are not numbers leave places open: fill them with the lowest ids, the logits will be NaN anyway.
    for (int e = 0; got < k; ++e) {
      bool there = false;
      for (int j = 0; j < got; ++j) there = there || chosen[j] == e;
      if (!there) chosen[got++] = e;
    }
    float sum = 0.f;
    for (int j = 0; j < k; ++j) sum = sum + s[chosen[j]];
    for (int j = 0; j < k; ++j) a.weights[i * k + j] = (s[chosen[j]] / (sum + 1e-20f)) * s_.route_scale;
  });
}

namespace {

// mid = silu(min(gate, limit)) * clamp(up) * routing weight, rounded, through the quantiser.
void swiglu(float* gate, const float* up, int n, float limit, float weight, bool routed, bool round, bool quant) {
  for (int f = 0; f < n; ++f) {
    const float g = gate[f] > limit ? limit : gate[f];  // in this form NaN stays NaN
    const float u = up[f] > limit ? limit : (up[f] < -limit ? -limit : up[f]);
    float t = ds4_silu(g) * u;
    t = routed ? weight * t : t;
    gate[f] = round ? ds4_bf16(t) : t;
  }
  if (quant) fake_q8(gate, n);
}

}  // namespace

// Rows are grouped by expert: pairs of one expert stand together, experts ascending, the shared expert last.
void CpuBackend::moe(const MoeArgs& a) {
  const int k = s_.top_k, f_dim = s_.expert_dim, d = s_.hidden, n_experts = s_.n_experts, n = a.n;
  const int slots = k + 1;
  const int64_t n_pairs = static_cast<int64_t>(n) * k;
  // start[e] .. start[e + 1]: the pairs of expert e; pair -> row and slot.
  const size_t ints = static_cast<size_t>(n_experts) * 2 + 3 + static_cast<size_t>(n_pairs) * 2 + static_cast<size_t>(n) * 2;
  int32_t* start = reinterpret_cast<int32_t*>(need_temp(ints));
  int32_t* rows = start + n_experts + 2;      // [n_pairs] then [n]: row of the pair
  int32_t* mids = rows + n_pairs + n;         // [n_pairs] then [n]: row * slots + slot in `mid`
  int32_t* active = mids + n_pairs + n;       // experts with work, ascending; the shared one last
  for (int e = 0; e <= n_experts + 1; ++e) start[e] = 0;
  for (int64_t p = 0; p < n_pairs; ++p) ++start[a.experts[p] + 1];
  for (int e = 0; e < n_experts; ++e) start[e + 1] += start[e];
  for (int64_t p = 0; p < n_pairs; ++p) {
    const int e = a.experts[p];
    const int32_t at = start[e]++;
    rows[at] = static_cast<int32_t>(p / k);
    mids[at] = static_cast<int32_t>((p / k) * slots + p % k);
  }
  for (int e = n_experts; e > 0; --e) start[e] = start[e - 1];
  start[0] = 0;
  start[n_experts + 1] = static_cast<int32_t>(n_pairs) + n;
  for (int i = 0; i < n; ++i) {
    rows[n_pairs + i] = i;
    mids[n_pairs + i] = i * slots + k;
  }
  int n_active = 0;
  for (int e = 0; e <= n_experts; ++e)
    if (start[e + 1] > start[e]) active[n_active++] = e;

  // Blocks of output rows (whole quantiser groups) and rows of one expert handled together: `area` numbers at a time.
  constexpr int kGroup = 32;
  const int area = moe_area(matrix(), matrix_.batch);
  const auto blocks_of = [&](int64_t total) { return static_cast<int>((block_rows(total, pool_->n_threads(), n) + kGroup - 1) / kGroup * kGroup); };
  const int f_block = blocks_of(static_cast<int64_t>(n_active) * f_dim), d_block = blocks_of(d);
  const int max_k = d > f_dim ? d : f_dim;
  need_scratch(class_scratch(max_k) + 2 * area + static_cast<size_t>(n) * d_block);

  const int f_blocks = (f_dim + f_block - 1) / f_block;
  const auto expert = [&](int e) -> const ExpertWeights& { return e == n_experts ? a.w->shared : a.w->experts[e]; };
  // Gate, up and SwiGLU: one task is a block of the middle dimension of one expert.
  loop(static_cast<int64_t>(n_active) * f_blocks, [&](int64_t task, int worker) {
    const int e = active[task / f_blocks], f0 = static_cast<int>(task % f_blocks) * f_block;
    const int nf = f_dim - f0 < f_block ? f_dim - f0 : f_block;
    const int batch = area / f_block;
    const int32_t p0 = start[e], p1 = start[e + 1];
    float* gate = scratch(worker);
    float* up = gate + area;
    float* dots = up + area;
    for (int32_t p = p0; p < p1; p += batch) {
      const int m = p1 - p < batch ? p1 - p : batch;
      const XRows x{a.xq, d, rows + p};
      class_block(expert(e).w1, f0, nf, x, m, gate, f_block, dots);
      class_block(expert(e).w3, f0, nf, x, m, up, f_block, dots);
      for (int j = 0; j < m; ++j) {
        float* g = gate + j * f_block;
        float* u = up + j * f_block;
        round_row(g, nf, round_);
        round_row(u, nf, round_);
        const int32_t mid = mids[p + j];
        const bool routed = e != n_experts;
        const float weight = routed ? a.weights[(mid / slots) * static_cast<int64_t>(k) + mid % slots] : 1.f;
        swiglu(g, u, nf, s_.swiglu_limit, weight, routed, round_, quant_);
        std::memcpy(a.mid + static_cast<int64_t>(mid) * f_dim + f0, g, static_cast<size_t>(nf) * sizeof(float));
      }
    }
  });
  // Down and combine: one task is a block of output columns over all experts in ascending order.
  const int d_blocks = (d + d_block - 1) / d_block;
  loop(d_blocks, [&](int64_t task, int worker) {
    const int d0 = static_cast<int>(task) * d_block;
    const int nd = d - d0 < d_block ? d - d0 : d_block;
    const int batch = area / d_block;
    float* sum = scratch(worker);  // [n][d_block]
    float* part = sum + static_cast<size_t>(n) * d_block;
    float* dots = part + area;
    for (int64_t j = 0; j < static_cast<int64_t>(n) * d_block; ++j) sum[j] = 0.f;
    for (int x = 0; x < n_active; ++x) {
      const int e = active[x];
      for (int32_t p = start[e]; p < start[e + 1]; p += batch) {
        const int m = start[e + 1] - p < batch ? start[e + 1] - p : batch;
        class_block(expert(e).w2, d0, nd, XRows{a.mid, f_dim, mids + p}, m, part, d_block, dots);
        for (int j = 0; j < m; ++j) {
          float* s = sum + static_cast<int64_t>(rows[p + j]) * d_block;
          round_row(part + j * d_block, nd, round_);
          for (int q = 0; q < nd; ++q) s[q] = s[q] + part[j * d_block + q];
        }
      }
    }
    for (int i = 0; i < n; ++i)
      for (int q = 0; q < nd; ++q) a.y[static_cast<int64_t>(i) * d + d0 + q] = rounded(sum[i * d_block + q], round_);
  });
}

}  // namespace ds4::cpu::DS4_ISA
