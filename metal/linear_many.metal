// linear_many: row products of many activation rows (tiles.h), and what may follow them in the same dispatch (linear.h).
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "hc_row.h"
#include "tiles.h"
#include "linear.h"

// TILE_OUTPUTS rows of one group (group.x) x TILE_TOKENS activation rows (group.y). Threadgroup memory: TILE_BYTES.
[[max_total_threads_per_threadgroup(TILE_THREADS)]]
kernel void linear_many(constant LinearParams& a [[buffer(0)]], device const uchar* data [[buffer(1)]], device const uchar* scale [[buffer(2)]],
                        device const float* x [[buffer(3)]], device float* out [[buffer(4)]], device const float* cosines [[buffer(5)]],
                        device const float* sines [[buffer(6)]], device float* stream [[buffer(7)]], device const float* post [[buffer(8)]],
                        device const float* comb [[buffer(9)]], threadgroup float* stage [[threadgroup(0)]],
                        uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
  const uint blocks = (a.group_rows + uint(TILE_OUTPUTS) - 1u) / uint(TILE_OUTPUTS), g = group.x / blocks;
  const uint r0 = g * a.group_rows + group.x % blocks * uint(TILE_OUTPUTS), end = min((g + 1u) * a.group_rows, a.rows);
  const uint i0 = group.y * uint(TILE_TOKENS), m = min(a.n - i0, uint(TILE_TOKENS));
  const uint fetched = tile_fetched(simdgroup, lane);
  RowSource source = {data, scale, a.row_bytes, a.scale_row_bytes};
  DecF32 xs;
  xs.p = x + a.x_at + ulong(g) * a.group_x + ulong(i0 + min(fetched, m - 1u)) * a.x_stride;
  float2 two = float2(0.0f);
#define DS4_LINEAR_MANY(D)                                                  \
  D w;                                                                      \
  open_row(w, source, a.row0 + min(r0 + fetched, end - 1u));                \
  two = tile_products(w, xs, a.cols, m, stage, simdgroup, lane)
  DS4_WITH_ROW_TYPE(fc_type, DS4_LINEAR_MANY);
#undef DS4_LINEAR_MANY
  threadgroup float* mine = stage + tile_token(simdgroup, lane) * uint(TILE_ROW) + tile_output(simdgroup, lane);
  mine[0] = two.x;
  mine[TILE_ROW] = two.y;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint row = r0 + lane;
  for (uint j = simdgroup; j < m; j += uint(TILE_THREADS / 32)) {
    const uint i = i0 + j;
    float v = stage[j * uint(TILE_ROW) + lane];
    v = (fc_flags & LINEAR_ROUND) != 0 ? ds4_bf16(v) : v;
    if ((fc_flags & LINEAR_SCORE) != 0) v = DS4_SQRT(ds4_softplus(v));
    if ((fc_flags & LINEAR_ROTATE) != 0) {
      const float other = simd_shuffle_xor(v, 1);
      const uint in_head = row % a.head_dim, plain = a.head_dim - a.rope_dim;
      if (in_head >= plain) {
        const uint at = i * (a.rope_dim / 2u) + (in_head - plain) / 2u;
        const float c = cosines[at], s = sines[at];
        const float re = v * c - other * s;
        const float im = other * s + v * c;
        v = rounded((row & 1u) == 0u ? re : im);
      }
    }
    if (row < end) {
      out[a.out_at + ulong(i) * a.ldo + row] = v;
      if ((fc_flags & LINEAR_EXPAND) != 0) expand_element(v, i, row, a.streams, a.rows, stream, post, comb);
    }
  }
}
