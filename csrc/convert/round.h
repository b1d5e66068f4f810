// Rounding to the nearest integer without libm, in a form that compilers turn into vector code.
#pragma once

namespace ds4::convert {

// Nearest integer, ties to even, for |x| <= 2^22: adding 1.5 * 2^23 leaves no fraction bits. Larger values lose
// precision, which the callers' clamp hides.
inline float nearest_integer(float x) {
  constexpr float magic = 12582912.0f;
  return (x + magic) - magic;
}

}  // namespace ds4::convert
