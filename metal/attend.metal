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

// Where row t of a block begins, in bytes: in the window, or among the others.
KERNEL_INLINE uint row_place(constant AttendParams& a, Caches caches, BlockRows b, uint t) {
  if (t < b.n_window) return (b.first + t) % a.window_capacity * a.window_row_bytes;
  const uint e = b.entry + t - b.n_window;
  return (a.drafting != 0 ? (a.position + e) % a.more_capacity : uint(caches.selected[e])) * a.more_row_bytes;
}

// Elements k and k + 1 of the row at `place`, as they are read, and their values. The rows of a block that is drafted are packed as
// those of the window.
KERNEL_INLINE RawPair raw_pair(constant AttendParams& a, Caches caches, bool in_window, uint place, uint k) {
  device const uchar* row = (in_window ? caches.window : caches.more) + place;
  return in_window || a.drafting != 0 ? raw_window_pair(row, a.head_dim, k) : raw_compressed_pair(row, a.head_dim, k);
}
KERNEL_INLINE float2 pair_values(constant AttendParams& a, bool in_window, RawPair raw) {
  return in_window || a.drafting != 0 ? window_values(raw) : compressed_values(raw);
}

// Elements k and k + 1 of row t of a block.
KERNEL_INLINE float2 row_pair(constant AttendParams& a, Caches caches, BlockRows b, uint t, uint k) {
  return pair_values(a, t < b.n_window, raw_pair(a, caches, t < b.n_window, row_place(a, caches, b, t), k));
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

// Pairs of elements of a block of rows that a thread of attend_values unpacks, at most.
#define ATTEND_PAIRS (ATTEND_PLACES * ATTEND_SLICE / 2u / ATTEND_THREADS)

// 64 elements of a head (x), 8 heads (y), a row (z); with ATTEND_NARROW 32. A simdgroup is one head; a lane two elements, or one.
// The rows of a block are decoded once for all 8 heads. While a block is summed, the codes and scores of the next are on their
// way, and before that it was found out where its rows are. Threadgroup memory: 64 x 64 elements, 8 x 64 weights, 2 x 64 places.
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
  const bool narrow = (fc_flags & ATTEND_NARROW) != 0;
  const uint slice = narrow ? ATTEND_SLICE / 2 : ATTEND_SLICE, pairs = slice / 2;
  const uint i = a.first_row + group.z, h = group.y * ATTEND_HEADS + simdgroup, hd = a.head_dim;
  const uint k0 = group.x * slice, k = narrow ? k0 + lane : k0 + 2 * lane;
  const uint n_more = more_rows(a, n_selected, i);
  const bool real = h < a.heads;
  Caches caches;
  caches.window = window;
  caches.more = more;
  caches.selected = selected + i * a.topk;
  threadgroup float* rows = shared;
  threadgroup float* p = shared + ATTEND_PLACES * ATTEND_SLICE + simdgroup * ATTEND_PLACES;
  threadgroup uint* row_places = (threadgroup uint*)(shared + (ATTEND_SLICE + ATTEND_HEADS) * ATTEND_PLACES);  // [2][64]
  device const float* mine = scores + (group.z * a.heads + (real ? h : 0)) * a.blocks * ATTEND_PLACES + 2 * lane;
  float top = -1e30f, sum = 0.0f, next0 = 0.0f, next1 = 0.0f;
  float2 out = float2(0.0f, 0.0f);
  bool started = false;
  RawPair raw[ATTEND_PAIRS];
  BlockRows b = block_rows(a, n_more, i, 0);
  if (tid < b.n) row_places[tid] = row_place(a, caches, b, tid);
  for (uint block = 0; block <= a.blocks; ++block) {
    // Step `block` unpacks and sums block - 1 and fetches `block`.
    const BlockRows last = b;
    float alpha = 0.0f;
    if (block > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint x = 0; x < ATTEND_PAIRS; ++x) {
        const uint t = tid + x * ATTEND_THREADS, row = t / pairs;
        if (row < last.n && k0 + 2 * (t % pairs) < hd) ((threadgroup float2*)rows)[t] = pair_values(a, row < last.n_window, raw[x]);
      }
      if (real && last.n > 0) {
        const bool has0 = 2 * lane < last.n, has1 = 2 * lane + 1 < last.n;
        const float s0 = has0 ? next0 : top, s1 = has1 ? next1 : top;
        const float next = lanes_max(ds4_max(top, ds4_max(s0, s1)));
        alpha = ds4_exp(top - next);
        const float e0 = has0 ? ds4_exp(s0 - next) : 0.0f, e1 = has1 ? ds4_exp(s1 - next) : 0.0f;
        p[2 * lane] = rounded(e0);
        p[2 * lane + 1] = rounded(e1);
        sum = fma(sum, alpha, tree64(float2(e0, e1)));
        top = next;
      }
    }
    if (block < a.blocks) b = block_rows(a, n_more, i, block);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (block < a.blocks) {
      threadgroup const uint* at = row_places + (block & 1u) * ATTEND_PLACES;
#pragma unroll
      for (uint x = 0; x < ATTEND_PAIRS; ++x) {
        const uint t = tid + x * ATTEND_THREADS, row = t / pairs, e = k0 + 2 * (t % pairs);
        if (row < b.n && e < hd) raw[x] = raw_pair(a, caches, row < b.n_window, at[row], e);
      }
      if (real && 2 * lane < b.n) next0 = mine[block * ATTEND_PLACES];
      if (real && 2 * lane + 1 < b.n) next1 = mine[block * ATTEND_PLACES + 1];
      if (block + 1 < a.blocks) {
        const BlockRows after = block_rows(a, n_more, i, block + 1);
        if (tid < after.n) row_places[((block + 1) & 1u) * ATTEND_PLACES + tid] = row_place(a, caches, after, tid);
      }
    }
    if (block > 0 && real && last.n > 0 && k < hd) {
      if (started) out = float2(out.x * alpha, out.y * alpha);
      started = true;
#pragma unroll 8
      for (uint t = 0; t < last.n; ++t) {
        if (narrow) {
          out.x = fma(p[t], rows[t * slice + lane], out.x);
        } else {
          const float2 v = ((threadgroup const float2*)rows)[t * pairs + lane];
          out.x = fma(p[t], v.x, out.x);
          out.y = fma(p[t], v.y, out.y);
        }
      }
    }
  }
  if (!real) return;  // whole simdgroups: there is no barrier below
  const float total = sum + ds4_exp(sink[h] - top);
  out = float2(rounded(out.x / total), rounded(out.y / total));
  const uint at = (i * a.heads + h) * hd + k, tail = hd - a.rope_dim, even = k & ~1u;
  if (k < hd && a.raw != 0) {
    o_raw[at] = out.x;
    if (!narrow) o_raw[at + 1] = out.y;
  }
  const float other = narrow ? simd_shuffle_xor(out.x, 1) : 0.0f;  // the other of the pair
  if (k < hd && even >= tail) {
    const uint pair = i * (a.rope_dim / 2) + (even - tail) / 2;
    const float c = cosines[pair], turn = -1.0f * sines[pair];
    const bool odd = (k & 1u) != 0;
    const float x = narrow && odd ? other : out.x, y = !narrow ? out.y : (odd ? out.x : other);
    const float re = x * c - y * turn;
    const float im = x * turn + y * c;
    out = narrow && odd ? float2(rounded(im), 0.0f) : float2(rounded(re), rounded(im));
  }
  if (k < hd) {
    o[at] = out.x;
    if (!narrow) o[at + 1] = out.y;
  }
}
