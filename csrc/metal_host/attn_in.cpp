// linear (attention): low-rank query and window row; query up-projection; grouped output projection.
#include "attn_in.h"

#include "metal_host/products.h"

namespace ds4::metal {

void MetalBackend::attn_in(const AttnInArgs& a) {
  const int64_t d = s_.hidden, hd = s_.head_dim, half = s_.rope_dim / 2, q = s_.q_rank;
  float* kv = temp<float>(Temp::window_rows, a.n * hd);
  linear(a.w->wq_a, a.xq, d, a.n, a.qr, q, true);
  linear(a.w->wkv, a.xq, d, a.n, kv, hd, true);
  const AttnInParams params{static_cast<uint32_t>(q),
                            static_cast<uint32_t>(hd),
                            static_cast<uint32_t>(s_.rope_dim),
                            static_cast<uint32_t>(a.window.capacity),
                            static_cast<uint32_t>(a.window.row_bytes),
                            static_cast<uint64_t>(a.position),
                            s_.norm_eps,
                            0};
  encode("attn_in", {}, params,
         {updates(a.qr, a.n * q), reads(kv, a.n * hd), fixed(a.w->q_norm), fixed(a.w->kv_norm), reads(a.rope.cos, a.n * half),
          reads(a.rope.sin, a.n * half), writes(a.window.base, a.window.capacity * a.window.row_bytes)},
         Grid{a.n, 2}, ATTN_IN_THREADS, norm_bytes(static_cast<int>(std::max(q, hd))));
}

void MetalBackend::attn_query(const AttnQueryArgs& a) {
  const int64_t width = int64_t{s_.n_heads} * s_.head_dim, half = s_.rope_dim / 2;
  const Matrix& m = a.w->wq_b;
  LinearParams params = linear_params(m, 0, m.rows, a.n, s_.q_rank, width);
  params.head_dim = static_cast<uint32_t>(s_.head_dim);
  params.rope_dim = static_cast<uint32_t>(s_.rope_dim);
  const LinearRun run = linear_run(m, params, LINEAR_ROTATE | (round_ ? LINEAR_ROUND : 0), a.qr);
  encode(run.kernel, run.constants, params,
         {fixed(m.data), fixed(scales(m)), reads(a.qr, a.n * int64_t{s_.q_rank}), writes(a.q, a.n * width), reads(a.rope.cos, a.n * half),
          reads(a.rope.sin, a.n * half), absent(), absent(), absent()},
         run.grid, run.threads, run.threadgroup_bytes);
}

// Each group of heads has its own first matrix, then one shared; the shared one takes in the expand that follows.
void MetalBackend::attn_out(const AttnOutArgs& a) {
  const int64_t width = int64_t{s_.n_heads} * s_.head_dim, low = int64_t{s_.o_groups} * s_.o_rank, d = s_.hidden, c = s_.n_streams;
  linear(Product{&a.w->wo_a, 0, static_cast<int>(low), a.o, width, a.low, low, true, s_.o_rank, s_.group_dim()}, a.n);
  quantise(a.low, low, static_cast<int>(low), a.n);
  finish_later(a.y, a.n, [this, a, low, d, c](const HcWriteArgs* write) {
    const Matrix& m = a.w->wo_b;
    LinearParams params = linear_params(m, 0, m.rows, a.n, low, d);
    params.streams = static_cast<uint32_t>(c);
    const int flags = (round_ ? LINEAR_ROUND : 0) | (write != nullptr ? LINEAR_EXPAND : 0);
    const LinearRun run = linear_run(m, params, flags, a.low);
    encode(run.kernel, run.constants, params,
           {fixed(m.data), fixed(scales(m)), reads(a.low, a.n * low), writes(a.y, a.n * d), absent(), absent(),
            write != nullptr ? updates(write->stream, a.n * c * d) : absent(), write != nullptr ? reads(write->post, a.n * c) : absent(),
            write != nullptr ? reads(write->comb, a.n * c * c) : absent()},
           run.grid, run.threads, run.threadgroup_bytes);
  });
}

}  // namespace ds4::metal
