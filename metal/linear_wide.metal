// linear_wide: row products in which four lanes share a matrix row (wide_rows.h), and what `linear` may fold in.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "hc_row.h"
#include "linear.h"
#include "wide_rows.h"

template <class W, int R, int N>
KERNEL_INLINE void wide_tile(constant LinearParams& a, device const uchar* data, device const float* x, threadgroup uchar* area, uint r, uint i0,
                             uint segment, uint lane) {
  uint at[N];
  for (uint j = 0u; j < uint(N); ++j) at[j] = min(i0 + j, a.n - 1u) * a.x_stride;
  float acc[16 * R * N];
  const uint first = 8u * segment, chunks = min(a.cols / uint(WIDE_CHUNK) - first, 8u);
  wide_segment<W, R, N>(data + a.row_bytes * (a.row0 + r), uint(a.row_bytes), a.rows - 1u - r, x + a.x_at + ulong(r / a.group_rows) * a.group_x, at,
                     first, chunks, area, lane, acc);
  wide_put<W, R, N>(acc, (threadgroup float*)area, false, lane);
}

KERNEL_INLINE float wide_finished(float v) {
  v = (fc_flags & LINEAR_ROUND) != 0 ? ds4_bf16(v) : v;
  return (fc_flags & LINEAR_SCORE) != 0 ? DS4_SQRT(ds4_softplus(v)) : v;
}

// a.tiles times WIDE_ROWS_OF matrix rows (x), up to 8 activation rows (y). Columns are a multiple of WIDE_CHUNK, groups one of
// WIDE_ROWS_OF.
// Threadgroup memory: a.area bytes for each simdgroup, then a float for each product.
kernel void linear_wide(constant LinearParams& a [[buffer(0)]], device const uchar* data [[buffer(1)]], device const uchar* scale [[buffer(2)]],
                        device const float* x [[buffer(3)]], device float* out [[buffer(4)]], device const float* cosines [[buffer(5)]],
                        device const float* sines [[buffer(6)]], device float* stream [[buffer(7)]], device const float* post [[buffer(8)]],
                        device const float* comb [[buffer(9)]], threadgroup uchar* area [[threadgroup(0)]],
                        uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const uint segments = (a.cols + kSegment - 1u) / kSegment, tiles = a.tiles, simdgroups = segments * tiles, of_tile = WIDE_ROWS_OF(fc_rows);
  const uint r0 = group.x * tiles * of_tile, i0 = group.y * uint(LINEAR_TILE), r = r0 + simdgroup / segments * of_tile;
  threadgroup float* results = (threadgroup float*)(area + simdgroups * a.area);
  uint rows = 0u;  // activation rows that the kernel is made for
#define DS4_WIDE_N(W, N) \
  rows = N;              \
  if (r < a.rows) wide_tile<W, N <= 2 ? 2 : 1, N>(a, data, x, area + simdgroup * a.area, r, i0, simdgroup % segments, lane)
#define DS4_WIDE(W)                              \
  if (fc_rows == 1) { DS4_WIDE_N(W, 1); }        \
  else if (fc_rows == 2) { DS4_WIDE_N(W, 2); }   \
  else if (fc_rows <= 4) { DS4_WIDE_N(W, 4); }   \
  else if (fc_rows <= 6) { DS4_WIDE_N(W, 6); }   \
  else { DS4_WIDE_N(W, 8); }
  DS4_WITH_WIDE_TYPE(fc_type, DS4_WIDE);
#undef DS4_WIDE
#undef DS4_WIDE_N
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // results[activation row][matrix row]
  const uint of_token = tiles * of_tile, products = rows * of_token;
  for (uint q = simdgroup; q < products; q += simdgroups) {
    const uint j = q / of_token, row = q % of_token;
    if (r0 + row >= a.rows || i0 + j >= a.n) continue;
    threadgroup const float* sums = (threadgroup const float*)(area + row / of_tile * segments * a.area);
    const float v = wide_sum(sums + 64u * (of_tile * j + row % of_tile), segments, a.area / 4u, lane);
    if (lane == 0u) results[q] = v;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint q = tid; q < products; q += 32u * simdgroups) {
    const uint i = i0 + q / of_token, row = r0 + q % of_token;
    if (row >= a.rows || i >= a.n) continue;
    float v = wide_finished(results[q]);
    if ((fc_flags & LINEAR_ROTATE) != 0) {
      const uint in_head = row % a.head_dim, plain = a.head_dim - a.rope_dim;
      if (in_head >= plain) {
        const uint at = i * (a.rope_dim / 2u) + (in_head - plain) / 2u;
        const float other = wide_finished(results[q ^ 1u]), c = cosines[at], s = sines[at];
        const float re = v * c - other * s;
        const float im = other * s + v * c;
        v = rounded((row & 1u) == 0u ? re : im);
      }
    }
    out[a.out_at + ulong(i) * a.ldo + row] = v;
    if ((fc_flags & LINEAR_EXPAND) != 0) expand_element(v, i, row, a.streams, a.rows, stream, post, comb);
  }
}
