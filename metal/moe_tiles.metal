// moe_tiles: the experts of many tokens in tiles (tiles.h): a matrix row is decoded once for up to TILE_TOKENS pairs of its expert.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "swiglu.h"
#include "tiles.h"
#include "moe.h"

// The pairs of a tile: those of a group of moe_group, or all tokens of the shared expert, TILE_TOKENS after another.
struct TilePairs {
  device const int* list;  // of the group
  uint first;              // of the shared expert's tokens
  uint m;
  // Token, and slot among its top_k + 1 middle rows.
  uint token(uint j, uint top_k) const { return (fc_flags & MOE_SHARED) != 0 ? first + j : uint(list[j]) / top_k; }
  uint slot(uint j, uint top_k) const { return (fc_flags & MOE_SHARED) != 0 ? top_k : uint(list[j]) % top_k; }
};

KERNEL_INLINE TilePairs group_pairs(device const int* groups, uint g, uint pairs_at, thread uint& expert) {
  device const int* at = groups + MOE_GROUPS + MOE_GROUP_INTS * g;
  TilePairs pairs;
  expert = uint(at[0]);
  pairs.list = groups + pairs_at + uint(at[1]);
  pairs.first = 0u;
  pairs.m = uint(at[2]);
  return pairs;
}

template <class D>
KERNEL_INLINE float2 tile_of(RowSource source, uint row, DecF32 x, uint cols, uint m, threadgroup float* stage, uint simdgroup, uint lane) {
  D w;
  open_row(w, source, row);
  return tile_products(w, x, cols, m, stage, simdgroup, lane);
}

// A middle element with its routing weight, rounded.
KERNEL_INLINE float middle(float gate, float up, float limit, float weight) {
  float value = swiglu(rounded(gate), rounded(up), limit);
  if ((fc_flags & MOE_SHARED) == 0) value = weight * value;
  return rounded(value);
}

