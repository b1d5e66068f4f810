// moe: the experts of up to MOE_TILE tokens together: every threadgroup finds the distinct experts of its tile, and for each
// the tokens that chose it, so that a matrix row is read and decoded once for all of them.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "swiglu.h"
#include "hc_row.h"
#include "moe.h"
#include "moe_plan.h"

#define ROUTE_HELD 16  // keys that a lane keeps in registers: 512 experts

// Key of expert e where it may be chosen in this round, after expert `last` with key last_key; 0: not.
KERNEL_INLINE uint route_key(uint k, uint e, uint none, bool first, uint last_key, uint last) {
  return k > none && (first || k < last_key || (k == last_key && e > last)) ? k : 0u;
}

// The k best experts of one token, ascending; their weights. One simdgroup. Threadgroup memory: MOE_MAX_TOP_K ints.
// Lane j ends with the choice at place j.
kernel void route_pick(constant RouteParams& a [[buffer(0)]], device const float* scores [[buffer(1)]], device const float* bias [[buffer(2)]],
                       device int* experts [[buffer(3)]], device float* weights [[buffer(4)]], threadgroup int* chosen [[threadgroup(0)]],
                       uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  device const float* s = scores + ulong(group.x) * a.n_experts;
  const uint none = ds4_order_key(as_type<float>(0xff800000u));
  uint held[ROUTE_HELD];
#pragma unroll
  for (uint t = 0u; t < uint(ROUTE_HELD); ++t) {
    const uint e = lane + 32u * t;
    held[t] = e < a.n_experts ? ds4_order_key(s[e] + bias[e]) : 0u;
  }
  uint last_key = 0xffffffffu, last = 0u, found = 0u, mine = 0u;
  for (uint round = 0u; round < a.top_k; ++round) {
    uint key = 0u, best = 0xffffffffu;  // of what comes after the last choice: lower key, or the same and a higher id
#pragma unroll
    for (uint t = 0u; t < uint(ROUTE_HELD); ++t) {
      const uint e = lane + 32u * t, k = route_key(held[t], e, none, round == 0u, last_key, last);
      best = k > key ? e : best;
      key = max(key, k);
    }
    for (uint e = lane + 32u * uint(ROUTE_HELD); e < a.n_experts; e += 32u) {
      const uint k = route_key(ds4_order_key(s[e] + bias[e]), e, none, round == 0u, last_key, last);
      best = k > key ? e : best;
      key = max(key, k);
    }
    const uint top = simd_max(key), winner = simd_min(key == top ? best : 0xffffffffu);
    if (winner == 0xffffffffu) break;  // all lanes
    mine = lane == found ? winner : mine;
    ++found;
    last_key = top;
    last = winner;
  }
  uint place = lane;  // among the chosen, ascending
  if (lane < found) place = 0u;
  for (uint j = 0u; j < found; ++j) {
    const uint other = simd_shuffle(mine, ushort(j));
    if (lane < found && other < mine) ++place;
  }
  if (lane < found) chosen[place] = int(mine);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  // Scores that are not numbers leave places open: fill them with the lowest ids, the logits will be NaN anyway.
  if (found < a.top_k) {
    if (lane == 0u) {
      uint got = found;
      for (uint e = 0u; got < a.top_k; ++e) {
        bool there = false;
        for (uint j = 0u; j < got; ++j) there = there || chosen[j] == int(e);
        if (!there) chosen[got++] = int(e);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  const int id = chosen[min(lane, a.top_k - 1u)];
  const float score = s[id];
  float sum = 0.0f;
  for (uint j = 0u; j < a.top_k; ++j) sum = sum + simd_shuffle(score, ushort(j));
  if (lane < a.top_k) {
    experts[group.x * a.top_k + lane] = id;
    weights[group.x * a.top_k + lane] = (score / (sum + 1e-20f)) * a.scale;
  }
}

// Gate and up sums of middle element f for m tokens: out[0 .. N) gate, out[N .. 2 N) up; rounded, into threadgroup memory.
template <class D, int N>
KERNEL_INLINE void gate_up(RowSource gate, RowSource up, device const float* x, thread const uint* at, uint cols, uint f, uint m, uint in_group,
                           threadgroup float* results, uint lane) {
  D w[2];
  open_row(w[0], gate, f);
  open_row(w[1], up, f);
  float v[2 * N];
  row_products<D, 2, N>(w, x, at, cols, lane, v);
  if (lane < uint(2 * N)) {
    uint token = lane % uint(N);
    float value = rounded(pick<2 * N>(v, lane));
    if (token < m) results[(2u * token + lane / uint(N)) * uint(MOE_UP_OUTPUTS) + in_group] = value;
  }
}

// mid = silu(min(gate, limit)) * clamp(up) * routing weight, rounded, through the quantiser: MOE_UP_OUTPUTS elements of one
// expert for its tokens: the expert of place group.y among those of a tile, or group group.y of many tokens. Threadgroup memory: 2 * MOE_TILE * MOE_UP_OUTPUTS floats, PLAN_INTS ints.
kernel void moe_up(constant MoeUpParams& a [[buffer(0)]], device const uchar* gate [[buffer(1)]], device const uchar* gate_scale [[buffer(2)]],
                   device const ulong* gate_offsets [[buffer(3)]], device const uchar* up [[buffer(4)]],
                   device const uchar* up_scale [[buffer(5)]], device const ulong* up_offsets [[buffer(6)]],
                   device const float* x [[buffer(7)]], device const int* experts [[buffer(8)]], device const float* weights [[buffer(9)]],
                   device float* mid [[buffer(10)]], device const int* groups [[buffer(11)]], threadgroup float* results [[threadgroup(0)]],
                   uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup int* plan = (threadgroup int*)(results + 2 * MOE_TILE * MOE_UP_OUTPUTS);
  uint first = group.z * uint(MOE_TILE), tokens = min(a.n - first, uint(MOE_TILE)), pairs = tokens * a.top_k;  // z: shared only
  uint list[MOE_TILE];
  uint m = tokens;
  RowSource g = {gate, gate_scale, a.gate.row_bytes, a.gate.scale_row_bytes};
  RowSource u = {up, up_scale, a.up.row_bytes, a.up.scale_row_bytes};
  if ((fc_flags & MOE_SHARED) != 0) {
    for (uint j = 0u; j < uint(MOE_TILE); ++j) list[j] = first + min(j, tokens - 1u);
  } else {
    uint e = 0u;
    if ((fc_flags & MOE_MANY) != 0) {
      if (int(group.y) >= groups[0]) return;  // the whole threadgroup
      device const int* g_at = groups + MOE_GROUPS + MOE_GROUP_INTS * group.y;
      e = uint(g_at[0]);
      m = uint(g_at[2]);
      for (uint j = 0u; j < uint(MOE_TILE); ++j) list[j] = uint(groups[a.pairs_at + uint(g_at[1]) + min(j, m - 1u)]);
    } else {
      plan_tile(experts, pairs, plan, tid);
      if (int(group.y) >= plan[0]) return;  // the whole threadgroup
      e = uint(plan[1u + group.y]);
      m = pairs_of(plan, group.y, pairs, list);
    }
    g.data = g.data + gate_offsets[2u * e];
    g.scale = g.scale + gate_offsets[2u * e + 1u];
    u.data = u.data + up_offsets[2u * e];
    u.scale = u.scale + up_offsets[2u * e + 1u];
  }
  bool shared = (fc_flags & MOE_SHARED) != 0;
  uint at[MOE_TILE];
  for (uint j = 0u; j < uint(MOE_TILE); ++j) at[j] = (shared ? list[j] : list[j] / a.top_k) * a.hidden;
  uint outputs = MOE_UP_OUTPUTS_OF(fc_quant), f0 = group.x * outputs;
  for (uint o = simdgroup; o < outputs; o += uint(MOE_UP_SIMDGROUPS)) {
    uint f = f0 + o;
    if (f >= a.expert_dim) continue;
#define DS4_UP(D)                                                              \
  if (fc_rows == 1 || m == 1u) gate_up<D, 1>(g, u, x, at, a.gate.cols, f, m, o, results, lane);     \
  else if (m == 2u) gate_up<D, 2>(g, u, x, at, a.gate.cols, f, m, o, results, lane); \
  else if (m <= 4u) gate_up<D, 4>(g, u, x, at, a.gate.cols, f, m, o, results, lane); \
  else gate_up<D, 8>(g, u, x, at, a.gate.cols, f, m, o, results, lane)
    DS4_WITH_ROW_TYPE(fc_type, DS4_UP);
#undef DS4_UP
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint f = f0 + lane;
  for (uint j = simdgroup; j < m; j += uint(MOE_UP_SIMDGROUPS)) {
    float value = 0.0f;
    bool mine = lane < outputs && f < a.expert_dim;
    if (mine) {
      float gv = results[2u * j * uint(MOE_UP_OUTPUTS) + lane], uv = results[(2u * j + 1u) * uint(MOE_UP_OUTPUTS) + lane];
      value = swiglu(gv, uv, a.limit);
      if (!shared) value = weights[list[j]] * value;
      value = rounded(value);
    }
    if (fc_quant != 0) value = quantised(value);
    uint slots = a.top_k + 1u;
    uint slot = shared ? list[j] * slots + a.top_k : list[j] / a.top_k * slots + list[j] % a.top_k;
    if (mine) mid[ulong(slot) * a.expert_dim + f] = value;
  }
}

// One expert's rounded results for its m pairs (or tokens, the shared one) into threadgroup memory: results[pair][output].
template <class D, int N>
KERNEL_INLINE void expert_results(RowSource w2, device const float* mid, thread const uint* at, thread const uint* pair, uint m, uint cols,
                                  uint d, uint rows, threadgroup float* results, uint lane) {
  D w[MOE_DOWN_OUTPUTS];
  for (uint r = 0u; r < uint(MOE_DOWN_OUTPUTS); ++r) open_row(w[r], w2, min(d + r, rows - 1u));
  float v[MOE_DOWN_OUTPUTS * N];
  row_products<D, MOE_DOWN_OUTPUTS, N>(w, mid, at, cols, lane, v);
  float value = rounded(pick<MOE_DOWN_OUTPUTS * N>(v, lane));
  if (lane < uint(MOE_DOWN_OUTPUTS * N) && lane % uint(N) < m) {
    uint which = 0u;
    for (uint j = 0u; j < uint(N); ++j) which = lane % uint(N) == j ? pair[j] : which;
    results[which * uint(MOE_DOWN_OUTPUTS) + lane / uint(N)] = value;
  }
}

// y, and with MOE_EXPAND the streams: MOE_DOWN_OUTPUTS elements of at most MOE_TILE tokens by a threadgroup. Its simdgroups
// share the experts out among themselves; the sums are made afterwards, experts ascending, the shared one last.
// Threadgroup memory: PLAN_INTS ints, (MOE_MAX_PAIRS + MOE_TILE) * MOE_DOWN_OUTPUTS floats.
kernel void moe_down(constant MoeDownParams& a [[buffer(0)]], device const uchar* routed [[buffer(1)]],
                     device const uchar* routed_scale [[buffer(2)]], device const ulong* offsets [[buffer(3)]],
                     device const uchar* shared [[buffer(4)]], device const uchar* shared_scale [[buffer(5)]],
                     device const float* mid [[buffer(6)]], device const int* experts [[buffer(7)]], device float* y [[buffer(8)]],
                     device float* stream [[buffer(9)]], device const float* post [[buffer(10)]], device const float* comb [[buffer(11)]],
                     threadgroup int* plan [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                     uint tid [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float* results = (threadgroup float*)(plan + PLAN_INTS);
  uint tokens = a.n, pairs = tokens * a.top_k, slots = a.top_k + 1u;
  plan_tile(experts, pairs, plan, tid);
  uint d = group.x * uint(MOE_DOWN_OUTPUTS);
  uint list[MOE_TILE], at[MOE_TILE];
  for (uint place = simdgroup; place < uint(plan[0]); place += uint(MOE_DOWN_SIMDGROUPS)) {
    uint m = pairs_of(plan, place, pairs, list), e = uint(plan[1u + place]);
    for (uint j = 0u; j < uint(MOE_TILE); ++j) at[j] = ((list[j] / a.top_k) * slots + list[j] % a.top_k) * a.expert_dim;
    RowSource w2 = {routed + offsets[2u * e], routed_scale + offsets[2u * e + 1u], a.routed.row_bytes, a.routed.scale_row_bytes};
#define DS4_DOWN(D)                                                                                                    \
  if (fc_rows == 1 || m == 1u) expert_results<D, 1>(w2, mid, at, list, m, a.routed.cols, d, a.hidden, results, lane);  \
  else if (m == 2u) expert_results<D, 2>(w2, mid, at, list, m, a.routed.cols, d, a.hidden, results, lane);             \
  else if (m <= 4u) expert_results<D, 4>(w2, mid, at, list, m, a.routed.cols, d, a.hidden, results, lane);             \
  else expert_results<D, 8>(w2, mid, at, list, m, a.routed.cols, d, a.hidden, results, lane)
    DS4_WITH_ROW_TYPE(fc_type, DS4_DOWN);
#undef DS4_DOWN
  }
  if (simdgroup == uint(plan[0]) % uint(MOE_DOWN_SIMDGROUPS)) {
    for (uint j = 0u; j < uint(MOE_TILE); ++j) {
      uint token = min(j, tokens - 1u);
      at[j] = (token * slots + a.top_k) * a.expert_dim;
      list[j] = uint(MOE_MAX_PAIRS) + token;
    }
    RowSource w2 = {shared, shared_scale, a.shared.row_bytes, a.shared.scale_row_bytes};
#define DS4_SHARED(D)                                                                                                  \
  if (fc_rows == 1) expert_results<D, 1>(w2, mid, at, list, tokens, a.shared.cols, d, a.hidden, results, lane);        \
  else if (fc_rows == 2) expert_results<D, 2>(w2, mid, at, list, tokens, a.shared.cols, d, a.hidden, results, lane);   \
  else if (fc_rows <= 4) expert_results<D, 4>(w2, mid, at, list, tokens, a.shared.cols, d, a.hidden, results, lane);   \
  else expert_results<D, 8>(w2, mid, at, list, tokens, a.shared.cols, d, a.hidden, results, lane)
    DS4_WITH_ROW_TYPE(fc_type2, DS4_SHARED);
#undef DS4_SHARED
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup != 0u) return;  // whole simdgroups: there is no barrier below
  uint r = lane / uint(MOE_TILE), j = min(lane % uint(MOE_TILE), tokens - 1u);  // 4 outputs x 8 tokens
  float sum = 0.0f;
  for (uint slot = 0u; slot < a.top_k; ++slot) sum = sum + results[(j * a.top_k + slot) * uint(MOE_DOWN_OUTPUTS) + r];
  sum = rounded(sum + results[(uint(MOE_MAX_PAIRS) + j) * uint(MOE_DOWN_OUTPUTS) + r]);
  if (lane % uint(MOE_TILE) < tokens && d + r < a.hidden) y[ulong(j) * a.hidden + d + r] = sum;
  if ((fc_flags & MOE_EXPAND) == 0) return;
  float values[MOE_DOWN_OUTPUTS * MOE_TILE];
  for (uint q = 0u; q < uint(MOE_DOWN_OUTPUTS * MOE_TILE); ++q) values[q] = simd_shuffle(sum, ushort(q));
  expand_results<MOE_DOWN_OUTPUTS, MOE_TILE>(values, d, a.hidden, 0u, a.n, a.streams, stream, post, comb, lane);
}
