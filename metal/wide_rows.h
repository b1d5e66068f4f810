// Row products in the canonical order (docs/numerics.md, R1) where four lanes share a matrix row and a simdgroup has 8 or 16 rows.
//
// In rows.h a lane has two of the 64 accumulators of a row, so it unpacks a scale for every two weights. Here it has 16 of them, in
// two runs of 8, and unpacks a scale for 8 or 16. The order of a product is fixed by accumulator (element mod 64) and segment, not
// by lane: bits are equal. The accumulators of all segments meet in threadgroup memory, where the tree is made as in rows.h.
//
// Weights come through threadgroup memory, WIDE_CHUNK columns of all rows at a time, and the next chunk is on its way while
// one is multiplied. On NVIDIA GPUs the copy is asynchronous (cp.async), elsewhere it is a loop; docs/decisions/0008.
#pragma once

#include "rows.h"
#include "wide.h"

#if defined(DS4_CUDA_KERNEL)
// One activation row is a wait for memory: 20 simdgroups a multiprocessor, at the price of registers.
#undef DS4_BLOCKS
#define DS4_BLOCKS (fc_rows == 1 && DS4_THREADS <= 640 ? 640 / DS4_THREADS : 1)
// 2^23 + byte k of a word.
KERNEL_INLINE float byte_up(uint w, uint k) { return as_type<float>(__byte_perm(w, 0x4b000000u, 0x7440u | k)); }
// The four bytes from byte `shift` on of two words.
KERNEL_INLINE uint bytes_from(uint low, uint high, uint shift) { return __byte_perm(low, high, 0x3210u + 0x1111u * shift); }
KERNEL_INLINE void stage_16(threadgroup uchar* to, device const uchar* from) { ds4_copy_16(to, from); }
KERNEL_INLINE void stage_8(threadgroup uchar* to, device const uchar* from) { ds4_copy_8(to, from); }
KERNEL_INLINE void stage_end() { ds4_copies_end(); }
// All but the youngest chunks are there.
KERNEL_INLINE void stage_wait() {
  if ((fc_flags & WIDE_DEEP) != 0) ds4_copies_wait<WIDE_DEEP_STAGES - 2>();
  else ds4_copies_wait<WIDE_STAGES - 2>();
}
#else
KERNEL_INLINE float byte_up(uint w, uint k) { return as_type<float>(0x4b000000u | ((w >> (8u * k)) & 255u)); }
KERNEL_INLINE uint bytes_from(uint low, uint high, uint shift) {
  return shift == 0u ? low : (low >> (8u * shift)) | (high << (32u - 8u * shift));
}
KERNEL_INLINE void stage_16(threadgroup uchar* to, device const uchar* from) { *(threadgroup uint4*)to = *(device const uint4*)from; }
KERNEL_INLINE void stage_8(threadgroup uchar* to, device const uchar* from) { *(threadgroup uint2*)to = *(device const uint2*)from; }
KERNEL_INLINE void stage_end() {}
KERNEL_INLINE void stage_wait() {}
#endif

KERNEL_INLINE float byte_float(uint w, uint k) { return byte_up(w, k) - 8388608.0f; }

// Decoders: a row of WIDE_CHUNK columns begins at `row`. head() reads what belongs to all of it; turn() gives the lane's 16 of the
// columns 64 t .. 64 t + 63: those of run(l, 0) and the next 7, those of run(l, 1) and the next 7; l is the lane of the row, 0 .. 3.

struct WideQ8_0 {
  enum { kBytes = 272, kPitch = WIDE_PITCH_Q8_0, kPiece = 16 };
  uint run(uint l, uint which) const { return 16u * l + 8u * which; }
  void head(threadgroup const uchar* row) {}
  void turn(threadgroup const uchar* row, uint t, uint l, thread float* out) const {
    threadgroup const uchar* b = row + 68u * t + 34u * (l >> 1);
    const float d = f16_value(*(threadgroup const ushort*)b);
    // Codes begin 2 bytes into a word in the first of two blocks, at a word in the second.
    threadgroup const uint* words = (threadgroup const uint*)(row + 68u * t + (l >> 1) * 36u + 16u * (l & 1u));
    const uint shift = (l >> 1) != 0u ? 0u : 2u;
    uint w[5];
#pragma unroll
    for (uint i = 0u; i < 4u; ++i) w[i] = words[i];
    w[4] = words[shift != 0u ? 4u : 3u];  // not needed where codes begin at a word: it may lie behind the row
#pragma unroll
    for (uint i = 0u; i < 4u; ++i) {
      const uint c = bytes_from(w[i], w[i + 1u], shift) ^ 0x80808080u;
#pragma unroll
      for (uint k = 0u; k < 4u; ++k) out[4u * i + k] = d * (byte_up(c, k) - 8388736.0f);
    }
  }
};

