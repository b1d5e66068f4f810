// compress: row products, pooling and norm, the key's product, packing; and the ring of unpooled rows (ratio 2).
#include "compress.h"

#include <algorithm>

#include "metal_host/backend.h"
#include "metal_host/products.h"

namespace ds4::metal {

void MetalBackend::compress(const CompressArgs& a) {
  const int d = s_.hidden, hd = s_.head_dim, idim = s_.index_dim, half = s_.rope_dim / 2;
  const bool pairs = a.ratio == 2;
  // Values of all rows, then their gates: each product has memory of its own.
  float* values = temp<float>(Temp::compress_raw, 2 * static_cast<int64_t>(a.n) * hd);
  float* gates = values + static_cast<int64_t>(a.n) * hd;
  const int64_t n_raw = static_cast<int64_t>(a.n) * hd;
  linear(a.w->wkv, a.x, d, a.n, values, hd, !pairs);
  if (pairs) linear(a.w->wgate, a.x, d, a.n, gates, hd, false);

  const int64_t first = a.position / a.ratio, n_entries = (a.position + a.n) / a.ratio - first;
  const int64_t keep = pairs ? std::min<int64_t>(a.n, a.pending.capacity) : 0;
  CompressParams p{};
  p.n = static_cast<uint32_t>(a.n);
  p.position = static_cast<uint32_t>(a.position);
  p.ratio = static_cast<uint32_t>(a.ratio);
  p.head_dim = static_cast<uint32_t>(hd);
  p.index_dim = static_cast<uint32_t>(idim);
  p.rope_dim = static_cast<uint32_t>(s_.rope_dim);
  p.first_entry = static_cast<uint32_t>(first);
  p.first_rope = static_cast<uint32_t>(a.first_rope);
  p.capacity = static_cast<uint32_t>(std::max<int64_t>(1, a.pending.capacity));
  p.keep = static_cast<uint32_t>(keep);
  p.row_bytes = static_cast<uint32_t>(s_.compressed_row_bytes());
  p.index_row_bytes = static_cast<uint32_t>(s_.index_row_bytes());
  p.eps = s_.norm_eps;
  const int64_t ring = pairs ? a.pending.capacity * a.pending.row_bytes : 0;
  if (n_entries > 0) {
    float* latent = temp<float>(Temp::compress_latent, n_entries * hd);
    float* key = temp<float>(Temp::compress_key, n_entries * idim);
    encode("compress_pool", {}, p,
           {reads(values, n_raw), reads(gates, pairs ? n_raw : 0), reads(a.pending.base, ring), fixed(a.w->norm), writes(latent, n_entries * hd)},
           {n_entries}, COMPRESS_THREADS, normed_bytes(hd));
    linear(a.w->index_k, latent, hd, static_cast<int>(n_entries), key, idim, true);
    const int64_t angles = (a.position + a.n - a.first_rope) * half;
    encode("compress_pack", {}, p,
           {reads(latent, n_entries * hd), reads(key, n_entries * idim), fixed(a.w->index_k_norm), reads(a.rope.cos, angles),
            reads(a.rope.sin, angles), writes(a.rows, (first + n_entries) * s_.compressed_row_bytes()),
            writes(a.index_rows, (first + n_entries) * s_.index_row_bytes())},
           {n_entries}, COMPRESS_THREADS, normed_bytes(idim) + static_cast<size_t>(hd) * sizeof(float));
  }
  if (keep > 0)
    encode("compress_keep", {}, p, {reads(values, n_raw), reads(gates, n_raw), updates(a.pending.base, ring)}, {keep}, COMPRESS_THREADS);
}

}  // namespace ds4::metal
