// Right kernels, one for each thing that kernels may do: tests of the stand-in itself.
#include "compat.h"
#include "numerics.h"
#include "probe.h"

FUNCTION_CONSTANT(uint, kBias, 0);
FUNCTION_CONSTANT(bool, kNegate, 1);
CONSTANT_TABLE(float, kWeights, 4) = {1.0f, 2.0f, 4.0f, 8.0f};

// Pairwise by index bit: the sum of the 32 lanes, in every lane.
KERNEL_INLINE float lane_sum(float x) {
  for (ushort bit = 1; bit < 32; bit <<= 1) x += simd_shuffle_xor(x, bit);
  return x;
}

// One simdgroup a row: y = w x.
template <typename T>
kernel void row_product(constant ProbeRowArgs& args [[buffer(0)]],
                        device const T* weights [[buffer(1)]],
                        device const float* x [[buffer(2)]],
                        device float* y [[buffer(3)]],
                        uint row [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]]) {
  float sum = 0.0f;
  device const T* w = weights + row * uint(args.cols);
  for (int i = int(lane); i < args.cols; i += 32) sum = fma(float(w[i]), x[i], sum);
  sum = lane_sum(sum);
  if (lane == 0) y[row] = sum;
}
EXPORT_KERNEL("probe_row_f32", row_product, float);
EXPORT_KERNEL("probe_row_f16", row_product, half);

// Reverses each run of one threadgroup through threadgroup memory.
kernel void probe_reverse(device const uint* in [[buffer(0)]],
                          device uint* out [[buffer(1)]],
                          threadgroup uint* scratch [[threadgroup(0)]],
                          uint i [[thread_position_in_threadgroup]],
                          uint n [[threads_per_threadgroup]],
                          uint group [[threadgroup_position_in_grid]]) {
  scratch[i] = in[group * n + i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[group * n + i] = scratch[n - 1u - i];
}

// No synchronisation: runs without fibers. out = exp(in) * table + bias.
kernel void probe_flat(device const float* in [[buffer(0)]],
                       device float* out [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
  float v = ds4_exp(in[i]) * kWeights[i & 3u] + float(kBias);
  out[i] = kNegate ? -v : v;
}

// Every thread adds to one counter; ballots and integer sums per simdgroup.
kernel void probe_votes(device const uint* in [[buffer(0)]],
                        device atomic_uint* counter [[buffer(1)]],
                        device uint4* out [[buffer(2)]],
                        uint i [[thread_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]]) {
  uint v = in[i];
  atomic_fetch_add_explicit(counter, v, memory_order_relaxed);
  uint odd = uint((simd_vote::vote_t)simd_ballot((v & 1u) != 0u));
  uint total = simd_sum(v);
  uint before = simd_prefix_exclusive_sum(v);
  uint first = simd_broadcast(v, 0);
  if (lane == 31u) out[i / 32u] = uint4(odd, total, before, first);
}
