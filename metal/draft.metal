// draft: what only the drafter needs.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "lanes.h"
#include "draft.h"

// A thread an element (x), a row (y): mean over the streams, added in stream order.
kernel void stream_mean(
    constant DraftRowsArgs& a [[buffer(0)]],
    device const float* stream [[buffer(1)]],  // [n][streams][width]
    device float* out [[buffer(2)]],           // row i at i * stride
    uint2 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  const uint k = group.x * threads + tid, i = group.y;
  if (k < a.width) {
    device const float* s = stream + i * a.streams * a.width + k;
    float v = s[0];
    for (uint j = 1; j < a.streams; ++j) v = v + s[j * a.width];
    out[i * a.stride + k] = rounded(v * a.share);
  }
}

// A thread an element (x), a row (y): the streams mixed (R7), not normed.
kernel void collapse(
    constant DraftRowsArgs& a [[buffer(0)]],
    device const float* stream [[buffer(1)]],  // [n][streams][width]
    device const float* mix [[buffer(2)]],     // [n][streams]
    device float* x [[buffer(3)]],             // [n][width]
    uint2 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  const uint k = group.x * threads + tid, i = group.y;
  if (k < a.width) {
    device const float* s = stream + i * a.streams * a.width + k;
    float v = mix[i * a.streams] * s[0];
    for (uint j = 1; j < a.streams; ++j) v = fma(mix[i * a.streams + j], s[j * a.width], v);
    x[i * a.width + k] = rounded(v);
  }
}

// A threadgroup a row: RMSNorm in place, then the activation quantiser (mode fp8).
// Threadgroup memory: width + norm_scratch(width) floats.
kernel void draft_norm(constant DraftRowsArgs& a [[buffer(0)]],
                       device float* x [[buffer(1)]],  // [n][width]
                       device const float* norm [[buffer(2)]],
                       threadgroup float* row [[threadgroup(0)]],
                       uint group [[threadgroup_position_in_grid]],
                       uint tid [[thread_index_in_threadgroup]]) {
  device float* mine = x + ulong(group) * a.width;
  for (uint k = tid; k < a.width; k += DRAFT_THREADS) row[k] = mine[k];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  norm_row(row, norm, a.width, a.eps, row + a.width, tid, DRAFT_THREADS);
  if (fc_quant != 0) {
    for (uint k0 = tid & ~31u; k0 < a.width; k0 += DRAFT_THREADS) {
      uint k = k0 + (tid & 31u);
      float v = quantised(k < a.width ? row[k] : 0.0f);
      if (k < a.width) mine[k] = v;
    }
  } else {
    for (uint k = tid; k < a.width; k += DRAFT_THREADS) mine[k] = row[k];
  }
}

// 32 elements a simdgroup, 8 a threadgroup (x), a row (y): a quantised copy.
kernel void draft_quantise(constant DraftRowsArgs& a [[buffer(0)]],
                           device const float* x [[buffer(1)]],  // [n][width]
                           device float* out [[buffer(2)]],
                           uint2 group [[threadgroup_position_in_grid]],
                           uint tid [[thread_index_in_threadgroup]]) {
  uint k = group.x * DRAFT_THREADS + tid;
  ulong at = ulong(group.y) * a.width + k;
  float v = quantised(k < a.width ? x[at] : 0.0f);
  if (k < a.width) out[at] = v;
}

// A threadgroup a row: a context row, normed, rotated and packed. Threadgroup memory: width + norm_scratch(width) floats.
kernel void draft_pack(constant DraftRowsArgs& a [[buffer(0)]],
                       device const float* x [[buffer(1)]],  // [n][width]
                       device const float* norm [[buffer(2)]],
                       device const float* cosines [[buffer(3)]],
                       device const float* sines [[buffer(4)]],
                       device uchar* window [[buffer(5)]],
                       threadgroup float* row [[threadgroup(0)]],
                       uint group [[threadgroup_position_in_grid]],
                       uint tid [[thread_index_in_threadgroup]]) {
  for (uint k = tid; k < a.width; k += DRAFT_THREADS) row[k] = x[ulong(group) * a.width + k];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  norm_row(row, norm, a.width, a.eps, row + a.width, tid, DRAFT_THREADS);
  uint at = group * (a.rope_dim / 2u);
  rotate_tail(row, a.width, a.rope_dim, cosines + at, sines + at, 1.0f, tid, DRAFT_THREADS);
  pack_window_row(row, a.width, window + ulong((a.position + group) % a.capacity) * a.row_bytes, tid, DRAFT_THREADS);
}

