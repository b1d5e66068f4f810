// moe_wide: the experts of up to MOE_TILE tokens where four lanes share a matrix row (wide_rows.h).
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "swiglu.h"
#include "hc_row.h"
#include "moe.h"
#include "moe_plan.h"
#include "wide_rows.h"

// Sums of WIDE_GROUPS R rows from r on of one matrix and segment, for N activation rows, into the simdgroup's part of `area`.
template <class W, int R, int N>
KERNEL_INLINE void expert_tile(device const uchar* data, uint row_bytes, uint rows, uint r, device const float* x, thread const uint* at,
                               uint cols, uint segment, threadgroup uchar* stage, threadgroup float* sums, bool more, uint lane) {
  float acc[16 * R * N];
  const uint first = 8u * segment, chunks = min(cols / uint(WIDE_CHUNK) - first, 8u);
  wide_segment<W, R, N>(data + ulong(row_bytes) * r, row_bytes, rows - 1u - r, x, at, first, chunks, stage, lane, acc);
  wide_put<W, R, N>(acc, sums, more, lane);
}

// mid = silu(min(gate, limit)) * clamp(up) * routing weight, rounded: WIDE_ROWS_OF elements of one expert for its tokens, WIDE_TOKENS of
// them at a time. The first half of the simdgroups has the segments of the gate, the other those of up. Modes without a quantiser.
// Threadgroup memory: a.area bytes for each simdgroup, PLAN_INTS ints, 32 * WIDE_TOKENS floats.
kernel void moe_up_wide(constant MoeUpParams& a [[buffer(0)]], device const uchar* gate [[buffer(1)]], device const uchar* gate_scale [[buffer(2)]],
                        device const ulong* gate_offsets [[buffer(3)]], device const uchar* up [[buffer(4)]],
                        device const uchar* up_scale [[buffer(5)]], device const ulong* up_offsets [[buffer(6)]],
                        device const float* x [[buffer(7)]], device const int* experts [[buffer(8)]], device const float* weights [[buffer(9)]],
                        device float* mid [[buffer(10)]], device const int* groups [[buffer(11)]], threadgroup uchar* area [[threadgroup(0)]],
                        uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const bool shared = (fc_flags & MOE_SHARED) != 0;
  const uint segments = (a.gate.cols + kSegment - 1u) / kSegment, simdgroups = 2u * segments;
  const uint of_tile = WIDE_ROWS_OF(fc_rows), f0 = group.x * of_tile;
  const uint tokens = a.n, pairs = tokens * a.top_k;
  threadgroup int* plan = (threadgroup int*)(area + simdgroups * a.area);
  threadgroup float* results = (threadgroup float*)(plan + PLAN_INTS);
  uint list[MOE_TILE], m = tokens, e = 0u;
  if (shared) {
    for (uint j = 0u; j < uint(MOE_TILE); ++j) list[j] = min(j, tokens - 1u);
  } else {
    plan_tile(experts, pairs, plan, tid);
    if (int(group.y) >= plan[0]) return;  // the whole threadgroup
    e = uint(plan[1u + group.y]);
    m = pairs_of(plan, group.y, pairs, list);
  }
  const bool is_up = simdgroup >= segments;
  device const uchar* data = is_up ? up : gate;
  if (!shared) data = data + (is_up ? up_offsets[2u * e] : gate_offsets[2u * e]);
  const uint row_bytes = uint(is_up ? a.up.row_bytes : a.gate.row_bytes), segment = simdgroup % segments;
  threadgroup uchar* mine = area + simdgroup * a.area;
  for (uint j0 = 0u; j0 < m; j0 += uint(WIDE_TOKENS)) {
    uint at[WIDE_TOKENS];
    for (uint j = 0u; j < uint(WIDE_TOKENS); ++j) {
      const uint pair = list[min(j0 + j, m - 1u)];
      at[j] = (shared ? pair : pair / a.top_k) * a.hidden;
    }
    const uint left = min(m - j0, uint(WIDE_TOKENS));
#define DS4_UP_N(W, R, N) \
  expert_tile<W, R, N>(data, row_bytes, a.expert_dim, f0, x, at, a.gate.cols, segment, mine, (threadgroup float*)mine, false, lane)
#define DS4_UP(W)                                  \
  if (fc_rows == 1 || (fc_rows == 2 && left == 1u)) DS4_UP_N(W, 2, 1);  \
  else if (fc_rows == 2) DS4_UP_N(W, 2, 2);        \
  else if (left == 1u) DS4_UP_N(W, 1, 1);          \
  else if (left == 2u) DS4_UP_N(W, 1, 2);          \
  else DS4_UP_N(W, 1, 4)
    DS4_WITH_WIDE_TYPE(fc_type, DS4_UP);
#undef DS4_UP
#undef DS4_UP_N
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // results[gate or up][token][element]
    for (uint q = simdgroup; q < 2u * of_tile * left; q += simdgroups) {
      const uint which = q / (of_tile * left), j = q / of_tile % left, row = q % of_tile;
      threadgroup const float* sums = (threadgroup const float*)(area + which * segments * a.area);
      const float v = wide_sum(sums + 64u * (of_tile * j + row), segments, a.area / 4u, lane);
      if (lane == 0u) results[(which * uint(WIDE_TOKENS) + j) * of_tile + row] = rounded(v);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint j = tid / of_tile, f = f0 + tid % of_tile;
    if (j < left && f < a.expert_dim) {
      const uint pair = list[j0 + j];
      float value = swiglu(results[tid], results[uint(WIDE_TOKENS) * of_tile + tid], a.limit);
      if (!shared) value = weights[pair] * value;
      const uint slots = a.top_k + 1u;
      const uint slot = shared ? pair * slots + a.top_k : pair / a.top_k * slots + pair % a.top_k;
      mid[ulong(slot) * a.expert_dim + f] = rounded(value);
    }
  }
}

// Rounded products of WIDE_GROUPS R rows of one expert with the middle rows of N pairs (or tokens) into results[pair][row].
template <class W, int R, int N>
KERNEL_INLINE void down_tile(device const uchar* data, uint row_bytes, uint cols, uint rows, uint d, device const float* mid, thread const uint* at,
                             thread const uint* pair, uint m, threadgroup uchar* stage, threadgroup float* sums, threadgroup float* results,
                             uint lane) {
  const uint segments = (cols + kSegment - 1u) / kSegment;
  for (uint s = 0u; s < segments; ++s)
    expert_tile<W, R, N>(data, row_bytes, rows, d, mid, at, cols, s, stage, sums, s > 0u, lane);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint j = 0u; j < m; ++j)
    for (uint row = 0u; row < uint(WIDE_GROUPS * R); ++row) {
      const float v = rounded(wide_sum(sums + 64u * (uint(WIDE_GROUPS * R) * j + row), 1u, 0u, lane));
      if (lane == 0u) results[pair[j] * uint(WIDE_GROUPS * R) + row] = v;
    }
  simdgroup_barrier(mem_flags::mem_threadgroup);  // the sums are read
}

