// index: queries of the block selector as fp4 codes, and their head weights. The host has both row products before it.
#include "compat.h"
#include "numerics.h"
#include "constants.h"
#include "rows.h"
#include "norm.h"
#include "index.h"

// 8 heads a threadgroup (x), a row (y). A simdgroup is a head, a lane an element of a group of 32; q comes rotated.
kernel void index_query(constant IndexParams& a [[buffer(0)]],
                        device const float* q [[buffer(1)]],      // [n][heads][dim]
                        device char* codes [[buffer(2)]],
                        device float* scales [[buffer(3)]],       // [n][heads][dim / 32]
                        device float* weights [[buffer(4)]],      // [n][heads], in place
                        uint2 group [[threadgroup_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  uint h = group.x * INDEX_HEADS + simdgroup, row = group.y * a.heads + h;
  if (h < a.heads) {
    ulong at = ulong(row) * a.dim;
    for (uint g = 0u; g < a.dim; g += 32u) {
      float v = q[at + g + lane];
      float s = ds4_scale_q4_index(lanes_amax(v));
      codes[at + g + lane] = char(ds4_e2m1_twice(ds4_e2m1_code(v * (1.0f / s))));
      if (lane == 0u) scales[(at + g) >> 5] = 0.25f * s;
    }
    if (lane == 0u) weights[row] = rounded(weights[row] * a.factor);
  }
}
