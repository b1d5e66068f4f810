// What is done to one row in threadgroup memory by all threads of a threadgroup: norms, rotation, quantisers.
//
// Every function here is called by all threads of the threadgroup, in uniform control flow; `threads` is their number (a multiple of 32).
#pragma once

// Floats of scratch that sum_squares needs.
KERNEL_INLINE uint norm_scratch(uint n) { return 64u * ((n + kSegment - 1u) / kSegment) + 1u; }

// Sum of squares in the canonical order (R1). x was written before the last barrier. Ends with a barrier.
KERNEL_INLINE float sum_squares(threadgroup const float* x, uint n, threadgroup float* scratch, uint tid, uint threads) {
  uint segments = (n + kSegment - 1u) / kSegment;
  for (uint chain = tid; chain < 64u * segments; chain += threads) {
    uint begin = (chain >> 6) * kSegment, end = min(begin + kSegment, n);
    float acc = 0.0f;
    for (uint i = begin + (chain & 63u); i < end; i += 64u) acc = fma(x[i], x[i], acc);
    scratch[chain] = acc;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid < 32u) {
    float2 total = float2(scratch[2u * tid], scratch[2u * tid + 1u]);
    for (uint s = 1u; s < segments; ++s) total = total + float2(scratch[64u * s + 2u * tid], scratch[64u * s + 2u * tid + 1u]);
    float sum = tree64(total);
    if (tid == 0u) scratch[64u * segments] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return scratch[64u * segments];
}

// 1 / sqrt(mean of squares + eps).
KERNEL_INLINE float inverse_rms(threadgroup const float* x, uint n, float eps, threadgroup float* scratch, uint tid, uint threads) {
  float mean = sum_squares(x, n, scratch, tid, threads) / float(n);
  return ds4_rsqrt(mean + eps);
}

// RMSNorm in place: weight * (x * inverse rms), rounded. Ends with a barrier.
KERNEL_INLINE void norm_row(threadgroup float* x, device const float* weight, uint n, float eps, threadgroup float* scratch, uint tid,
                            uint threads) {
  float r = inverse_rms(x, n, eps, scratch, tid, threads);
  for (uint i = tid; i < n; i += threads) x[i] = rounded(weight[i] * (x[i] * r));
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Largest magnitude over the 32 lanes (the order does not matter: no rounding).
KERNEL_INLINE float lanes_amax(float v) {
  float m = fabs(v);
  m = ds4_max(m, simd_shuffle_xor(m, 1));
  m = ds4_max(m, simd_shuffle_xor(m, 2));
  m = ds4_max(m, simd_shuffle_xor(m, 4));
  m = ds4_max(m, simd_shuffle_xor(m, 8));
  m = ds4_max(m, simd_shuffle_xor(m, 16));
  return m;
}

// A group of 32 through the activation quantiser, one element a lane.
KERNEL_INLINE float quantised(float v) {
  float s = ds4_scale_q8(lanes_amax(v));
  float inv = 1.0f / s;  // exact: a power of two
  return ds4_to_e4m3(v * inv) * s;
}

// Rotates adjacent pairs of the last rope_dim elements in place; sign -1 undoes it. Ends with a barrier.
KERNEL_INLINE void rotate_tail(threadgroup float* x, uint dim, uint rope_dim, device const float* cosines, device const float* sines,
                               float sign, uint tid, uint threads) {
  threadgroup float* t = x + (dim - rope_dim);
  for (uint i = tid; i < rope_dim / 2u; i += threads) {
    float a = t[2u * i], b = t[2u * i + 1u], c = cosines[i], s = sign * sines[i];
    float re = a * c - b * s;
    float im = a * s + b * c;
    t[2u * i] = rounded(re);
    t[2u * i + 1u] = rounded(im);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Window row: dim e4m3 codes, then one e8m0 scale per 32. dim is a multiple of 32.
KERNEL_INLINE void pack_window_row(threadgroup const float* x, uint dim, device uchar* row, uint tid, uint threads) {
  for (uint g = tid >> 5; g < dim >> 5; g += threads >> 5) {
    uint i = 32u * g + (tid & 31u);
    float s = ds4_scale_q8(lanes_amax(x[i]));
    float inv = 1.0f / s;
    row[i] = ds4_e4m3_code(ds4_to_e4m3(x[i] * inv));
    if ((tid & 31u) == 0u) row[dim + g] = ds4_e8m0_code(s);
  }
}