// Two elements a thread: the collapsed row, and behind it the embedding of the token before.
kernel void markov_join(constant MarkovParams& a [[buffer(0)]],
                        device const uchar* data [[buffer(1)]],
                        device const uchar* scale [[buffer(2)]],
                        device const float* x [[buffer(3)]],
                        device float* joined [[buffer(4)]],  // [hidden + rank]
                        uint group [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]]) {
  uint k = 2u * (group * DRAFT_THREADS + tid);
  for (uint e = k; e < min(k + 2u, a.hidden); ++e) joined[e] = x[e];
  if (k < a.rank) {
    RowSource m = {data, scale, a.row_bytes, a.scale_row_bytes};
    device float* to = joined + a.hidden;
#define DS4_JOIN(D)                       \
  D row;                                  \
  open_row(row, m, a.previous);           \
  if (k + 1u < a.rank) {                  \
    float2 v = row.get(k);                \
    to[k] = rounded(v.x);                 \
    to[k + 1u] = rounded(v.y);            \
  } else {                                \
    to[k] = rounded(row.at(k));           \
  }
    DS4_WITH_ROW_TYPE(fc_type, DS4_JOIN);
#undef DS4_JOIN
  }
}

// A thread an element (x): logits given the token before, and the largest of every run of them.
// Threadgroup memory: a float a simdgroup.
kernel void markov_logits(
    constant MarkovParams& a [[buffer(0)]],
    device const float* base [[buffer(1)]],
    device const float* bias [[buffer(2)]],
    device float* logits [[buffer(3)]],
    device float* maxima [[buffer(4)]],  // [groups]
    threadgroup float* shared [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint end = min(a.vocab, (group + 1) * MARKOV_RUN);
  float best = as_type<float>(0xff800000u);
  for (uint k = group * MARKOV_RUN + tid; k < end; k += MARKOV_THREADS) {
    const float v = base[k] + bias[k];
    logits[k] = v;
    best = ds4_max(best, v);
  }
  best = lanes_max(best);
  if (lane == 0) shared[simdgroup] = best;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid == 0) {
    for (uint s = 1; s < MARKOV_THREADS / 32; ++s) best = ds4_max(best, shared[s]);
    maxima[group] = best;
  }
}

// One threadgroup: the largest probability, 1 / sum of exp(logit - max), in 64 accumulators of ascending elements. The
// exponentials are made by all simdgroups and added by the first. Threadgroup memory: MARKOV_RUN floats.
kernel void markov_top(
    constant MarkovParams& a [[buffer(0)]],
    device const float* logits [[buffer(1)]],
    device const float* maxima [[buffer(2)]],
    device float* top [[buffer(3)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  float best = maxima[0];
  for (uint g = lane; g < a.groups; g += 32) best = ds4_max(best, maxima[g]);
  best = lanes_max(best);
  float even = 0.0f, odd = 0.0f;
  for (uint k0 = 0; k0 < a.vocab; k0 += MARKOV_RUN) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = tid; k < MARKOV_RUN; k += MARKOV_THREADS)
      shared[k] = k0 + k < a.vocab ? ds4_exp(logits[k0 + k] - best) : 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0)
      for (uint k = 2 * lane; k < MARKOV_RUN; k += 64) {
        even = even + shared[k];
        odd = odd + shared[k + 1];
      }
  }
  if (simdgroup == 0) {
    const float sum = tree64(float2(even, odd));
    if (lane == 0) top[0] = 1.0f / sum;
  }
}
