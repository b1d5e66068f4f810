// engram: unpacked rows (quantised in mode fp8), their projection, the gated add.
#include "engram.h"

#include <cmath>

#include "metal_host/backend.h"
#include "metal_host/products.h"

namespace ds4::metal {

void MetalBackend::engram(const EngramArgs& a) {
  const int64_t n = a.n, c = s_.n_streams, d = s_.hidden, dim = s_.engram_dim, width = s_.engram_columns * dim, kv = (c + 1) * d;
  float* x = temp<float>(Temp::engram_rows, n * width);
  float* projected = temp<float>(Temp::engram_projected, n * kv);
  EngramParams p{};
  p.groups = static_cast<uint32_t>(n * width / 32);
  p.dim = static_cast<uint32_t>(dim);
  p.row_bytes = static_cast<uint32_t>(s_.engram_row_bytes());
  p.streams = static_cast<uint32_t>(c);
  p.hidden = static_cast<uint32_t>(d);
  p.eps = s_.norm_eps;
  p.inverse_root = 1.0f / std::sqrt(static_cast<float>(d));
  encode("engram_unpack", {}, p, {reads(a.rows, n * s_.engram_columns * s_.engram_row_bytes()), writes(x, n * width)},
         {(p.groups + 7) / 8}, 256);
  linear(a.w->wkv, x, width, a.n, projected, kv, true);
  const size_t segments = static_cast<size_t>((d + 2047) / 2048);
  encode("engram_gate", {}, p,
         {reads(projected, n * kv), fixed(a.w->q_weight), fixed(a.w->k_weight), updates(a.stream, n * c * d)}, {c, n}, 512,
         (segments * 192 + 1) * sizeof(float));
}

}  // namespace ds4::metal
