// head: one threadgroup for a token's collapsed and normed row.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "hc_row.h"
#include "head.h"

// Threadgroup memory: hidden floats, then scratch of sum_squares.
kernel void head_norm(constant HeadParams& a [[buffer(0)]], device const float* stream [[buffer(1)]], device const float* mix [[buffer(2)]],
                      device const float* norm [[buffer(3)]], device float* x [[buffer(4)]], threadgroup float* flat [[threadgroup(0)]],
                      uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]]) {
  uint i = group.x, c = a.streams, d = a.hidden, threads = uint(HEAD_THREADS);
  for (uint k = tid; k < d; k += threads) flat[k] = collapsed(stream + ulong(i) * c * d, mix + i * c, k, c, d);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float r = inverse_rms(flat, d, a.norm_eps, flat + d, tid, threads);
  for (uint k = tid; k < d; k += threads) x[ulong(i) * d + k] = rounded(norm[k] * (flat[k] * r));
}
