// attend: attention of all heads over the window and the selected compressed rows, with a sink, then un-rotation.
//
// List of a query: `window` places (its window rows in position order, then holes), then the selected entries in
// position order. Blocks of 64 places; running maximum; order of every sum: docs/numerics.md, R2 and R3.
#include "cpu/attend_row.h"
#include "cpu/backend.h"

namespace ds4::cpu::DS4_ISA {

void CpuBackend::attend(const AttendArgs& a) {
  const int hd = s_.head_dim, heads = s_.n_heads, w = s_.window, half = s_.rope_dim / 2, topk = s_.index_topk;
  const float scale = 1.0f / DS4_SQRT(static_cast<float>(hd));
  const int most = w + (a.compressed != nullptr ? topk : 0);
  need_scratch(static_cast<size_t>(most) * hd);
  // With few rows the heads are shared out as well.
  int splits = 1;
  while (splits < heads && a.n * splits < pool_->n_threads()) splits *= 2;  // each part decodes the rows anew
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
