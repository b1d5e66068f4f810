// moe_many: the experts of many tokens. Pairs of token and slot are grouped by expert, so that a matrix row is decoded once for
// up to MOE_TILE of them wherever they stand (or TILE_TOKENS: moe_tiles.metal); the products of all slots are kept and then
// summed in the order of the experts.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "hc_row.h"
#include "moe.h"

// One threadgroup. A thread counts the pairs of its experts, one thread hands out places, then each lists its pairs.
// Threadgroup memory: 2 (n_experts + 1) ints.
kernel void moe_group(constant MoeGroupParams& a [[buffer(0)]], device const int* experts [[buffer(1)]], device int* groups [[buffer(2)]],
                      threadgroup int* counts [[threadgroup(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup int* first_group = counts + a.n_experts + 1u;
  for (uint e = tid; e < a.n_experts; e += uint(MOE_GROUP_THREADS)) {
    int c = 0;
    for (uint p = 0u; p < a.pairs; ++p) c += experts[p] == int(e) ? 1 : 0;
    counts[e] = c;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid == 0u) {
    int pairs = 0, n_groups = 0;
    for (uint e = 0u; e < a.n_experts; ++e) {
      int c = counts[e];
      counts[e] = pairs;
      first_group[e] = n_groups;
      pairs += c;
      n_groups += (c + int(a.tile) - 1) / int(a.tile);
    }
    counts[a.n_experts] = pairs;
    groups[0] = n_groups;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = tid; e < a.n_experts; e += uint(MOE_GROUP_THREADS)) {
    int at = counts[e], end = counts[e + 1u];
    for (int p = at, g = first_group[e]; p < end; p += int(a.tile), ++g) {
      device int* out = groups + MOE_GROUPS + MOE_GROUP_INTS * g;
      out[0] = int(e);
      out[1] = p;
      out[2] = min(end - p, int(a.tile));
      out[3] = 0;
    }
    for (uint p = 0u; p < a.pairs && at < end; ++p)
      if (experts[p] == int(e)) groups[a.pairs_at + uint(at++)] = int(p);
  }
}

template <class D, int N>
KERNEL_INLINE void part_rows(constant MoePartParams& a, RowSource w2, device const float* mid, thread const uint* at, uint d, uint m, uint lane,
                             device float* parts, thread const uint* slots) {
  D w[MOE_DOWN_OUTPUTS];
  for (uint r = 0u; r < uint(MOE_DOWN_OUTPUTS); ++r) open_row(w[r], w2, a.row0 + min(d + r, a.rows - 1u));
  float v[MOE_DOWN_OUTPUTS * N];
  row_products<D, MOE_DOWN_OUTPUTS, N>(w, mid, at, a.routed.cols, lane, v);
  if (lane >= uint(MOE_DOWN_OUTPUTS * N)) return;
  uint slot = slots[0];
  for (uint j = 1u; j < uint(N); ++j) slot = lane % uint(N) == j ? slots[j] : slot;
  uint row = d + lane / uint(N);
  if (row < a.rows && lane % uint(N) < m) parts[ulong(slot) * a.rows + row] = rounded(pick<MOE_DOWN_OUTPUTS * N>(v, lane));
}

// Rounded products of one group (group.y) with MOE_DOWN_OUTPUTS rows of its expert by a simdgroup: parts[token * slots + slot][rows].
kernel void moe_part(constant MoePartParams& a [[buffer(0)]], device const uchar* routed [[buffer(1)]],
                     device const uchar* routed_scale [[buffer(2)]], device const ulong* offsets [[buffer(3)]],
                     device const float* mid [[buffer(4)]], device const int* groups [[buffer(5)]], device float* parts [[buffer(6)]],
                     uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
  uint d = (group.x * uint(MOE_DOWN_SIMDGROUPS) + simdgroup) * uint(MOE_DOWN_OUTPUTS);
  if (int(group.y) >= groups[0] || d >= a.rows) return;  // whole simdgroups: there is no barrier below
  device const int* g_at = groups + MOE_GROUPS + MOE_GROUP_INTS * group.y;
  uint e = uint(g_at[0]), m = uint(g_at[2]);
  uint slots[MOE_TILE], at[MOE_TILE];
  for (uint j = 0u; j < uint(MOE_TILE); ++j) {
    uint p = uint(groups[a.pairs_at + uint(g_at[1]) + min(j, m - 1u)]);
    slots[j] = p / a.top_k * (a.top_k + 1u) + p % a.top_k;
    at[j] = slots[j] * a.expert_dim;
  }
  RowSource w2 = {routed + offsets[2u * e], routed_scale + offsets[2u * e + 1u], a.routed.row_bytes, a.routed.scale_row_bytes};
#define DS4_PART(D)                                                                \
  if (m == 1u) part_rows<D, 1>(a, w2, mid, at, d, m, lane, parts, slots);          \
  else if (m == 2u) part_rows<D, 2>(a, w2, mid, at, d, m, lane, parts, slots);     \
  else if (m <= 4u) part_rows<D, 4>(a, w2, mid, at, d, m, lane, parts, slots);     \
  else part_rows<D, 8>(a, w2, mid, at, d, m, lane, parts, slots)
  DS4_WITH_ROW_TYPE(fc_type, DS4_PART);
#undef DS4_PART
}

// y: the parts of a token in the order of its slots, which is that of the experts; the shared one last.
kernel void moe_sum(constant MoeSumParams& a [[buffer(0)]], device const float* parts [[buffer(1)]], device float* y [[buffer(2)]],
                    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]]) {
  uint d = group.x * uint(MOE_SUM_THREADS) + tid;
  if (d >= a.rows) return;
  float sum = 0.0f;
  for (uint slot = 0u; slot < a.slots; ++slot) sum = sum + parts[(ulong(group.y) * a.slots + slot) * a.rows + d];
  y[ulong(group.y) * a.hidden + a.row0 + d] = rounded(sum);
}
