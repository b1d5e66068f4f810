// hc: the mixer is a product of few rows with a long activation row, so each segment of 2,048 elements is a simdgroup's
// work of its own. The normed input needs nothing of the mixer, so hc_in makes both side by side; hc_coefficients adds the
// segments in order and makes pre, post and comb, which are not needed before the end of the sub-layer: it runs beside what follows.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "hc_row.h"
#include "hc.h"

// Accumulators of one segment and mixer row (or, one past them, the squares) for all tokens: partials[row i][r][segment][64].
template <class D, int N>
KERNEL_INLINE void hc_mix_segment(constant HcInParams& a, RowSource m, device const float* x, device float* partials, uint segment, uint r,
                                  uint lane) {
  uint at[N];
  for (uint j = 0u; j < uint(N); ++j) at[j] = min(j, a.n - 1u) * a.width;
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
    if (j < a.n) {
      device float* out = partials + ((ulong(j) * (a.mix_rows + 1u) + r) * a.segments + segment) * 64u + 2u * lane;
      out[0] = acc[j].x;
      out[1] = acc[j].y;
    }
}

// The collapsed row of one token, normed. Threadgroup memory: hidden floats, then scratch of sum_squares.
KERNEL_INLINE void hc_norm(constant HcInParams& a, device const float* stream, device const float* mix, device const float* norm,
                           device float* x, device float* xq, threadgroup float* flat, uint i, uint tid, uint simdgroup, uint lane) {
  uint c = a.streams, d = a.hidden, threads = uint(HC_IN_THREADS);
  threadgroup float* scratch = flat + d;
  device const float* s = stream + ulong(i) * c * d;
#pragma unroll 4
  for (uint k = tid; k < d; k += threads) flat[k] = collapsed(s, mix + i * c, k, c, d);
  threadgroup_barrier(mem_flags::mem_threadgroup);
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

// The first n threadgroups: the normed input of a token each. The others: the mixer, a segment of one of its rows for each
// simdgroup, and of the squares (at most 8 tokens; none with HC_MIXED).
kernel void hc_in(constant HcInParams& a [[buffer(0)]], device const uchar* data [[buffer(1)]], device const uchar* scale [[buffer(2)]],
                  device const float* stream [[buffer(3)]], device float* partials [[buffer(4)]], device const float* mix [[buffer(5)]],
                  device const float* norm [[buffer(6)]], device float* x [[buffer(7)]], device float* xq [[buffer(8)]],
                  threadgroup float* flat [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                  uint tid [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]]) {
  if (group.x < a.n) {
    hc_norm(a, stream, mix, norm, x, xq, flat, group.x, tid, simdgroup, lane);
    return;  // the whole threadgroup
  }
  if ((fc_flags & HC_MIXED) != 0) return;
  uint task = (group.x - a.n) * uint(HC_IN_THREADS / 32) + simdgroup, r = task / a.segments, segment = task % a.segments;
  if (r > a.mix_rows) return;  // whole simdgroups: there is no barrier below
  RowSource m = {data, scale, a.row_bytes, a.scale_row_bytes};
#define DS4_HC_MIX(D)                                                                        \
  if (fc_rows == 1) hc_mix_segment<D, 1>(a, m, stream, partials, segment, r, lane);          \
  else if (fc_rows == 2) hc_mix_segment<D, 2>(a, m, stream, partials, segment, r, lane);     \
  else if (fc_rows <= 4) hc_mix_segment<D, 4>(a, m, stream, partials, segment, r, lane);     \
  else hc_mix_segment<D, 8>(a, m, stream, partials, segment, r, lane)
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

// The finished sums of the mixer rows and of the squares of one token, into z. Ends with a barrier.
KERNEL_INLINE void finish_mixes(constant HcCoefficientParams& a, device const float* mixes, device const float* stream, threadgroup float* z,
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
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return;
  }
  for (uint r = 32u * simdgroup + lane; r < a.mix_rows; r += 32u * simdgroups) z[r] = mixes[r];
  threadgroup float* squares = z + a.mix_rows + 1u;  // [segments][64]
  for (uint s = simdgroup; s < a.segments; s += simdgroups) {
    DecF32 w[1];
    w[0].p = stream;
    uint at[1] = {0u};
    float2 acc[1];
    row_segment<DecF32, 1, 1>(w, stream, at, s * kSegment, min((s + 1u) * kSegment, a.streams * a.hidden), lane, acc);
    squares[64u * s + 2u * lane] = acc[0].x;
    squares[64u * s + 2u * lane + 1u] = acc[0].y;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0u) {
    float2 total = float2(squares[2u * lane], squares[2u * lane + 1u]);
    for (uint s = 1u; s < a.segments; ++s) total = total + float2(squares[64u * s + 2u * lane], squares[64u * s + 2u * lane + 1u]);
    float sum = tree64(total);
    if (lane == 0u) z[a.mix_rows] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// pre, post and comb of one token. Threadgroup memory: mix_rows + 1 floats, with HC_MIXED 64 more a segment.
kernel void hc_coefficients(constant HcCoefficientParams& a [[buffer(0)]], device const float* mixes [[buffer(1)]],
                            device const float* stream [[buffer(2)]], device const float* scale [[buffer(3)]],
                            device const float* base [[buffer(4)]], device float* pre [[buffer(5)]], device float* post [[buffer(6)]],
                            device float* comb [[buffer(7)]], threadgroup float* z [[threadgroup(0)]],
                            uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  uint i = group.x, c = a.streams;
  ulong mixes_at = ulong(i) * ((fc_flags & HC_MIXED) != 0 ? a.mix_rows : (a.mix_rows + 1u) * a.segments * 64u);
  finish_mixes(a, mixes + mixes_at, stream + ulong(i) * c * a.hidden, z, simdgroup, uint(HC_IN_THREADS / 32), lane);
  if (simdgroup > 1u) return;  // whole simdgroups: there is no barrier below
  float r = ds4_rsqrt(z[a.mix_rows] / float(c * a.hidden) + a.norm_eps);
  if (simdgroup == 1u) {
    if (lane < c) {
      pre[i * c + lane] = ds4_sigmoid((z[lane] * r) * scale[0] + base[lane]) + a.hc_eps;
      post[i * c + lane] = 2.0f * ds4_sigmoid((z[c + lane] * r) * scale[1] + base[c + lane]);
    }
    return;
  }
  uint at = 2u * c + min(lane, c * c - 1u);
  float m = sinkhorn((z[at] * r) * scale[2] + base[at], lane, c, a.iters, a.hc_eps);
  if (lane < c * c) comb[i * c * c + lane] = m;
}

// expand, where no producer took it in: a thread for an element of all streams.
kernel void hc_write(constant HcWriteParams& a [[buffer(0)]], device const float* y [[buffer(1)]], device const float* post [[buffer(2)]],
                     device const float* comb [[buffer(3)]], device float* stream [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                     uint tid [[thread_index_in_threadgroup]]) {
  uint k = group.x * uint(HC_WRITE_THREADS) + tid, i = group.y, c = a.streams;
  if (k >= a.hidden) return;
  expand_element(y[ulong(i) * a.hidden + k], i, k, c, a.hidden, stream, post, comb);
}
