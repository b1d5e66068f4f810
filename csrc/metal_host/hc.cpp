// hc: hyper-connection coefficients, collapse + norm, expand.
#include "hc.h"

#include "metal_host/products.h"

namespace ds4::metal {

size_t norm_bytes(int width) { return (static_cast<size_t>(width) + 64 * static_cast<size_t>((width + 2047) / 2048) + 1) * sizeof(float); }

void MetalBackend::hc_read(const HcReadArgs& a) {
  breathe(a.n);
  const int64_t c = s_.n_streams, d = s_.hidden, m = s_.mix_rows(), width = c * d, segments = (width + 2047) / 2048;
  const Matrix& fn = a.w->fn;
  const bool few = a.n <= kTileRows;
  const int64_t per_row = few ? (m + 1) * segments * 64 : m;
  float* mixes = temp<float>(few ? Temp::hc_partials : Temp::hc_mixes, a.n * per_row);
  if (few) {
    const HcMixParams params{static_cast<uint64_t>(fn.row_bytes), static_cast<uint32_t>(fn.scale_row_bytes), static_cast<uint32_t>(a.n),
                             static_cast<uint32_t>(m), static_cast<uint32_t>(width), static_cast<uint32_t>(segments)};
    Constants mixing;
    mixing.type = static_cast<int32_t>(fn.type);
    mixing.rows = tile_rows(a.n);
    encode("hc_mix", mixing, params,
           {fixed(fn.data), fixed(scales(fn)), reads(a.stream, a.n * width), writes(mixes, a.n * per_row)},
           Grid{segments, (m + 1 + HC_MIX_SIMDGROUPS - 1) / HC_MIX_SIMDGROUPS}, HC_MIX_SIMDGROUPS * kLanes);
  } else {
    linear(fn, a.stream, width, a.n, mixes, m, false);
  }
  const HcReadParams params{static_cast<uint32_t>(m), static_cast<uint32_t>(segments), static_cast<uint32_t>(c), static_cast<uint32_t>(d),
                            static_cast<uint32_t>(s_.sinkhorn_iters), s_.norm_eps, s_.hc_eps};
  Constants constants;
  constants.flags = (few ? 0 : HC_MIXED) | (a.xq != a.x ? HC_SEPARATE_XQ : 0);
  encode("hc_read", constants, params,
         {reads(mixes, a.n * per_row), reads(a.stream, a.n * width), reads(a.mix, a.n * c), fixed(a.w->scale), fixed(a.w->base), fixed(a.w->norm),
          writes(a.x, a.n * d), a.xq != a.x ? writes(a.xq, a.n * d) : absent(), writes(a.pre, a.n * c), writes(a.post, a.n * c),
          writes(a.comb, a.n * c * c)},
         Grid{a.n}, HC_READ_THREADS, norm_bytes(static_cast<int>(d)) + static_cast<size_t>(m + 1) * sizeof(float));
}

void MetalBackend::hc_write(const HcWriteArgs& a) {
  if (finish_ && finish_y_ == a.y && finish_n_ == a.n) return finish_now(&a);
  const int64_t c = s_.n_streams, d = s_.hidden;
  const HcWriteParams params{static_cast<uint32_t>(a.n), static_cast<uint32_t>(c), static_cast<uint32_t>(d)};
  encode("hc_write", {}, params, {reads(a.y, a.n * d), reads(a.post, a.n * c), reads(a.comb, a.n * c * c), updates(a.stream, a.n * c * d)},
         Grid{(d + HC_WRITE_THREADS - 1) / HC_WRITE_THREADS, a.n}, HC_WRITE_THREADS);
}

}  // namespace ds4::metal