// The pairs (or tokens) of one expert, WIDE_TOKENS at a time.
template <class W>
KERNEL_INLINE void down_expert(constant MoeDownParams& a, device const uchar* data, uint row_bytes, uint cols, uint d, device const float* mid,
                               thread const uint* list, thread const uint* from, uint m, threadgroup uchar* stage, threadgroup float* sums,
                               threadgroup float* results, uint lane) {
  for (uint j0 = 0u; j0 < m; j0 += uint(WIDE_TOKENS)) {
    const uint left = min(m - j0, uint(WIDE_TOKENS));
    uint at[WIDE_TOKENS], pair[WIDE_TOKENS];
    for (uint j = 0u; j < uint(WIDE_TOKENS); ++j) {
      at[j] = from[min(j0 + j, m - 1u)];
      pair[j] = list[min(j0 + j, m - 1u)];
    }
    if (fc_rows == 1 || left == 1u) down_tile<W, 1, 1>(data, row_bytes, cols, a.hidden, d, mid, at, pair, left, stage, sums, results, lane);
    else if (left == 2u) down_tile<W, 1, 2>(data, row_bytes, cols, a.hidden, d, mid, at, pair, left, stage, sums, results, lane);
    else down_tile<W, 1, 4>(data, row_bytes, cols, a.hidden, d, mid, at, pair, left, stage, sums, results, lane);
  }
}

