// attend: attention of all heads over the window and the selected compressed rows, with a sink, then un-rotation.
// The order of every sum: docs/numerics.md, R2 and R3. Two kernels: the scores of all heads and places, which depend on
// nothing but q and the rows; then for each head the chain over the blocks of the list and the values.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "packed_rows.h"
#include "lanes.h"
#include "attend.h"

// The rows of one block of the list, without its holes: window rows, then entries (or rows of the block that is drafted).
struct BlockRows {
  uint n_window;  // of them in the window
  uint n;
  uint first;     // position of the first window row
  uint entry;     // place of the first of the others
};

// n_more: entries that row i may read; unused in a window-only layer.
KERNEL_INLINE BlockRows block_rows(constant AttendParams& a, uint n_more, uint i, uint block) {
  const uint p = a.position + i;
  const uint first = a.drafting != 0 ? a.first : (p + 1 > a.window ? p + 1 - a.window : 0);
  const uint n_window = a.drafting != 0 ? a.position - a.first : p + 1 - first;
  const uint begin = block * ATTEND_PLACES, end = begin + ATTEND_PLACES;
  const uint w0 = min(begin, n_window), w1 = min(end, n_window);
  const uint m0 = begin > a.window ? begin - a.window : 0, m1 = end > a.window ? min(end - a.window, n_more) : 0;
  BlockRows b;
  b.n_window = w1 - w0;
  b.n = b.n_window + (m1 > m0 ? m1 - m0 : 0);
  b.first = first + w0;
  b.entry = m0;
  return b;
}

KERNEL_INLINE uint more_rows(constant AttendParams& a, device const int* n_selected, uint i) {
  if (a.drafting != 0) return a.n;
  return a.topk > 0 ? uint(n_selected[i]) : 0;
}

// Where the cached rows are.
struct Caches {
  device const uchar* window;
  device const uchar* more;
  device const int* selected;  // of this row
};

// Elements k and k + 1 of row t of a block.
KERNEL_INLINE float2 row_pair(constant AttendParams& a, Caches caches, BlockRows b, uint t, uint k) {
  if (t < b.n_window)
    return window_pair(caches.window + ((b.first + t) % a.window_capacity) * a.window_row_bytes, a.head_dim, k);
  const uint e = b.entry + t - b.n_window;
  if (a.drafting != 0)
    return window_pair(caches.more + ((a.position + e) % a.more_capacity) * a.more_row_bytes, a.head_dim, k);
  return compressed_pair(caches.more + uint(caches.selected[e]) * a.more_row_bytes, a.head_dim, k);
}

// A block of the list (x), 8 heads (y), a row (z). A simdgroup takes two rows of the block at a time, each lane elements
// 64 s + 2 lane and the next, for all 8 heads: a row is decoded once. Then 16 trees at once: every step adds neighbours
// (so the order is the canonical one) and leaves each lane half of the sums.
kernel void attend_scores(
    constant AttendParams& a [[buffer(0)]],
    device const float* q [[buffer(1)]],         // [n][heads][head_dim]
    device const uchar* window [[buffer(2)]],
    device const uchar* more [[buffer(3)]],
    device const int* selected [[buffer(4)]],    // [n][topk]
    device const int* n_selected [[buffer(5)]],  // [n]
    device float* scores [[buffer(6)]],          // [rows][heads][blocks][64]
    threadgroup float* shared [[threadgroup(0)]],  // 8 head_dim floats
    uint3 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint i = a.first_row + group.z, h0 = group.y * ATTEND_HEADS, hd = a.head_dim;
  const uint heads = min(ATTEND_HEADS, a.heads - h0);
  const BlockRows b = block_rows(a, more_rows(a, n_selected, i), i, group.x);
  for (uint t = tid; t < ATTEND_HEADS * hd; t += ATTEND_THREADS)
    shared[t] = t < heads * hd ? q[(i * a.heads + h0) * hd + t] : 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Caches caches;
  caches.window = window;
  caches.more = more;
  caches.selected = selected + i * a.topk;
  for (uint t = 2 * simdgroup; t < b.n; t += 2 * ATTEND_HEADS) {
    const uint t1 = t + 1 < b.n ? t + 1 : t;
    float2 sum0[ATTEND_HEADS], sum1[ATTEND_HEADS];
    for (uint h = 0; h < ATTEND_HEADS; ++h) sum0[h] = sum1[h] = float2(0.0f, 0.0f);
#pragma unroll 4
    for (uint k = 2 * lane; k < hd; k += 64) {
      const float2 v0 = row_pair(a, caches, b, t, k), v1 = row_pair(a, caches, b, t1, k);
      for (uint h = 0; h < ATTEND_HEADS; ++h) {
        const float2 q2 = ((threadgroup const float2*)shared)[(h * hd + k) >> 1];
        sum0[h].x = fma(q2.x, v0.x, sum0[h].x);
        sum0[h].y = fma(q2.y, v0.y, sum0[h].y);
        sum1[h].x = fma(q2.x, v1.x, sum1[h].x);
        sum1[h].y = fma(q2.y, v1.y, sum1[h].y);
      }
    }
    // Bit 0 of a lane then says which of the two rows it sums, bits 1 to 3 which head.
    const bool b0 = (lane & 1u) != 0, b1 = (lane & 2u) != 0, b2 = (lane & 4u) != 0, b3 = (lane & 8u) != 0;
    float s[8];
    for (uint h = 0; h < 8; ++h) s[h] = halved(sum0[h].x + sum0[h].y, sum1[h].x + sum1[h].y, b0, 1);
    for (uint h = 0; h < 4; ++h) s[h] = halved(s[h], s[h + 4], b1, 2);
    for (uint h = 0; h < 2; ++h) s[h] = halved(s[h], s[h + 2], b2, 4);
    float total = halved(s[0], s[1], b3, 8);
    total = total + simd_shuffle_xor(total, 16);
    const uint head = (b1 ? 4u : 0u) + (b2 ? 2u : 0u) + (b3 ? 1u : 0u), row = b0 ? t + 1 : t;
    if (lane < 16 && row < b.n && head < heads)
      scores[(((group.z * a.heads + h0 + head) * a.blocks) + group.x) * ATTEND_PLACES + row] = total * a.scale;
  }
}

