// linear: row products, one simdgroup for LINEAR_OUTPUTS matrix rows and a tile of up to 8 activation rows; or, where a matrix has
// too few rows to occupy the device, one for each segment of their columns (linear_split).
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "hc_row.h"
#include "linear.h"

template <int N>
KERNEL_INLINE void finish_rows(thread float* v, constant LinearParams& a, uint r, uint i0, device float* out, device const float* cosines,
                               device const float* sines, device float* stream, device const float* post, device const float* comb,
                               uint lane) {
  for (int q = 0; q < LINEAR_OUTPUTS * N; ++q) {
    v[q] = (fc_flags & LINEAR_ROUND) != 0 ? ds4_bf16(v[q]) : v[q];
    if ((fc_flags & LINEAR_SCORE) != 0) v[q] = DS4_SQRT(ds4_softplus(v[q]));
  }
  if ((fc_flags & LINEAR_ROTATE) != 0) {
    uint in_head = r % a.head_dim, plain = a.head_dim - a.rope_dim;
    if (in_head >= plain)
      for (int j = 0; j < N; ++j) {
        uint at = min(i0 + uint(j), a.n - 1u) * (a.rope_dim / 2u) + (in_head - plain) / 2u;
        float x = v[j], y = v[N + j], c = cosines[at], s = sines[at];
        float re = x * c - y * s;
        float im = x * s + y * c;
        v[j] = rounded(re);
        v[N + j] = rounded(im);
      }
  }
  if (lane < uint(LINEAR_OUTPUTS * N)) {
    uint row = r + lane / uint(N), i = i0 + lane % uint(N);
    float value = pick<LINEAR_OUTPUTS * N>(v, lane);
    if (row < a.rows && i < a.n) out[a.out_at + ulong(i) * a.ldo + row] = value;
  }
  if ((fc_flags & LINEAR_EXPAND) == 0) return;
  expand_results<LINEAR_OUTPUTS, N>(v, r, a.rows, i0, a.n, a.streams, stream, post, comb, lane);
}

template <class D, int N>
KERNEL_INLINE void linear_rows(constant LinearParams& a, RowSource m, device const float* x, device float* out, device const float* cosines,
                               device const float* sines, device float* stream, device const float* post, device const float* comb,
                               uint r, uint i0, uint lane) {
  D w[LINEAR_OUTPUTS];
  for (uint q = 0u; q < uint(LINEAR_OUTPUTS); ++q) open_row(w[q], m, a.row0 + min(r + q, a.rows - 1u));
  uint at[N];
  for (uint j = 0u; j < uint(N); ++j) at[j] = min(i0 + j, a.n - 1u) * a.x_stride;
  float v[LINEAR_OUTPUTS * N];
  row_products<D, LINEAR_OUTPUTS, N>(w, x + a.x_at + ulong(r / a.group_rows) * a.group_x, at, a.cols, lane, v);
  finish_rows<N>(v, a, r, i0, out, cosines, sines, stream, post, comb, lane);
}