struct WideQ4K {
  enum { kBytes = 144, kPitch = WIDE_PITCH_Q4_K, kPiece = 16 };
  float d, dmin;
  uint sc[2], mn[2];
  uint run(uint l, uint which) const { return 8u * l + 32u * which; }
  void head(threadgroup const uchar* row) {
    const uint4 h = *(threadgroup const uint4*)row;
    d = f16_value(h.x & 0xffffu);
    dmin = f16_value(h.x >> 16);
    sc[0] = h.y & 0x3f3f3f3fu;
    mn[0] = h.z & 0x3f3f3f3fu;
    sc[1] = (h.w & 0x0f0f0f0fu) | ((h.y >> 2) & 0x30303030u);
    mn[1] = ((h.w >> 4) & 0x0f0f0f0fu) | ((h.z >> 2) & 0x30303030u);
  }
  void turn(threadgroup const uchar* row, uint t, uint l, thread float* out) const {
    const uint2 c = *(threadgroup const uint2*)(row + 16u + 32u * t + 8u * l);
    const uint j = 2u * (t & 1u);
    const float d0 = d * byte_float(sc[t >> 1], j), d1 = d * byte_float(sc[t >> 1], j + 1u);
    const float m0 = -(dmin * byte_float(mn[t >> 1], j)), m1 = -(dmin * byte_float(mn[t >> 1], j + 1u));
    const uint low[2] = {c.x & 0x0f0f0f0fu, c.y & 0x0f0f0f0fu}, high[2] = {(c.x >> 4) & 0x0f0f0f0fu, (c.y >> 4) & 0x0f0f0f0fu};
#pragma unroll
    for (uint k = 0u; k < 8u; ++k) {
      out[k] = fma(d0, byte_float(low[k >> 2], k & 3u), m0);
      out[8u + k] = fma(d1, byte_float(high[k >> 2], k & 3u), m1);
    }
  }
};

struct WideMxfp4 {
  enum { kBytes = 136, kPitch = WIDE_PITCH_MXFP4, kPiece = 8 };
  uint run(uint l, uint which) const { return 32u * (l >> 1) + 8u * (l & 1u) + 16u * which; }
  void head(threadgroup const uchar* row) {}
  void turn(threadgroup const uchar* row, uint t, uint l, thread float* out) const {
    const uint block = 34u * t + 17u * (l >> 1), at = block + 1u + 8u * (l & 1u), shift = at & 3u;
    const float e = ds4_e8m0(row[block]);
    threadgroup const uint* words = (threadgroup const uint*)(row + (at - shift));
    const uint w0 = words[0], w1 = words[1], w2 = words[shift != 0u ? 2u : 1u];
    const uint c[2] = {bytes_from(w0, w1, shift), bytes_from(w1, w2, shift)};
#pragma unroll
    for (uint k = 0u; k < 8u; ++k) {
      const uint b = c[k >> 2] >> (8u * (k & 3u));
      out[k] = e2m1(b & 15u) * e;
      out[8u + k] = e2m1((b >> 4) & 15u) * e;
    }
  }
};

// Runs CALL(decoder type) for a RowType that has one.
#define DS4_WITH_WIDE_TYPE(type, CALL)         \
  do {                                         \
    if ((type) == 6) { CALL(WideQ8_0); }       \
    else if ((type) == 7) { CALL(WideQ4K); }   \
    else { CALL(WideMxfp4); }                  \
  } while (false)

// Where the pieces that a lane copies of a chunk lie: in memory behind the first row's chunk, and in threadgroup memory.
template <class W, int R>
KERNEL_INLINE void stage_chunk(device const uchar* rows, uint row_bytes, uint last, threadgroup uchar* to, uint lane) {
  const uint of_row = uint(W::kBytes) / uint(W::kPiece);
#pragma unroll
  for (uint p0 = 0u; p0 < uint(WIDE_GROUPS * R) * of_row; p0 += 32u) {
    const uint p = p0 + lane, r = p / of_row, q = (p % of_row) * uint(W::kPiece);
    if (p >= uint(WIDE_GROUPS * R) * of_row) continue;
    device const uchar* from = rows + min(r, last) * row_bytes + q;
    if (uint(W::kPiece) == 16u) stage_16(to + r * uint(W::kPitch) + q, from);
    else stage_8(to + r * uint(W::kPitch) + q, from);
  }
}

// The same columns of N activation rows.
template <int N>
KERNEL_INLINE void stage_rows(device const float* x, thread const uint* at, uint column, threadgroup uchar* to, uint lane) {
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (uint p = lane; p < 64u; p += 32u)
      stage_16(to + uint(WIDE_X) * uint(j) + 16u * (p + p / 8u), (device const uchar*)(x + at[j] + column + 4u * p));
}

// Four of the lane's elements of turn t: a quarter of its 16, `run` floats into the turn.
KERNEL_INLINE float4 staged_quad(threadgroup const uchar* row, uint t, uint run) {
  return *(threadgroup const float4*)(row + 288u * t + 4u * run + run / 32u * 16u);
}

