// Values compared or added over the lanes of a simdgroup.
#pragma once

// Every lane gets the result. No rounding, so the order does not matter. Metal's own float maximum leaves NaN and the sign of zero open.
KERNEL_INLINE float lanes_max(float v) {
  v = ds4_max(v, simd_shuffle_xor(v, 1));
  v = ds4_max(v, simd_shuffle_xor(v, 2));
  v = ds4_max(v, simd_shuffle_xor(v, 4));
  v = ds4_max(v, simd_shuffle_xor(v, 8));
  return ds4_max(v, simd_shuffle_xor(v, 16));
}

// One step of sums of 2 V numbers over the lanes of which each lane keeps V: the lane's half, plus its partner's.
KERNEL_INLINE float halved(float low, float high, bool upper, ushort step) {
  const float other = simd_shuffle_xor(upper ? low : high, step);
  return (upper ? high : low) + other;
}
