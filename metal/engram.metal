// engram: rows from the table, then (after the projection, which is the host's) the gated add to every stream.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "packed_rows.h"
#include "engram.h"

// A simdgroup a group of 32 elements, 8 a threadgroup. The scale of a group stands behind the codes of its row.
kernel void engram_unpack(
    constant EngramParams& a [[buffer(0)]],
    device const uchar* rows [[buffer(1)]],  // [n][columns][row_bytes]
    device float* x [[buffer(2)]],           // [n][columns][dim]
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint g = group * 8 + simdgroup;
  if (g < a.groups) {
    const uint per_row = a.dim / 32, k = (g % per_row) * 32 + lane;
    device const uchar* row = rows + (ulong)(g / per_row) * a.row_bytes;
    float v = e4m3_256th(row[k]) * scale_256(row[a.dim + k / 32]);
    if (fc_quant != 0) v = quantised(v);
    x[ulong(g) * 32 + lane] = v;
  }
}

// The 64 accumulators (2 a lane) of one segment of three products: h w key, h h, key key.
struct GateSums {
  float2 dot, h, key;
};

KERNEL_INLINE GateSums gate_segment(device const float* h, device const float* key, device const float* qw, device const float* kw,
                             uint begin, uint end, uint lane) {
  GateSums s;
  s.dot = s.h = s.key = float2(0.0f, 0.0f);
  for (uint k = begin + 2 * lane; k < end; k += 64) {
    const float hx = h[k], kx = key[k];
    s.dot.x = fma(hx * (qw[k] * kw[k]), kx, s.dot.x);
    s.h.x = fma(hx, hx, s.h.x);
    s.key.x = fma(kx, kx, s.key.x);
    if (k + 1 < end) {
      const float hy = h[k + 1], ky = key[k + 1];
      s.dot.y = fma(hy * (qw[k + 1] * kw[k + 1]), ky, s.dot.y);
      s.h.y = fma(hy, hy, s.h.y);
      s.key.y = fma(ky, ky, s.key.y);
    }
  }
  return s;
}

// A threadgroup a stream (x) and row (y): R10. Simdgroups share the segments of 2,048; their accumulators are then added
// segment by segment. Threadgroup memory: 6 x 32 floats a segment, and 1.
kernel void engram_gate(
    constant EngramParams& a [[buffer(0)]],
    device const float* projected [[buffer(1)]],  // [n][streams + 1][hidden]: keys, then the value
    device const float* q_weight [[buffer(2)]],   // [streams][hidden]
    device const float* k_weight [[buffer(3)]],
    device float* stream [[buffer(4)]],           // [n][streams][hidden], in place
    threadgroup float* shared [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint d = a.hidden, j = group.x, i = group.y, segments = (d + 2047) / 2048;
  device float* h = stream + (i * a.streams + j) * d;
  device const float* key = projected + (i * (a.streams + 1) + j) * d;
  device const float* value = projected + (i * (a.streams + 1) + a.streams) * d;
  for (uint s = simdgroup; s < segments; s += threads / 32) {
    const GateSums sums = gate_segment(h, key, q_weight + j * d, k_weight + j * d, s * 2048, min(d, (s + 1) * 2048), lane);
    threadgroup float* to = shared + s * 192 + lane;
    to[0] = sums.dot.x;
    to[32] = sums.dot.y;
    to[64] = sums.h.x;
    to[96] = sums.h.y;
    to[128] = sums.key.x;
    to[160] = sums.key.y;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);  // the stream was read; below it is written
  if (simdgroup == 0) {
    float total[6];
    for (uint r = 0; r < 6; ++r) total[r] = shared[r * 32 + lane];
    for (uint s = 1; s < segments; ++s)
      for (uint r = 0; r < 6; ++r) total[r] = total[r] + shared[s * 192 + r * 32 + lane];
    float dot = tree64(float2(total[0], total[1]));
    dot = dot * ds4_rsqrt(tree64(float2(total[2], total[3])) / float(d) + a.eps);
    dot = dot * ds4_rsqrt(tree64(float2(total[4], total[5])) / float(d) + a.eps);
    dot = dot * a.inverse_root;
    const float root = DS4_SQRT(ds4_max(fabs(dot), 1e-6f));
    if (lane == 0) shared[segments * 192] = ds4_sigmoid(as_type<float>(as_type<uint>(root) | (as_type<uint>(dot) & 0x80000000u)));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float g = shared[segments * 192];
  for (uint k = tid; k < d; k += threads) h[k] = rounded(fma(g, value[k], h[k]));
}
