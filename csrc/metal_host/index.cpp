// index: both row products, then codes, scales and head weights.
#include "index.h"

#include <cmath>

#include "metal_host/backend.h"
#include "metal_host/products.h"

namespace ds4::metal {

void MetalBackend::index_query(const IndexQueryArgs& a) {
  const int heads = s_.index_heads, dim = s_.index_dim, half = s_.rope_dim / 2;
  const int64_t width = static_cast<int64_t>(heads) * dim, n = a.n;
  float* q = temp<float>(Temp::index_query, n * width);
  LinearParams product = linear_params(a.w->wq_b, 0, static_cast<int>(width), a.n, s_.q_rank, width);
  product.head_dim = static_cast<uint32_t>(dim);
  product.rope_dim = static_cast<uint32_t>(s_.rope_dim);
  const LinearRun run = linear_run(a.w->wq_b, product, LINEAR_ROTATE | (round_ ? LINEAR_ROUND : 0), a.qr);
  encode(run.kernel, run.constants, product,
         {fixed(a.w->wq_b.data), fixed(scales(a.w->wq_b)), reads(a.qr, n * s_.q_rank), writes(q, n * width), reads(a.rope.cos, n * half),
          reads(a.rope.sin, n * half), absent(), absent(), absent()},
         run.grid, run.threads, run.threadgroup_bytes);
  linear(a.w->weights_proj, a.x, s_.hidden, a.n, a.weights, heads, true);
  IndexParams p{};
  p.heads = static_cast<uint32_t>(heads);
  p.dim = static_cast<uint32_t>(dim);
  p.factor = (1.0f / std::sqrt(static_cast<float>(dim))) * (1.0f / std::sqrt(static_cast<float>(heads)));
  encode("index_query", {}, p,
         {reads(q, n * width), writes(a.codes, n * width), writes(a.scales, n * width / 32), updates(a.weights, n * heads)},
         {(heads + 7) / 8, n}, INDEX_HEADS * kLanes);
}

}  // namespace ds4::metal