// y, and with MOE_EXPAND the streams: WIDE_DOWN_ROWS elements of at most MOE_TILE tokens by a threadgroup. Its simdgroups share the experts out
// among themselves; the sums are made afterwards, experts ascending, the shared one last.
// Threadgroup memory: a.stage bytes and the sums of each simdgroup, (MOE_MAX_PAIRS + MOE_TILE) * WIDE_DOWN_ROWS floats, PLAN_INTS ints.
kernel void moe_down_wide(constant MoeDownParams& a [[buffer(0)]], device const uchar* routed [[buffer(1)]],
                          device const uchar* routed_scale [[buffer(2)]], device const ulong* offsets [[buffer(3)]],
                          device const uchar* shared [[buffer(4)]], device const uchar* shared_scale [[buffer(5)]],
                          device const float* mid [[buffer(6)]], device const int* experts [[buffer(7)]], device float* y [[buffer(8)]],
                          device float* stream [[buffer(9)]], device const float* post [[buffer(10)]], device const float* comb [[buffer(11)]],
                          threadgroup uchar* area [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                          uint tid [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  const uint of_tile = uint(WIDE_DOWN_ROWS), kept = 64u * of_tile * min(uint(fc_rows), uint(WIDE_TOKENS)), mine = a.stage + 4u * kept;
  threadgroup uchar* stage = area + simdgroup * mine;
  threadgroup float* sums = (threadgroup float*)(stage + a.stage);
  threadgroup float* results = (threadgroup float*)(area + uint(WIDE_TASKS) * mine);
  threadgroup int* plan = (threadgroup int*)(results + (MOE_MAX_PAIRS + MOE_TILE) * of_tile);
  const uint tokens = a.n, pairs = tokens * a.top_k, slots = a.top_k + 1u, d = group.x * of_tile;
  plan_tile(experts, pairs, plan, tid);
  uint list[MOE_TILE], from[MOE_TILE];
  for (uint place = simdgroup; place < uint(plan[0]); place += uint(WIDE_TASKS)) {
    const uint m = pairs_of(plan, place, pairs, list), e = uint(plan[1u + place]);
    for (uint j = 0u; j < uint(MOE_TILE); ++j) from[j] = ((list[j] / a.top_k) * slots + list[j] % a.top_k) * a.expert_dim;
#define DS4_DOWN(W) down_expert<W>(a, routed + offsets[2u * e], uint(a.routed.row_bytes), a.routed.cols, d, mid, list, from, m, stage, sums, results, lane)
    DS4_WITH_WIDE_TYPE(fc_type, DS4_DOWN);
#undef DS4_DOWN
  }
  if (simdgroup == uint(plan[0]) % uint(WIDE_TASKS)) {
    for (uint j = 0u; j < uint(MOE_TILE); ++j) {
      const uint token = min(j, tokens - 1u);
      from[j] = (token * slots + a.top_k) * a.expert_dim;
      list[j] = uint(MOE_MAX_PAIRS) + token;
    }
#define DS4_SHARED(W) down_expert<W>(a, shared, uint(a.shared.row_bytes), a.shared.cols, d, mid, list, from, tokens, stage, sums, results, lane)
    DS4_WITH_WIDE_TYPE(fc_type2, DS4_SHARED);
#undef DS4_SHARED
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint j = tid / of_tile, row = tid % of_tile;
  if (j >= tokens || d + row >= a.hidden) return;  // there is no barrier below
  float sum = 0.0f;
  for (uint slot = 0u; slot < a.top_k; ++slot) sum = sum + results[(j * a.top_k + slot) * of_tile + row];
  sum = rounded(sum + results[(uint(MOE_MAX_PAIRS) + j) * of_tile + row]);
  y[ulong(j) * a.hidden + d + row] = sum;
  if ((fc_flags & MOE_EXPAND) != 0) expand_element(sum, j, d + row, a.streams, a.hidden, stream, post, comb);
}
