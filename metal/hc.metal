// hc: the mixer is a product of few rows with a long activation row, so each segment of 2,048 elements is a simdgroup's
// work of its own (hc_mix); hc_read adds the segments in order, and does the rest of one token in one threadgroup.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "hc_row.h"
#include "hc.h"

// Accumulators of segment group.x, mixer row (or, one past them, the squares), tile group.z: partials[row i][r][segment][64].
template <class D, int N>
KERNEL_INLINE void hc_mix_segment(constant HcMixParams& a, RowSource m, device const float* x, device float* partials, uint segment, uint r,
                                  uint i0, uint lane) {
  uint at[N];
  for (uint j = 0u; j < uint(N); ++j) at[j] = min(i0 + j, a.n - 1u) * a.width;
  uint begin = segment * kSegment, end = min(begin + kSegment, a.width);
  float2 acc[N];
  if (r < a.mix_rows) {
    D w[1];
    open_row(w[0], m, r);
    row_segment<D, 1, N>(w, x, at, begin, end, lane, acc);
  } else {
    for (int j = 0; j < N; ++j) {
      DecF32 w[1];
      w[0].p = x + at[j];
      row_segment<DecF32, 1, 1>(w, x, at + j, begin, end, lane, acc + j);
    }
  }
  for (uint j = 0u; j < uint(N); ++j)
    if (i0 + j < a.n) {
      device float* out = partials + ((ulong(i0 + j) * (a.mix_rows + 1u) + r) * a.segments + segment) * 64u + 2u * lane;
      out[0] = acc[j].x;
      out[1] = acc[j].y;
    }
}