// 64 elements of a head (x), 8 heads (y), a row (z). A simdgroup is one head; a lane two elements. The rows of a block are
// decoded once for all 8 heads. Threadgroup memory: 64 x 64 elements and 8 x 64 weights.
kernel void attend_values(
    constant AttendParams& a [[buffer(0)]],
    device const float* scores [[buffer(1)]],    // [rows][heads][blocks][64]
    device const uchar* window [[buffer(2)]],
    device const uchar* more [[buffer(3)]],
    device const int* selected [[buffer(4)]],
    device const int* n_selected [[buffer(5)]],
    device const float* sink [[buffer(6)]],
    device const float* cosines [[buffer(7)]],
    device const float* sines [[buffer(8)]],
    device float* o [[buffer(9)]],               // [n][heads][head_dim]
    device float* o_raw [[buffer(10)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint i = a.first_row + group.z, h = group.y * ATTEND_HEADS + simdgroup, hd = a.head_dim;
  const uint k0 = group.x * ATTEND_SLICE, k = k0 + 2 * lane;
  const uint n_more = more_rows(a, n_selected, i);
  const bool real = h < a.heads;
  Caches caches;
  caches.window = window;
  caches.more = more;
  caches.selected = selected + i * a.topk;
  threadgroup float* rows = shared;
  threadgroup float* p = shared + ATTEND_PLACES * ATTEND_SLICE + simdgroup * ATTEND_PLACES;
  float top = -1e30f, sum = 0.0f;
  float2 out = float2(0.0f, 0.0f);
  bool started = false;
  for (uint block = 0; block < a.blocks; ++block) {
    const BlockRows b = block_rows(a, n_more, i, block);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 4
    for (uint t = tid; t < b.n * (ATTEND_SLICE / 2); t += ATTEND_THREADS) {
      const uint row = t / (ATTEND_SLICE / 2), at = 2 * (t % (ATTEND_SLICE / 2));
      if (k0 + at < hd) ((threadgroup float2*)rows)[t] = row_pair(a, caches, b, row, k0 + at);
    }
    float alpha = 0.0f;
    if (real && b.n > 0) {
      device const float* mine = scores + ((group.z * a.heads + h) * a.blocks + block) * ATTEND_PLACES;
      const bool has0 = 2 * lane < b.n, has1 = 2 * lane + 1 < b.n;
      const float s0 = has0 ? mine[2 * lane] : top, s1 = has1 ? mine[2 * lane + 1] : top;
      const float next = lanes_max(ds4_max(top, ds4_max(s0, s1)));
      alpha = ds4_exp(top - next);
      const float e0 = has0 ? ds4_exp(s0 - next) : 0.0f, e1 = has1 ? ds4_exp(s1 - next) : 0.0f;
      p[2 * lane] = rounded(e0);
      p[2 * lane + 1] = rounded(e1);
      sum = fma(sum, alpha, tree64(float2(e0, e1)));
      top = next;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (real && b.n > 0 && k < hd) {
      if (started) out = float2(out.x * alpha, out.y * alpha);
      started = true;
#pragma unroll 8
      for (uint t = 0; t < b.n; ++t) {
        const float2 v = ((threadgroup const float2*)rows)[t * (ATTEND_SLICE / 2) + lane];
        out.x = fma(p[t], v.x, out.x);
        out.y = fma(p[t], v.y, out.y);
      }
    }
  }
  if (real && k < hd) {
    const float total = sum + ds4_exp(sink[h] - top);
    out = float2(rounded(out.x / total), rounded(out.y / total));
    const uint at = (i * a.heads + h) * hd + k, tail = hd - a.rope_dim;
    if (a.raw != 0) {
      o_raw[at] = out.x;
      o_raw[at + 1] = out.y;
    }
    if (k >= tail) {
      const uint pair = i * (a.rope_dim / 2) + (k - tail) / 2;
      const float c = cosines[pair], turn = -1.0f * sines[pair];
      const float re = out.x * c - out.y * turn;
      const float im = out.x * turn + out.y * c;
      out = float2(rounded(re), rounded(im));
    }
    o[at] = out.x;
    o[at + 1] = out.y;
  }
}
