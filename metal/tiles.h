// Row products of many activation rows: a threadgroup makes TILE_OUTPUTS x TILE_TOKENS of them, so that a weight is read and
// decoded once for 32 activation rows. The order of every sum is that of rows.h (docs/numerics.md, R1).
//
// The 64 accumulators of a product are what would limit the tile: 64 x 32 x 32 numbers do not fit into registers. But the tree
// adds neighbours first, so the 16 accumulators of one index / 16 are a subtree of their own: four passes over the columns, each
// over the elements of one quarter of every 64, leave four numbers of a product, and these are the last two levels of the tree.
//
// A thread has one accumulator of 8 x 4 products, lane & 15 says which. Columns go through threadgroup memory in chunks of
// 256: half of the simdgroups fetch and decode weights, half fetch activations. The loads of a chunk are on the way while the
// chunk before is being multiplied.
#pragma once

#include "lanes.h"
#include "tile_sizes.h"

// Four turns of columns 256 chunk + 64 t + 2 pair and the next, and zeros past the end: rows.h's fetch() and values().
template <class D>
KERNEL_INLINE void tile_fetch(thread const D& row, uint chunk, uint pair, uint cols, thread uint* raw) {
  if ((chunk + 1u) * uint(TILE_CHUNK) <= cols) row.fetch(chunk, pair, raw);
}

template <class D>
KERNEL_INLINE void tile_values(thread const D& row, uint chunk, uint pair, uint cols, thread const uint* raw, thread float2* out) {
  if ((chunk + 1u) * uint(TILE_CHUNK) <= cols) {
    row.values(chunk, pair, raw, out);
    return;
  }
  for (uint t = 0u; t < 4u; ++t) {
    uint i = chunk * uint(TILE_CHUNK) + 64u * t + 2u * pair;
    out[t] = float2(0.0f);
    if (i + 1u < cols) out[t] = row.get(i);
    else if (i < cols) out[t].x = row.at(i);
  }
}

