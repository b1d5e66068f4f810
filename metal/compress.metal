// compress: the latent of a finished group of tokens, its index key and its packed compressed row.
// Between these kernels the host has the row products: wkv and wgate before compress_pool, index_k before compress_pack.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "packed_rows.h"
#include "compress.h"

// Ratio 2: per channel softmax of the gates over the two tokens, weighted sum of the values (R9).
KERNEL_INLINE float pooled(float v0, float g0, float v1, float g1) {
  float top = ds4_max(g0, g1);
  float e0 = ds4_exp(g0 - top), e1 = ds4_exp(g1 - top);
  float sum = e0 + e1;
  return rounded(fma(v1, e1 / sum, v0 * (e0 / sum)));
}

// A threadgroup an entry: pooled (ratio 2) and normed latent. Threadgroup memory: head_dim + norm_scratch(head_dim) floats.
kernel void compress_pool(constant CompressParams& a [[buffer(0)]],
                          device const float* values [[buffer(1)]],   // [n][head_dim]
                          device const float* gates [[buffer(2)]],    // the same, ratio 2
                          device const float* pending [[buffer(3)]],  // ring of a row's values and gates
                          device const float* norm [[buffer(4)]],
                          device float* latent [[buffer(5)]],         // [entries][head_dim]
                          threadgroup float* x [[threadgroup(0)]],
                          uint entry [[threadgroup_position_in_grid]],
                          uint tid [[thread_index_in_threadgroup]]) {
  uint hd = a.head_dim;
  if (a.ratio == 2u) {
    uint p0 = (a.first_entry + entry) * 2u;  // position of the group's first token
    device const float* v1 = values + ulong(p0 + 1u - a.position) * hd;
    device const float* g1 = gates + ulong(p0 + 1u - a.position) * hd;
    device const float* v0 = v1 - hd;
    device const float* g0 = g1 - hd;
    if (p0 < a.position) {
      v0 = pending + (p0 % a.capacity) * 2u * hd;
      g0 = v0 + hd;
    }
    for (uint k = tid; k < hd; k += COMPRESS_THREADS) x[k] = pooled(v0[k], g0[k], v1[k], g1[k]);
  } else {
    for (uint k = tid; k < hd; k += COMPRESS_THREADS) x[k] = values[ulong(entry) * hd + k];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  norm_row(x, norm, hd, a.eps, x + hd, tid, COMPRESS_THREADS);
  for (uint k = tid; k < hd; k += COMPRESS_THREADS) latent[ulong(entry) * hd + k] = x[k];
}

// A threadgroup a row: recent unpooled rows, so that a group may close in a later call or after a short truncation.
kernel void compress_keep(constant CompressParams& a [[buffer(0)]],
                          device const float* values [[buffer(1)]],
                          device const float* gates [[buffer(2)]],
                          device float* pending [[buffer(3)]],
                          uint group [[threadgroup_position_in_grid]],
                          uint tid [[thread_index_in_threadgroup]]) {
  uint i = a.n - a.keep + group, hd = a.head_dim;
  device float* to = pending + ((a.position + i) % a.capacity) * 2u * hd;
  for (uint k = tid; k < hd; k += COMPRESS_THREADS) {
    to[k] = values[ulong(i) * hd + k];
    to[hd + k] = gates[ulong(i) * hd + k];
  }
}

// A threadgroup an entry: the key is normed, rotated and packed, the latent rotated and packed.
// Threadgroup memory: index_dim + norm_scratch(index_dim) + head_dim floats.
kernel void compress_pack(constant CompressParams& a [[buffer(0)]],
                          device const float* latent [[buffer(1)]],  // [entries][head_dim]
                          device const float* key [[buffer(2)]],     // [entries][index_dim]
                          device const float* key_norm [[buffer(3)]],
                          device const float* cosines [[buffer(4)]],
                          device const float* sines [[buffer(5)]],
                          device uchar* rows [[buffer(6)]],
                          device uchar* index_rows [[buffer(7)]],
                          threadgroup float* k [[threadgroup(0)]],
                          uint entry [[threadgroup_position_in_grid]],
                          uint tid [[thread_index_in_threadgroup]]) {
  uint j = a.first_entry + entry, at = (j * a.ratio - a.first_rope) * (a.rope_dim / 2u);
  uint dim = a.index_dim, hd = a.head_dim;
  threadgroup float* scratch = k + dim;
  threadgroup float* x = scratch + norm_scratch(dim);
  for (uint i = tid; i < dim; i += COMPRESS_THREADS) k[i] = key[ulong(entry) * dim + i];
  for (uint i = tid; i < hd; i += COMPRESS_THREADS) x[i] = latent[ulong(entry) * hd + i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  norm_row(k, key_norm, dim, a.eps, scratch, tid, COMPRESS_THREADS);
  rotate_tail(k, dim, a.rope_dim, cosines + at, sines + at, 1.0f, tid, COMPRESS_THREADS);
  rotate_tail(x, hd, a.rope_dim, cosines + at, sines + at, 1.0f, tid, COMPRESS_THREADS);
  pack_index_row(k, dim, index_rows + ulong(j) * a.index_row_bytes, tid, COMPRESS_THREADS);
  pack_compressed_row(x, hd, rows + ulong(j) * a.row_bytes, tid, COMPRESS_THREADS);
}