// Columns 256 first .. 256 (first + chunks) - 1 of one segment, of WIDE_GROUPS R rows from `rows` on, of which `last` is the
// last to be read, times N activation rows x + at[j]: acc[16 (N r + j)] and the next, r the row of a group. stage: bytes of this simdgroup, as many as wide_stage() of the host says.
template <class W, int R, int N>
KERNEL_INLINE void wide_segment(device const uchar* rows, uint row_bytes, uint last, device const float* x, thread const uint* at, uint first,
                                uint chunks, threadgroup uchar* stage, uint lane, thread float* acc) {
  const bool staged = N <= WIDE_STAGED_ROWS;
  const uint stages = (fc_flags & WIDE_DEEP) != 0 ? uint(WIDE_DEEP_STAGES) : uint(WIDE_STAGES);
  const uint weights = uint(WIDE_GROUPS * R * W::kPitch), slot = weights + (staged ? uint(N * WIDE_X) : 0u), l = lane & 3u;
  device const uchar* from = rows + first * uint(W::kBytes);
  W w[R];
  const uint run0 = w[0].run(l, 0u), run1 = w[0].run(l, 1u);
#pragma unroll
  for (int q = 0; q < 16 * R * N; ++q) acc[q] = 0.0f;
  threadgroup uchar* fill = stage;
  threadgroup const uchar* use = stage;
  for (uint c = 0u; c < chunks + stages - 1u; ++c) {
    const bool fetching = c < chunks;
    if (c + 1u >= stages) {
      stage_wait();
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (fetching) {
      stage_chunk<W, R>(from + c * uint(W::kBytes), row_bytes, last, fill, lane);
      if (staged) stage_rows<N>(x, at, 256u * (first + c), fill + weights, lane);
    }
    stage_end();
    fill = fill + slot == stage + stages * slot ? stage : fill + slot;
    if (c + 1u < stages) continue;
    const uint column = 256u * (first + c + 1u - stages);
    threadgroup const uchar* row = use + (lane >> 2) * uint(W::kPitch);
    threadgroup const uchar* xs = use + weights;
    use = use + slot == stage + stages * slot ? stage : use + slot;
#pragma unroll
    for (int r = 0; r < R; ++r) w[r].head(row + WIDE_GROUPS * W::kPitch * r);
#pragma unroll
    for (uint t = 0u; t < 4u; ++t) {
      float v[16 * R];
#pragma unroll
      for (int r = 0; r < R; ++r) w[r].turn(row + WIDE_GROUPS * W::kPitch * r, t, l, v + 16 * r);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float4 q[4];
        if (staged) {
          threadgroup const uchar* mine = xs + WIDE_X * j;
          q[0] = staged_quad(mine, t, run0);
          q[1] = staged_quad(mine, t, run0 + 4u);
          q[2] = staged_quad(mine, t, run1);
          q[3] = staged_quad(mine, t, run1 + 4u);
        } else {
          device const float* xt = x + at[j] + column + 64u * t;
          q[0] = *(device const float4*)(xt + run0);
          q[1] = *(device const float4*)(xt + run0 + 4u);
          q[2] = *(device const float4*)(xt + run1);
          q[3] = *(device const float4*)(xt + run1 + 4u);
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
          thread float* mine = acc + 16 * (N * r + j);
          thread const float* weights_of = v + 16 * r;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            mine[4 * k] = fma(weights_of[4 * k], q[k].x, mine[4 * k]);
            mine[4 * k + 1] = fma(weights_of[4 * k + 1], q[k].y, mine[4 * k + 1]);
            mine[4 * k + 2] = fma(weights_of[4 * k + 2], q[k].z, mine[4 * k + 2]);
            mine[4 * k + 3] = fma(weights_of[4 * k + 3], q[k].w, mine[4 * k + 3]);
          }
        }
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);  // the stage is free
}

// The accumulators of a simdgroup into sums[activation row][matrix row][64]; with `more` added to what an earlier segment left there.
template <class W, int R, int N>
KERNEL_INLINE void wide_put(thread const float* acc, threadgroup float* sums, bool more, uint lane) {
  W w;
#pragma unroll
  for (int q = 0; q < R * N; ++q)
#pragma unroll
    for (uint quad = 0u; quad < 4u; ++quad) {
      const uint row = uint(WIDE_GROUPS * R * (q % N) + WIDE_GROUPS * (q / N)) + (lane >> 2);
      threadgroup float4* to = (threadgroup float4*)(sums + 64u * row + w.run(lane & 3u, quad >> 1) + 4u * (quad & 1u));
      thread const float* v = acc + 16 * q + 4 * int(quad);
      const float4 mine = float4(v[0], v[1], v[2], v[3]);
      *to = more ? *to + mine : mine;
    }
}

// One product: the sums of its segments, `apart` floats from each other, added in order, and the tree. All lanes get it.
KERNEL_INLINE float wide_sum(threadgroup const float* sums, uint segments, uint apart, uint lane) {
  float2 total = *(threadgroup const float2*)(sums + 2u * lane);
  for (uint s = 1u; s < segments; ++s) total = total + *(threadgroup const float2*)(sums + s * apart + 2u * lane);
  return tree64(total);
}
