// Products of rows of 64 elements, which the kernels for longer rows leave alone: heads of small models, low ranks. Every
// accumulator takes one element, so most of the work is the sum over the accumulators, and four rows share that.
#pragma once

#include "cpu/row_tiles.h"

DS4_CPU_NAMESPACE_BEGIN

// x: n activation rows. False where nothing is gained: then nothing was written.
template <class Make>
DS4_INLINE bool short_rows(const Make& make, int r0, int nr, XRows x, int n, int k, float* out, int64_t ldo) {
#if defined(DS4_ISA_AVX512)
  if (k != kLanes || n > kFewRows) return false;
  for (int r = 0; r < nr; r += 4) {
    const int m = nr - r < 4 ? nr - r : 4;
    V w[4][kGroups];
    for (int j = 0; j < 4; ++j) {
      const auto row = make(r0 + r + (j < m ? j : 0));
      for (int g = 0; g < kGroups; ++g) w[j][g] = row.get(g * kW);
    }
    for (int i = 0; i < n; ++i) {
      alignas(64) float sums[4][kLanes];
      for (int g = 0; g < kGroups; ++g) {
        const V xv = v_load(x.row(i) + g * kW);
        for (int j = 0; j < 4; ++j) v_store(sums[j] + g * kW, v_fma(w[j][g], xv, v_zero()));
      }
      float total[4];
      pairwise_tree4<1>(sums[0], kLanes, total);
      for (int j = 0; j < m; ++j) out[i * ldo + r + j] = total[j];
    }
  }
  return true;
#else
  (void)make, (void)r0, (void)nr, (void)x, (void)n, (void)k, (void)out, (void)ldo;
  return false;
#endif
}

DS4_CPU_NAMESPACE_END
