// attend: attention of all heads over the window and the selected compressed rows, with a sink, then un-rotation.
//
// List of a query: `window` places (its window rows in position order, then holes), then the selected entries in
// position order. Blocks of 64 places; running maximum; order of every sum: docs/numerics.md, R2 and R3.
#include "cpu/attend_row.h"
#include "cpu/backend.h"

namespace ds4::cpu::DS4_ISA {

namespace {

// In how many parts to take the heads of a row, so that threads end together when rows are few: three rows on two
// threads would take as long as four. Each part decodes the keys anew, about a twelfth of a row's time.
int attend_splits(int n, int heads, int threads) {
  int best = 1;
  double least = 1e30;
  for (int splits = 1; splits <= heads && (splits == 1 || n * splits < 8 * threads); splits *= 2) {
    const int rounds = (n * splits + threads - 1) / threads;
    const double time = rounds * (1.0 / splits + 0.085);
    if (time < least) least = time, best = splits;
  }
  return best;
}

}  // namespace

void CpuBackend::attend(const AttendArgs& a) {
  const int hd = s_.head_dim, heads = s_.n_heads, w = s_.window, half = s_.rope_dim / 2, topk = s_.index_topk;
  const float scale = 1.0f / DS4_SQRT(static_cast<float>(hd));
  const int most = w + (a.compressed != nullptr ? topk : 0);
  need_scratch(static_cast<size_t>(most) * hd + static_cast<size_t>(head_floats(heads)) + dot_scratch(hd) + 64);
  const int splits = attend_splits(a.n, heads, pool_->n_threads());
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
    const int64_t at0 = (i * heads + h0) * hd;
    HeadRun run{a.q + at0, a.o + at0, h1 - h0, nullptr, rows + static_cast<int64_t>(most) * hd, nullptr, nullptr};
    run.alpha = run.weights + static_cast<int64_t>(run.n) * kPlaces;
    run.state = reinterpret_cast<Softmax*>(run.alpha + run.n);
    run.dots = rows + (static_cast<int64_t>(most) * hd + head_floats(heads) + 63) / 64 * 64;
    for (int h = 0; h < run.n; ++h) run.state[h] = Softmax{};
    // Places in the list: the window's are padded to `w`, so blocks start at the same places for every position.
    bool first_block = true;
    for (int b = 0; b < w + n_more; b += kPlaces) {
      const int end = b + kPlaces;
      const int w0 = b < n_window ? b : n_window, w1 = end < n_window ? end : n_window;
      const int m0 = b > w ? b - w : 0, m1 = end - w < n_more ? (end - w > 0 ? end - w : 0) : n_more;
      const int n_w = w1 - w0, n_m = m1 > m0 ? m1 - m0 : 0;
      if (n_w + n_m == 0) continue;
      // Window rows and entries are neighbours in scratch, so a mixed block is one run.
      const float* keys = rows + static_cast<int64_t>(n_w > 0 ? w0 : n_window + m0) * hd;
      if (hd % kDotLanes == 0)
        attend_heads(run, keys, n_w + n_m, hd, scale, round_, first_block);
      else
        for (int h = 0; h < run.n; ++h)
          attend_block(run.q + static_cast<int64_t>(h) * hd, keys, n_w + n_m, hd, scale, round_, run.state[h], run.o + static_cast<int64_t>(h) * hd);
      first_block = false;
    }
    for (int h = h0; h < h1; ++h) {
      const int64_t at = (i * heads + h) * hd;
      float* o = a.o + at;
      const Softmax& state = run.state[h - h0];
      const float total = state.sum + ds4_exp(a.sink[h] - state.max);
      for (int k = 0; k < hd; ++k) o[k] = rounded(o[k] / total, round_);
      if (a.o_raw != nullptr)
        for (int k = 0; k < hd; ++k) a.o_raw[at + k] = o[k];
      rotate_tail(o, hd, s_.rope_dim, a.rope.cos + i * half, a.rope.sin + i * half, -1.f, round_);
    }
  });
}

}  // namespace ds4::cpu::DS4_ISA