kernel void hc_mix(constant HcMixParams& a [[buffer(0)]], device const uchar* data [[buffer(1)]], device const uchar* scale [[buffer(2)]],
                   device const float* x [[buffer(3)]], device float* partials [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  uint r = group.y * uint(HC_MIX_SIMDGROUPS) + simdgroup;
  if (r > a.mix_rows) return;
  RowSource m = {data, scale, a.row_bytes, a.scale_row_bytes};
#define DS4_HC_MIX(D)                                                                             \
  if (fc_rows == 1) hc_mix_segment<D, 1>(a, m, x, partials, group.x, r, 0u, lane);                \
  else if (fc_rows == 2) hc_mix_segment<D, 2>(a, m, x, partials, group.x, r, 0u, lane);           \
  else if (fc_rows <= 4) hc_mix_segment<D, 4>(a, m, x, partials, group.x, r, 0u, lane);           \
  else hc_mix_segment<D, 8>(a, m, x, partials, group.x, r, 0u, lane)
  DS4_WITH_ROW_TYPE(fc_type, DS4_HC_MIX);
#undef DS4_HC_MIX
}

// Softmax, then the Sinkhorn divisions of a streams x streams matrix, one element a lane; sums in index order. All lanes call it.
KERNEL_INLINE float sinkhorn(float m, uint lane, uint c, uint iters, float eps) {
  uint row = lane / c * c, column = lane % c;
  float top = simd_shuffle(m, ushort(row & 31u));
  for (uint k = 1u; k < c; ++k) top = ds4_max(top, simd_shuffle(m, ushort((row + k) & 31u)));
  m = ds4_exp(m - top);
  float sum = 0.0f;
  for (uint k = 0u; k < c; ++k) sum = sum + simd_shuffle(m, ushort((row + k) & 31u));
  m = m / sum + eps;
  for (uint it = 0u; it < iters; ++it) {
    if (it > 0u) {
      sum = 0.0f;
      for (uint k = 0u; k < c; ++k) sum = sum + simd_shuffle(m, ushort((row + k) & 31u));
      m = m / (sum + eps);
    }
    sum = 0.0f;
    for (uint j = 0u; j < c; ++j) sum = sum + simd_shuffle(m, ushort((j * c + column) & 31u));
    m = m / (sum + eps);
  }
  return m;
}

// pre, post and comb from the mixes z (in threadgroup memory), by the first simdgroup.
KERNEL_INLINE void hc_coefficients(constant HcReadParams& a, threadgroup const float* z, float r, device const float* scale,
                                   device const float* base, device float* pre, device float* post, device float* comb, uint lane) {
  uint c = a.streams;
  if (lane < c) {
    pre[lane] = ds4_sigmoid((z[lane] * r) * scale[0] + base[lane]) + a.hc_eps;
    post[lane] = 2.0f * ds4_sigmoid((z[c + lane] * r) * scale[1] + base[c + lane]);
  }
  uint at = 2u * c + min(lane, c * c - 1u);
  float m = sinkhorn((z[at] * r) * scale[2] + base[at], lane, c, a.iters, a.hc_eps);
  if (lane < c * c) comb[lane] = m;
}

// The finished sums of the mixer rows and of the squares of one token, into z.
KERNEL_INLINE void finish_mixes(constant HcReadParams& a, device const float* mixes, device const float* stream, threadgroup float* z,
                                uint simdgroup, uint simdgroups, uint lane) {
  if ((fc_flags & HC_MIXED) == 0) {
    for (uint r = simdgroup; r <= a.mix_rows; r += simdgroups) {
      device const float* p = mixes + ulong(r) * a.segments * 64u + 2u * lane;
      float2 total = load_pair(p);
#pragma unroll 4
      for (uint s = 1u; s < a.segments; ++s) total = total + load_pair(p + 64u * s);
      float sum = tree64(total);
      if (lane == 0u) z[r] = sum;
    }
    return;
  }
  for (uint r = 32u * simdgroup + lane; r < a.mix_rows; r += 32u * simdgroups) z[r] = mixes[r];
  if (simdgroup == 0u) {
    DecF32 w[1];
    w[0].p = stream;
    uint at[1] = {0u};
    float sum[1];
    row_products<DecF32, 1, 1>(w, stream, at, a.streams * a.hidden, lane, sum);
    if (lane == 0u) z[a.mix_rows] = sum[0];
  }
}

// Threadgroup memory: hidden floats (the collapsed row), then scratch of sum_squares, then mix_rows + 1 floats.
kernel void hc_read(constant HcReadParams& a [[buffer(0)]], device const float* mixes [[buffer(1)]], device const float* stream [[buffer(2)]],
                    device const float* mix [[buffer(3)]], device const float* scale [[buffer(4)]], device const float* base [[buffer(5)]],
                    device const float* norm [[buffer(6)]], device float* x [[buffer(7)]], device float* xq [[buffer(8)]],
                    device float* pre [[buffer(9)]], device float* post [[buffer(10)]], device float* comb [[buffer(11)]],
                    threadgroup float* flat [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                    uint tid [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
  uint i = group.x, c = a.streams, d = a.hidden, threads = uint(HC_READ_THREADS);
  threadgroup float* scratch = flat + d;
  threadgroup float* z = scratch + norm_scratch(d);
  device const float* s = stream + ulong(i) * c * d;
  ulong mixes_at = ulong(i) * ((fc_flags & HC_MIXED) != 0 ? a.mix_rows : (a.mix_rows + 1u) * a.segments * 64u);
  finish_mixes(a, mixes + mixes_at, s, z, simdgroup, threads / 32u, lane);
#pragma unroll 4
  for (uint k = tid; k < d; k += threads) flat[k] = collapsed(s, mix + i * c, k, c, d);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0u) {
    float mean = z[a.mix_rows] / float(c * d);
    hc_coefficients(a, z, ds4_rsqrt(mean + a.norm_eps), scale, base, pre + i * c, post + i * c, comb + i * c * c, lane);
  }
  float r = inverse_rms(flat, d, a.norm_eps, scratch, tid, threads);
  device float* out = x + ulong(i) * d;
#pragma unroll 4
  for (uint g = simdgroup; 32u * g < d; g += threads / 32u) {
    uint k = 32u * g + lane;
    float v = k < d ? rounded(norm[k] * (flat[k] * r)) : 0.0f;
    if (k < d) out[k] = v;
    if ((fc_flags & HC_SEPARATE_XQ) != 0) {
      float q = quantised(v);
      if (k < d) xq[ulong(i) * d + k] = q;
    }
  }
}

// expand, where no producer took it in: a thread for an element of all streams.
kernel void hc_write(constant HcWriteParams& a [[buffer(0)]], device const float* y [[buffer(1)]], device const float* post [[buffer(2)]],
                     device const float* comb [[buffer(3)]], device float* stream [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                     uint tid [[thread_index_in_threadgroup]]) {
  uint k = group.x * uint(HC_WRITE_THREADS) + tid, i = group.y, c = a.streams;
  if (k >= a.hidden) return;
  expand_element(y[ulong(i) * a.hidden + k], i, k, c, a.hidden, stream, post, comb);
}
