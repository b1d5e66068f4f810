// select: scores of the entries that a row may read, candidate blocks, and the best entries.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "packed_rows.h"
#include "select.h"
#include "select_rows.h"

// The 32 codes of one group of a key, twice the value. Rows are read as words where their size allows it.
KERNEL_INLINE void load_codes(device const uchar* p, bool words, thread float* k) {
  for (uint w = 0; w < 4; ++w) {
    uint v;
    if (words)
      v = ((device const uint*)p)[w];
    else
      v = uint(p[4 * w]) | (uint(p[4 * w + 1]) << 8) | (uint(p[4 * w + 2]) << 16) | (uint(p[4 * w + 3]) << 24);
    for (uint e = 0; e < 8; ++e) k[8 * w + e] = e2m1_twice(v >> (4 * e));
  }
}

// A thread an entry, 128 entries a threadgroup (x), a row (y). Products of codes are integers of at most 4,608 in sum: in
// f32 they are exact in any order. Also the largest key of every 32 scores. Threadgroup memory: queries, scales and
// weights of 16 heads: 16 (dim + dim / 32 + 1) floats.
kernel void select_scores(
    constant SelectParams& a [[buffer(0)]],
    device const char* codes [[buffer(1)]],      // [n][heads][dim]
    device const float* scales [[buffer(2)]],    // [n][heads][dim / 32]
    device const float* weights [[buffer(3)]],   // [n][heads]
    device const uchar* index_rows [[buffer(4)]],
    device const int* use_blocks [[buffer(5)]],
    device const int* n_use_blocks [[buffer(6)]],
    device float* scores [[buffer(7)]],          // [rows][stride]
    device uint* maxima [[buffer(8)]],           // [rows][stride / 32]
    device float* shown [[buffer(9)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint i = a.first_row + group.y, first = group.x * SELECT_THREADS;
  const uint m = places(a, use_blocks, n_use_blocks, i);
  if (first < m && !takes_all(a, i, m)) {
    const bool words = a.row_bytes % 4 == 0;
    const uint dim = a.dim, groups = dim / 32, place = first + tid;
    const bool real = place < m;
    const uint entry = entry_of(a, use_blocks, i, real ? place : m - 1);
    device const uchar* row = index_rows + entry * a.row_bytes;
    threadgroup float* q_scales = shared + SCORE_HEADS * dim;
    threadgroup float* q_weights = q_scales + SCORE_HEADS * groups;
    float total = 0.0f;
    for (uint h0 = 0; h0 < a.heads; h0 += SCORE_HEADS) {
      const uint heads = min(SCORE_HEADS, a.heads - h0), from = i * a.heads + h0;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint t = tid; t < SCORE_HEADS * dim; t += SELECT_THREADS)
        shared[t] = t < heads * dim ? float(int(codes[from * dim + t])) : 0.0f;
      for (uint t = tid; t < SCORE_HEADS * groups; t += SELECT_THREADS)
        q_scales[t] = t < heads * groups ? scales[from * groups + t] : 0.0f;
      if (tid < SCORE_HEADS) q_weights[tid] = tid < heads ? weights[from + tid] : 0.0f;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float d[SCORE_HEADS];
      for (uint g = 0; g < groups; ++g) {
        float k[32];
        load_codes(row + g * 16, words, k);
        const float k_scale = ds4_e8m0(row[dim / 2 + g]);
        for (uint h = 0; h < SCORE_HEADS; ++h) {
          threadgroup const float4* q = (threadgroup const float4*)(shared + h * dim + g * 32);
          float4 s = float4(0.0f);
          for (uint x = 0; x < 8; ++x) {
            const float4 v = q[x];
            s.x = fma(k[4 * x], v.x, s.x);
            s.y = fma(k[4 * x + 1], v.y, s.y);
            s.z = fma(k[4 * x + 2], v.z, s.z);
            s.w = fma(k[4 * x + 3], v.w, s.w);
          }
          const float t = (((s.x + s.y) + (s.z + s.w)) * q_scales[h * groups + g]) * k_scale;
          d[h] = g == 0 ? t : d[h] + t;
        }
      }
      for (uint h = 0; h < SCORE_HEADS; ++h)
        if (h < heads) total = total + rounded(ds4_max(rounded(d[h]), 0.0f) * q_weights[h]);
    }
    const float score = rounded(total);
    if (real) scores[group.y * a.stride + place] = score;
    if (real && a.shows != 0) shown[i * a.show_stride + entry] = score;
    const uint best = simd_max(real ? ds4_order_key(score) : 0u);
    if (lane == 0 && real) maxima[group.y * (a.stride / 32) + place / 32] = best;
  }
}

// A thread a candidate block, 128 blocks a threadgroup (x), a row (y): its best score; the newest block comes first of all.
kernel void select_blocks(
    constant SelectParams& a [[buffer(0)]],
    device const float* scores [[buffer(1)]],  // [rows][stride]
    device float* values [[buffer(2)]],        // [rows][stride]
    device uint* maxima [[buffer(3)]],         // [rows][stride / 32]
    uint2 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint i = a.first_row + group.y, seen = visible_entries(a, i);
  const uint b = group.x * SELECT_THREADS + tid, n = (seen + a.block - 1) / a.block;
  if (group.x * SELECT_THREADS < n && blocks_wanted(a, i)) {
    const bool real = b < n;
    float best = as_type<float>(0xff800000u);
    if (real) {
      const uint end = min(seen, (b + 1) * a.block);
      for (uint j = b * a.block; j < end; ++j) best = ds4_max(best, scores[group.y * a.stride + j]);
      if (b == (seen - 1) / a.block) best = as_type<float>(0x7f800000u);
      values[group.y * a.stride + b] = best;
    }
    const uint top = simd_max(real ? ds4_order_key(best) : 0u);
    if (lane == 0 && real) maxima[group.y * (a.stride / 32) + b / 32] = top;
  }
}

KERNEL_INLINE Team make_team(threadgroup uint* shared, uint tid, uint threads, uint lane, uint simdgroup) {
  Team team;
  team.bins = shared;
  team.list = shared + CHOOSE_BINS;
  team.sums = team.list + CHOOSE_LIST;
  team.words = team.sums + 3 * 16;
  team.tid = tid;
  team.threads = threads;
  team.lane = lane;
  team.simdgroup = simdgroup;
  return team;
}

struct EntrySink {
  device int* out;
  device const int* blocks;  // of this row, where only given blocks are scored
  uint block;
  bool uses;
  ScoreKeys keys;
  void put(uint place, uint t) const {
    const uint j = keys.index(t);
    out[place] = uses ? int(uint(blocks[j / block]) * block + j % block) : int(j);
  }
};

// A threadgroup a row: the best entries in ascending order. Threadgroup memory: CHOOSE_WORDS words.
kernel void select_entries(
    constant SelectParams& a [[buffer(0)]],
    device const float* scores [[buffer(1)]],
    device const uint* maxima [[buffer(2)]],
    device const int* use_blocks [[buffer(3)]],
    device const int* n_use_blocks [[buffer(4)]],
    device int* selected [[buffer(5)]],    // [n][topk]
    device int* n_selected [[buffer(6)]],  // [n]
    threadgroup uint* shared [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint i = a.first_row + group, m = places(a, use_blocks, n_use_blocks, i);
  uint got = m;
  if (takes_all(a, i, m)) {
    for (uint j = tid; j < m; j += threads) selected[i * a.topk + j] = int(entry_of(a, use_blocks, i, j));
  } else {
    EntrySink sink;
    sink.out = selected + i * a.topk;
    sink.blocks = use_blocks + i * a.n_blocks;
    sink.block = a.block;
    sink.uses = a.uses != 0;
    got = write_best(scores + group * a.stride, maxima + group * (a.stride / 32), m, a.topk, sink,
                     make_team(shared, tid, threads, lane, simdgroup));
  }
  if (tid == 0) n_selected[i] = int(got);
}

// The same for candidate blocks.
kernel void select_candidates(
    constant SelectParams& a [[buffer(0)]],
    device const float* values [[buffer(1)]],
    device const uint* maxima [[buffer(2)]],
    device int* made [[buffer(3)]],    // [n][n_blocks]
    device int* n_made [[buffer(4)]],  // [n]
    threadgroup uint* shared [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint i = a.first_row + group, n = (visible_entries(a, i) + a.block - 1) / a.block;
  uint got = n;
  if (!blocks_wanted(a, i)) {
    for (uint b = tid; b < n; b += threads) made[i * a.n_blocks + b] = int(b);
  } else {
    EntrySink sink;
    sink.out = made + i * a.n_blocks;
    sink.blocks = made;
    sink.block = 1;
    sink.uses = false;
    got = write_best(values + group * a.stride, maxima + group * (a.stride / 32), n, a.n_blocks, sink,
                     make_team(shared, tid, threads, lane, simdgroup));
  }
  if (tid == 0) n_made[i] = int(got);
}