// mid as moe_up makes it: TILE_OUTPUTS middle elements (x) of a group, or of TILE_TOKENS tokens of the shared expert (y).
// Threadgroup memory: TILE_BYTES.
[[max_total_threads_per_threadgroup(TILE_THREADS)]]
kernel void moe_up_many(constant MoeUpParams& a [[buffer(0)]], device const uchar* gate [[buffer(1)]], device const uchar* gate_scale [[buffer(2)]],
                        device const ulong* gate_offsets [[buffer(3)]], device const uchar* up [[buffer(4)]],
                        device const uchar* up_scale [[buffer(5)]], device const ulong* up_offsets [[buffer(6)]],
                        device const float* x [[buffer(7)]], device const int* experts [[buffer(8)]],
                        device const float* weights [[buffer(9)]], device float* mid [[buffer(10)]], device const int* groups [[buffer(11)]],
                        threadgroup float* stage [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  RowSource g = {gate, gate_scale, a.gate.row_bytes, a.gate.scale_row_bytes};
  RowSource u = {up, up_scale, a.up.row_bytes, a.up.scale_row_bytes};
  TilePairs pairs;
  pairs.list = experts;
  pairs.first = group.y * uint(TILE_TOKENS);
  if ((fc_flags & MOE_SHARED) != 0) {
    pairs.m = min(a.n - pairs.first, uint(TILE_TOKENS));
  } else {
    if (int(group.y) >= groups[0]) return;  // the whole threadgroup
    uint e = 0u;
    pairs = group_pairs(groups, group.y, a.pairs_at, e);
    g.data = g.data + gate_offsets[2u * e];
    g.scale = g.scale + gate_offsets[2u * e + 1u];
    u.data = u.data + up_offsets[2u * e];
    u.scale = u.scale + up_offsets[2u * e + 1u];
  }
  const uint f0 = group.x * uint(TILE_OUTPUTS), fetched = tile_fetched(simdgroup, lane), row = min(f0 + fetched, a.expert_dim - 1u);
  DecF32 xs;
  xs.p = x + ulong(pairs.token(min(fetched, pairs.m - 1u), a.top_k)) * a.hidden;
  float2 gv = float2(0.0f), uv = float2(0.0f);
#define DS4_UP_MANY(D)                                                             \
  gv = tile_of<D>(g, row, xs, a.gate.cols, pairs.m, stage, simdgroup, lane);       \
  uv = tile_of<D>(u, row, xs, a.gate.cols, pairs.m, stage, simdgroup, lane)
  DS4_WITH_ROW_TYPE(fc_type, DS4_UP_MANY);
#undef DS4_UP_MANY
  const uint j0 = tile_token(simdgroup, lane);
  float weight[2] = {1.0f, 1.0f};
  if ((fc_flags & MOE_SHARED) == 0)
    for (uint j = 0u; j < 2u; ++j) weight[j] = weights[pairs.list[min(j0 + j, pairs.m - 1u)]];
  threadgroup float* mine = stage + j0 * uint(TILE_ROW) + tile_output(simdgroup, lane);
  mine[0] = middle(gv.x, uv.x, a.limit, weight[0]);
  mine[TILE_ROW] = middle(gv.y, uv.y, a.limit, weight[1]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint f = f0 + lane;
  for (uint j = simdgroup; j < pairs.m; j += uint(TILE_THREADS / 32)) {
    float value = f < a.expert_dim ? stage[j * uint(TILE_ROW) + lane] : 0.0f;
    if (fc_quant != 0) value = quantised(value);
    const uint slot = pairs.token(j, a.top_k) * (a.top_k + 1u) + pairs.slot(j, a.top_k);
    if (f < a.expert_dim) mid[ulong(slot) * a.expert_dim + f] = value;
  }
}

// Rounded products of a group (y) with TILE_OUTPUTS rows of its expert (x): parts[token * slots + slot][rows].
[[max_total_threads_per_threadgroup(TILE_THREADS)]]
kernel void moe_part_many(constant MoePartParams& a [[buffer(0)]], device const uchar* routed [[buffer(1)]],
                          device const uchar* routed_scale [[buffer(2)]], device const ulong* offsets [[buffer(3)]],
                          device const float* mid [[buffer(4)]], device const int* groups [[buffer(5)]], device float* parts [[buffer(6)]],
                          threadgroup float* stage [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  if (int(group.y) >= groups[0]) return;  // the whole threadgroup
  uint e = 0u;
  const TilePairs pairs = group_pairs(groups, group.y, a.pairs_at, e);
  const uint d0 = group.x * uint(TILE_OUTPUTS), fetched = tile_fetched(simdgroup, lane), slots = a.top_k + 1u;
  RowSource w2 = {routed + offsets[2u * e], routed_scale + offsets[2u * e + 1u], a.routed.row_bytes, a.routed.scale_row_bytes};
  const uint taken = min(fetched, pairs.m - 1u), row = a.row0 + min(d0 + fetched, a.rows - 1u);
  DecF32 xs;
  xs.p = mid + ulong(pairs.token(taken, a.top_k) * slots + pairs.slot(taken, a.top_k)) * a.expert_dim;
  float2 two = float2(0.0f);
#define DS4_PART_MANY(D) two = tile_of<D>(w2, row, xs, a.routed.cols, pairs.m, stage, simdgroup, lane)
  DS4_WITH_ROW_TYPE(fc_type, DS4_PART_MANY);
#undef DS4_PART_MANY
  threadgroup float* mine = stage + tile_token(simdgroup, lane) * uint(TILE_ROW) + tile_output(simdgroup, lane);
  mine[0] = two.x;
  mine[TILE_ROW] = two.y;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint d = d0 + lane;
  for (uint j = simdgroup; j < pairs.m; j += uint(TILE_THREADS / 32)) {
    const uint slot = pairs.token(j, a.top_k) * slots + pairs.slot(j, a.top_k);
    if (d < a.rows) parts[ulong(slot) * a.rows + d] = rounded(stage[j * uint(TILE_ROW) + lane]);
  }
}
