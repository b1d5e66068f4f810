// hc: hyper-connection coefficients, collapse + norm, expand.
#include "hc.h"

#include "metal_host/products.h"

namespace ds4::metal {

size_t norm_bytes(int width) { return (static_cast<size_t>(width) + 64 * static_cast<size_t>((width + 2047) / 2048) + 1) * sizeof(float); }

// The normed input, and beside it the mixer; the coefficients, which nothing needs before the end of the sub-layer, run beside
// what follows.
void MetalBackend::hc_read(const HcReadArgs& a) {
  breathe(a.n);
  const int64_t c = s_.n_streams, d = s_.hidden, m = s_.mix_rows(), width = c * d, segments = groups_of(width, kSegmentColumns);
  const Matrix& fn = a.w->fn;
  const bool few = a.n <= kTileRows;
  const int64_t per_row = few ? (m + 1) * segments * 64 : m;
  float* mixes = temp<float>(few ? Temp::hc_partials : Temp::hc_mixes, a.n * per_row);
  const HcInParams in{static_cast<uint64_t>(fn.row_bytes), static_cast<uint32_t>(fn.scale_row_bytes), static_cast<uint32_t>(a.n),
                      static_cast<uint32_t>(m), static_cast<uint32_t>(width), static_cast<uint32_t>(segments),
                      static_cast<uint32_t>(c), static_cast<uint32_t>(d), s_.norm_eps};
  Constants constants;
  constants.type = static_cast<int32_t>(fn.type);
  constants.rows = tile_rows(a.n);
  constants.flags = (few ? 0 : HC_MIXED) | (a.xq != a.x ? HC_SEPARATE_XQ : 0);
  const int64_t mixing = few ? groups_of((m + 1) * segments, HC_IN_THREADS / kLanes) : 0;
  encode("hc_in", constants, in,
         {fixed(fn.data), fixed(scales(fn)), reads(a.stream, a.n * width), few ? writes(mixes, a.n * per_row) : absent(), reads(a.mix, a.n * c),
          fixed(a.w->norm), writes(a.x, a.n * d), a.xq != a.x ? writes(a.xq, a.n * d) : absent()},
         Grid{a.n + mixing}, HC_IN_THREADS, norm_bytes(static_cast<int>(d)));
  if (!few) linear(fn, a.stream, width, a.n, mixes, m, false);
  const HcCoefficientParams params{static_cast<uint32_t>(m), static_cast<uint32_t>(segments), static_cast<uint32_t>(c), static_cast<uint32_t>(d),
                                   static_cast<uint32_t>(s_.sinkhorn_iters), s_.norm_eps, s_.hc_eps};
  Constants flags;
  flags.flags = few ? 0 : HC_MIXED;
  encode("hc_coefficients", flags, params,
         {reads(mixes, a.n * per_row), reads(a.stream, few ? 0 : a.n * width), fixed(a.w->scale), fixed(a.w->base), writes(a.pre, a.n * c),
          writes(a.post, a.n * c), writes(a.comb, a.n * c * c)},
         Grid{a.n}, HC_IN_THREADS, static_cast<size_t>(m + 1 + (few ? 0 : 64 * segments)) * sizeof(float));
}

void MetalBackend::hc_write(const HcWriteArgs& a) {
  if (finish_ && finish_y_ == a.y && finish_n_ == a.n) return finish_now(&a);
  const int64_t c = s_.n_streams, d = s_.hidden;
  const HcWriteParams params{static_cast<uint32_t>(a.n), static_cast<uint32_t>(c), static_cast<uint32_t>(d)};
  encode("hc_write", {}, params, {reads(a.y, a.n * d), reads(a.post, a.n * c), reads(a.comb, a.n * c * c), updates(a.stream, a.n * c * d)},
         Grid{(d + HC_WRITE_THREADS - 1) / HC_WRITE_THREADS, a.n}, HC_WRITE_THREADS);
}

}  // namespace ds4::metal
