// embed: one threadgroup for a token; a thread decodes pairs of elements and writes them to every stream.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "embed.h"

template <class D>
KERNEL_INLINE void embed_row(constant EmbedParams& a, RowSource m, uint token, device float* stream, uint tid) {
  D w;
  open_row(w, m, token);
  for (uint i = 2u * tid; i < a.hidden; i += 2u * uint(EMBED_THREADS)) {
    bool pair = i + 1u < a.hidden;
    float2 v = float2(0.0f);
    if (pair) v = w.get(i);
    else v.x = w.at(i);
    for (uint c = 0u; c < a.streams; ++c) {
      stream[c * a.hidden + i] = rounded(v.x);
      if (pair) stream[c * a.hidden + i + 1u] = rounded(v.y);
    }
  }
}

kernel void embed(constant EmbedParams& a [[buffer(0)]], device const uchar* data [[buffer(1)]], device const uchar* scale [[buffer(2)]],
                  device const int* tokens [[buffer(3)]], device float* stream [[buffer(4)]], device float* mix [[buffer(5)]],
                  uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]]) {
  RowSource m = {data, scale, a.row_bytes, a.scale_row_bytes};
  device float* out = stream + ulong(group.x) * a.streams * a.hidden;
  uint token = uint(tokens[group.x]);
#define DS4_EMBED(D) embed_row<D>(a, m, token, out, tid)
  DS4_WITH_ROW_TYPE(fc_type, DS4_EMBED);
#undef DS4_EMBED
  if (tid < a.streams) mix[group.x * a.streams + tid] = tid == 0u ? 1.0f : 0.0f;
}
