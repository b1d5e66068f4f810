// Which experts a tile of up to MOE_TILE tokens has, found by every threadgroup for itself.
#pragma once

// The distinct experts of a tile of tokens, ascending. plan: [0] their number, then per expert its id, and for each of the
// tile's pairs (token * top_k + slot) its place in the list. Needs at least `pairs` threads; ends with a barrier.
#define PLAN_INTS (1 + 2 * MOE_MAX_PAIRS)
KERNEL_INLINE void plan_tile(device const int* experts, uint pairs, threadgroup int* plan, uint tid) {
  threadgroup int* ids = plan + 1;
  threadgroup int* places = ids + MOE_MAX_PAIRS;
  if (tid < pairs) {
    int id = experts[tid];
    uint place = 0u;
    bool first = true;
    for (uint p = 0u; p < pairs; ++p) {
      int other = experts[p];
      first = first && !(p < tid && other == id);
      bool counted = other < id;  // once for each distinct id
      for (uint q = 0u; q < p && counted; ++q) counted = experts[q] != other;
      place += counted ? 1u : 0u;
    }
    places[tid] = int(place);
    if (first) ids[place] = id;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid == 0u) {
    int most = -1;
    for (uint p = 0u; p < pairs; ++p) most = max(most, places[p]);
    plan[0] = most + 1;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The tile's pairs of the expert at `place`: at most one for a token.
KERNEL_INLINE uint pairs_of(threadgroup const int* plan, uint place, uint pairs, thread uint* out) {
  threadgroup const int* places = plan + 1 + MOE_MAX_PAIRS;
  uint m = 0u;
  for (uint p = 0u; p < pairs; ++p)
    if (places[p] == int(place) && m < uint(MOE_TILE)) out[m++] = p;
  for (uint j = m; j < uint(MOE_TILE); ++j) out[j] = m > 0u ? out[0] : 0u;
  return m;
}
