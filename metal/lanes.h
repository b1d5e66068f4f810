// Values compared or added over the 32 lanes of a simdgroup; every lane gets the result.
#pragma once

// No rounding, so the order does not matter. Metal's own float maximum leaves NaN and the sign of zero open.
KERNEL_INLINE float lanes_max(float v) {
  v = ds4_max(v, simd_shuffle_xor(v, 1));
  v = ds4_max(v, simd_shuffle_xor(v, 2));
  v = ds4_max(v, simd_shuffle_xor(v, 4));
  v = ds4_max(v, simd_shuffle_xor(v, 8));
  return ds4_max(v, simd_shuffle_xor(v, 16));
}
