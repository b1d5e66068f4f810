// compress: the latent of a finished group of tokens, its index key and its packed compressed row.
#include "cpu/backend.h"
#include "cpu/row_ops.h"

namespace ds4::cpu::DS4_ISA {

namespace {

// Ratio 2: per channel softmax of the gates over the two tokens, weighted sum of the values.
void pool_pair(const float* first, const float* second, int hd, bool round, float* out) {
  const float *a0 = first, *g0 = first + hd, *a1 = second, *g1 = second + hd;
  for (int k = 0; k < hd; ++k) {
    const float top = ds4_max(g0[k], g1[k]);
    const float e0 = ds4_exp(g0[k] - top), e1 = ds4_exp(g1[k] - top);
    const float sum = e0 + e1;
    const float v = DS4_FMA(a1[k], e1 / sum, a0[k] * (e0 / sum));
    out[k] = round ? ds4_bf16(v) : v;
  }
}

}  // namespace

void CpuBackend::compress(const CompressArgs& a) {
  const int d = s_.hidden, hd = s_.head_dim, idim = s_.index_dim, half = s_.rope_dim / 2;
  const XRows x{a.x, d, nullptr};
  const int width = a.ratio == 2 ? 2 * hd : hd;
  float* raw = need_temp(static_cast<size_t>(a.n) * (width + hd + idim));
  float* latent = raw + static_cast<size_t>(a.n) * width;
  float* key = latent + static_cast<size_t>(a.n) * hd;
  if (a.ratio == 2) {
    const Product products[2] = {{&a.w->wkv, 0, hd, x, raw, width, false}, {&a.w->wgate, 0, hd, x, raw + hd, width, false}};
    linear(products, 2, a.n);
  } else {
    linear(a.w->wkv, x, a.n, raw, width, round_);
  }
  // The entries that this call completes: first_entry .. first_entry + n_entries - 1.
  const int64_t first_entry = a.position / a.ratio;
  const int64_t n_entries = (a.position + a.n) / a.ratio - first_entry;
  loop(n_entries, [&](int64_t e, int) {
    float* out = latent + e * hd;
    if (a.ratio == 2) {
      const int64_t p0 = (first_entry + e) * 2;  // position of the group's first token
      const float* first = p0 < a.position ? reinterpret_cast<const float*>(a.pending.row(p0)) : raw + (p0 - a.position) * width;
      pool_pair(first, raw + (p0 + 1 - a.position) * width, hd, round_, out);
      norm_row(out, a.w->norm, hd, s_.norm_eps, round_, out);
    } else {
      norm_row(raw + e * hd, a.w->norm, hd, s_.norm_eps, round_, out);
    }
  });
  if (n_entries > 0) linear(a.w->index_k, XRows{latent, hd, nullptr}, static_cast<int>(n_entries), key, idim, round_);
  loop(n_entries, [&](int64_t e, int) {
    const int64_t j = first_entry + e;
    const int64_t at = (j * a.ratio - a.first_rope) * half;
    float* k = key + e * idim;
    norm_row(k, a.w->index_k_norm, idim, s_.norm_eps, round_, k);
    rotate_tail(k, idim, s_.rope_dim, a.rope.cos + at, a.rope.sin + at, 1.f, round_);
    pack_index_row(k, idim, a.index_rows + j * s_.index_row_bytes());
    float* row = latent + e * hd;
    rotate_tail(row, hd, s_.rope_dim, a.rope.cos + at, a.rope.sin + at, 1.f, round_);
    pack_compressed_row(row, hd, a.rows + j * s_.compressed_row_bytes());
  });
  if (a.ratio == 2) {  // recent unpooled rows, so that a group may close in a later call or after a short truncation
    const int64_t keep = a.n < a.pending.capacity ? a.n : a.pending.capacity;
    for (int64_t i = a.n - keep; i < a.n; ++i)
      std::memcpy(a.pending.row(a.position + i), raw + i * width, static_cast<size_t>(width) * sizeof(float));
  }
}

}  // namespace ds4::cpu::DS4_ISA