// One column for all products of a thread: w 8 weights, x 4 activations.
KERNEL_INLINE void tile_step(threadgroup const float* w, threadgroup const float* x, thread float* acc) {
  const float4 w0 = *(threadgroup const float4*)w, w1 = *(threadgroup const float4*)(w + 4), v = *(threadgroup const float4*)x;
  const float ws[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
  const float xs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (uint r = 0u; r < 8u; ++r)
#pragma unroll
    for (uint j = 0u; j < 4u; ++j) acc[4u * r + j] = fma(ws[r], xs[j], acc[4u * r + j]);
}

// The lowest four levels of the tree for 32 products at once: each leaves a lane half of them, in the end two.
KERNEL_INLINE float2 tile_tree(thread const float* v, uint lane) {
  const bool b0 = (lane & 1u) != 0u, b1 = (lane & 2u) != 0u, b2 = (lane & 4u) != 0u, b3 = (lane & 8u) != 0u;
  float s[16];
#pragma unroll
  for (uint q = 0u; q < 16u; ++q) s[q] = halved(v[q], v[q + 16u], b0, 1);
#pragma unroll
  for (uint q = 0u; q < 8u; ++q) s[q] = halved(s[q], s[q + 8u], b1, 2);
#pragma unroll
  for (uint q = 0u; q < 4u; ++q) s[q] = halved(s[q], s[q + 4u], b2, 4);
  return float2(halved(s[0], s[2], b3, 8), halved(s[1], s[3], b3, 8));
}

// Which products a thread is left with: matrix row, and the first of two activation rows.
KERNEL_INLINE uint tile_output(uint simdgroup, uint lane) {
  return 8u * (simdgroup & 3u) + 4u * (lane & 1u) + (lane & 2u) + ((lane >> 2) & 1u);
}
KERNEL_INLINE uint tile_token(uint simdgroup, uint lane) { return 8u * (simdgroup >> 2) + 4u * (lane >> 4) + 2u * ((lane >> 3) & 1u); }

// Which row of the tile a thread fetches: simdgroups 0 to 7 matrix rows, 8 to 15 activation rows.
KERNEL_INLINE uint tile_fetched(uint simdgroup, uint lane) { return 4u * (simdgroup & 7u) + (lane >> 3); }

// Two products of the tile, of cols columns; only the first m activation rows are wanted. `weight` and `x` are the rows that the
// thread fetches, of which it uses one. All threads call it; ends with a barrier, after which the stage is free.
template <class D>
KERNEL_INLINE float2 tile_products(thread const D& weight, thread const DecF32& x, uint cols, uint m, threadgroup float* stage, uint simdgroup,
                                   uint lane) {
  const bool fetches_weights = simdgroup < 8u, works = 8u * (simdgroup >> 2) < m, folds = (fc_flags & TILE_FOLDS) != 0;
  const uint pair = lane & 7u, a = lane & 15u, chunks = (cols + uint(TILE_CHUNK) - 1u) / uint(TILE_CHUNK);
  threadgroup float* put = stage + (fetches_weights ? 0u : uint(TILE_HALF)) + 2u * pair * uint(TILE_STRIDE) + tile_fetched(simdgroup, lane);
  threadgroup const float* ws = stage + a * uint(TILE_STRIDE) + 8u * (simdgroup & 3u);
  threadgroup const float* xs = stage + uint(TILE_HALF) + a * uint(TILE_STRIDE) + 8u * (simdgroup >> 2) + 4u * (lane >> 4);
  uint raw[ROW_WORDS];
  float2 first = float2(0.0f), second = float2(0.0f);
  if (fetches_weights) tile_fetch(weight, 0u, pair, cols, raw);
  else tile_fetch(x, 0u, pair, cols, raw);
  for (uint pass = 0u; pass < 4u; ++pass) {
    float acc[32], total[32];
#pragma unroll
    for (uint q = 0u; q < 32u; ++q) acc[q] = total[q] = 0.0f;
    for (uint chunk = 0u; chunk < chunks; ++chunk) {
      float2 fetched[4];
      if (fetches_weights) tile_values(weight, chunk, 8u * pass + pair, cols, raw, fetched);
      else tile_values(x, chunk, 8u * pass + pair, cols, raw, fetched);
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint t = 0u; t < 4u; ++t) {
        put[16u * t * uint(TILE_STRIDE)] = fetched[t].x;
        put[(16u * t + 1u) * uint(TILE_STRIDE)] = fetched[t].y;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const bool last = chunk + 1u == chunks;
      if (!last || pass < 3u) {
        const uint c = last ? 0u : chunk + 1u, p = 8u * (last ? pass + 1u : pass) + pair;
        if (fetches_weights) tile_fetch(weight, c, p, cols, raw);
        else tile_fetch(x, c, p, cols, raw);
      }
      if (works) {
        const uint i = chunk * uint(TILE_CHUNK) + 16u * pass + a;  // the column of turn 0
        if ((chunk + 1u) * uint(TILE_CHUNK) <= cols) {
#pragma unroll
          for (uint t = 0u; t < 4u; ++t) tile_step(ws + 16u * t * uint(TILE_STRIDE), xs + 16u * t * uint(TILE_STRIDE), acc);
        } else {
          for (uint t = 0u; t < 4u && i + 64u * t < cols; ++t)
            tile_step(ws + 16u * t * uint(TILE_STRIDE), xs + 16u * t * uint(TILE_STRIDE), acc);
        }
        if (folds && (chunk % (kSegment / uint(TILE_CHUNK)) == kSegment / uint(TILE_CHUNK) - 1u || last)) {
          const bool begins = chunk < kSegment / uint(TILE_CHUNK);
#pragma unroll
          for (uint q = 0u; q < 32u; ++q) {
            total[q] = begins ? acc[q] : total[q] + acc[q];
            acc[q] = 0.0f;
          }
        }
      }
    }
    if (works) {
      const float2 s = folds ? tile_tree(total, lane) : tile_tree(acc, lane);
      if (pass == 0u) first = s;
      else if (pass == 1u) first = first + s;
      else if (pass == 2u) second = s;
      else second = second + s;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return first + second;
}
