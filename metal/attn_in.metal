// attn_in: one threadgroup for a token's query row (group.y 0) and one for its window row (group.y 1).
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "attn_in.h"

// Threadgroup memory: max(q_rank, head_dim) floats, then scratch of sum_squares for as many.
kernel void attn_in(constant AttnInParams& a [[buffer(0)]], device float* qr [[buffer(1)]], device const float* kv [[buffer(2)]],
                    device const float* q_norm [[buffer(3)]], device const float* kv_norm [[buffer(4)]],
                    device const float* cosines [[buffer(5)]], device const float* sines [[buffer(6)]], device uchar* window [[buffer(7)]],
                    threadgroup float* row [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                    uint tid [[thread_index_in_threadgroup]]) {
  uint i = group.x, threads = uint(ATTN_IN_THREADS);
  bool query = group.y == 0u;
  uint width = query ? a.q_rank : a.head_dim;
  threadgroup float* scratch = row + max(a.q_rank, a.head_dim);
  for (uint k = tid; k < width; k += threads) row[k] = query ? qr[ulong(i) * width + k] : kv[ulong(i) * width + k];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  norm_row(row, query ? q_norm : kv_norm, width, a.norm_eps, scratch, tid, threads);
  if (query) {
    for (uint g = tid >> 5; 32u * g < width; g += threads >> 5) {
      uint k = 32u * g + (tid & 31u);
      float v = k < width ? row[k] : 0.0f;
      if (fc_quant != 0) v = quantised(v);
      if (k < width) qr[ulong(i) * width + k] = v;
    }
    return;
  }
  uint angles = i * (a.rope_dim / 2u);
  rotate_tail(row, width, a.rope_dim, cosines + angles, sines + angles, 1.0f, tid, threads);
  ulong place = (a.position + i) % a.window_capacity;
  pack_window_row(row, width, window + place * a.window_row_bytes, tid, threads);
}
