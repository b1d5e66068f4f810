// linear: row products, one simdgroup for LINEAR_OUTPUTS matrix rows and a tile of up to 8 activation rows.
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

// Activation quantiser in place; one simdgroup for a group of 32.
kernel void quantise(constant QuantiseParams& a [[buffer(0)]], device float* x [[buffer(1)]], uint3 group [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]]) {
  uint k = group.x * 32u + lane;
  ulong at = ulong(group.y) * a.stride + k;
  float v = k < a.width ? x[at] : 0.0f;
  float q = quantised(v);
  if (k < a.width) x[at] = q;
}