kernel void linear(constant LinearParams& a [[buffer(0)]], device const uchar* data [[buffer(1)]], device const uchar* scale [[buffer(2)]],
                   device const float* x [[buffer(3)]], device float* out [[buffer(4)]], device const float* cosines [[buffer(5)]],
                   device const float* sines [[buffer(6)]], device float* stream [[buffer(7)]], device const float* post [[buffer(8)]],
                   device const float* comb [[buffer(9)]], uint3 group [[threadgroup_position_in_grid]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  uint r = (group.x * uint(LINEAR_SIMDGROUPS) + simdgroup) * uint(LINEAR_OUTPUTS), i0 = group.y * uint(LINEAR_TILE);
  if (r >= a.rows) return;  // whole simdgroups: there is no barrier below
  RowSource m = {data, scale, a.row_bytes, a.scale_row_bytes};
#define DS4_LINEAR(D)                                                                                                      \
  if (fc_rows == 1) linear_rows<D, 1>(a, m, x, out, cosines, sines, stream, post, comb, r, i0, lane);                      \
  else if (fc_rows == 2) linear_rows<D, 2>(a, m, x, out, cosines, sines, stream, post, comb, r, i0, lane);                 \
  else if (fc_rows <= 4) linear_rows<D, 4>(a, m, x, out, cosines, sines, stream, post, comb, r, i0, lane);                 \
  else if (fc_rows <= 6) linear_rows<D, 6>(a, m, x, out, cosines, sines, stream, post, comb, r, i0, lane);                 \
  else linear_rows<D, 8>(a, m, x, out, cosines, sines, stream, post, comb, r, i0, lane)
  DS4_WITH_ROW_TYPE(fc_type, DS4_LINEAR);
#undef DS4_LINEAR
}

// The accumulators of one segment of LINEAR_OUTPUTS rows from r on: stage[row and activation row][64].
template <class D, int N>
KERNEL_INLINE void segment_rows(constant LinearParams& a, RowSource m, device const float* x, threadgroup float* stage, uint r, uint i0,
                                uint segment, uint lane) {
  D w[LINEAR_OUTPUTS];
  for (uint q = 0u; q < uint(LINEAR_OUTPUTS); ++q) open_row(w[q], m, a.row0 + min(r + q, a.rows - 1u));
  uint at[N];
  for (uint j = 0u; j < uint(N); ++j) at[j] = min(i0 + j, a.n - 1u) * a.x_stride;
  float2 acc[LINEAR_OUTPUTS * N];
  row_segment<D, LINEAR_OUTPUTS, N>(w, x + a.x_at + ulong(r / a.group_rows) * a.group_x, at, segment * kSegment,
                                    min((segment + 1u) * kSegment, a.cols), lane, acc);
  for (int q = 0; q < LINEAR_OUTPUTS * N; ++q) ((threadgroup float2*)stage)[32 * q + int(lane)] = acc[q];
}

// The segments of the rows that begin at stage, added in order, and the tree.
template <int N>
KERNEL_INLINE void joined_rows(constant LinearParams& a, threadgroup const float* stage, uint segments, uint r, uint i0, device float* out,
                               device const float* cosines, device const float* sines, device float* stream, device const float* post,
                               device const float* comb, uint lane) {
  float v[LINEAR_OUTPUTS * N];
  for (int q = 0; q < LINEAR_OUTPUTS * N; ++q) {
    threadgroup const float2* mine = (threadgroup const float2*)stage + 32 * q + int(lane);
    float2 total = mine[0];
    for (uint s = 1u; s < segments; ++s) total = total + mine[s * uint(32 * LINEAR_OUTPUTS * N)];
    v[q] = tree64(total);
  }
  finish_rows<N>(v, a, r, i0, out, cosines, sines, stream, post, comb, lane);
}

// As many times LINEAR_OUTPUTS rows (x) as their segments leave room for; 2 to LINEAR_SPLIT segments. Threadgroup memory: for each
// simdgroup, 64 LINEAR_OUTPUTS floats for each activation row that fc_rows stands for.
kernel void linear_split(constant LinearParams& a [[buffer(0)]], device const uchar* data [[buffer(1)]], device const uchar* scale [[buffer(2)]],
                         device const float* x [[buffer(3)]], device float* out [[buffer(4)]], device const float* cosines [[buffer(5)]],
                         device const float* sines [[buffer(6)]], device float* stream [[buffer(7)]], device const float* post [[buffer(8)]],
                         device const float* comb [[buffer(9)]], threadgroup float* stage [[threadgroup(0)]],
                         uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  const uint segments = (a.cols + kSegment - 1u) / kSegment, together = uint(LINEAR_SPLIT) / segments;
  const uint r0 = group.x * together * uint(LINEAR_OUTPUTS), i0 = group.y * uint(LINEAR_TILE), place = simdgroup / segments;
  const uint r = r0 + place * uint(LINEAR_OUTPUTS), mine = r0 + simdgroup * uint(LINEAR_OUTPUTS);
  RowSource m = {data, scale, a.row_bytes, a.scale_row_bytes};
#define DS4_SPLIT(D, N)                                                                                                            \
  if (r < a.rows) segment_rows<D, N>(a, m, x, stage + simdgroup * uint(64 * LINEAR_OUTPUTS * N), r, i0, simdgroup % segments, lane)
#define DS4_SEGMENT(D)                          \
  if (fc_rows == 1) { DS4_SPLIT(D, 1); }        \
  else if (fc_rows == 2) { DS4_SPLIT(D, 2); }   \
  else if (fc_rows <= 4) { DS4_SPLIT(D, 4); }   \
  else if (fc_rows <= 6) { DS4_SPLIT(D, 6); }   \
  else { DS4_SPLIT(D, 8); }
  DS4_WITH_ROW_TYPE(fc_type, DS4_SEGMENT);
#undef DS4_SEGMENT
#undef DS4_SPLIT
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup >= together || mine >= a.rows) return;  // whole simdgroups: there is no barrier below
#define DS4_JOIN(N)                                                                                                                    \
  joined_rows<N>(a, stage + simdgroup * segments * uint(64 * LINEAR_OUTPUTS * N), segments, mine, i0, out, cosines, sines, stream, post, \
                 comb, lane)
  if (fc_rows == 1) DS4_JOIN(1);
  else if (fc_rows == 2) DS4_JOIN(2);
  else if (fc_rows <= 4) DS4_JOIN(4);
  else if (fc_rows <= 6) DS4_JOIN(6);
  else DS4_JOIN(8);
#undef DS4_JOIN
}

// Activation quantiser in place; one simdgroup for a group of 32.
kernel void quantise(constant QuantiseParams& a [[buffer(0)]], device float* x [[buffer(1)]], uint3 group [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]]) {
  uint k = group.x * 32u + lane;
  ulong at = ulong(group.y) * a.stride + k;
  float v = k < a.width ? x[at] : 0.0f;
  float q = quantised(v);
  if (k < a.width) x[at] = q;
}
