#include "encode.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "half.h"
#include "round.h"

namespace ds4::convert {
namespace {

constexpr std::size_t kBlock = 32;

float largest_magnitude(const float* x) {
  float largest = 0.0f;
  for (std::size_t i = 0; i < kBlock; ++i) largest = std::max(largest, std::fabs(x[i]));
  return largest;
}

// Nearest e2m1 code of a magnitude in units of the scale; ties to the even code. The thresholds are the midpoints.
std::uint8_t nearest_fp4(double magnitude) {
  if (magnitude <= 0.25) return 0;
  if (magnitude < 0.75) return 1;
  if (magnitude <= 1.25) return 2;
  if (magnitude < 1.75) return 3;
  if (magnitude <= 2.5) return 4;
  if (magnitude < 3.5) return 5;
  return magnitude <= 5.0 ? 6 : 7;
}

constexpr std::array<double, 8> kFp4Magnitude = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};

// Codes a block with scale 2^(scale - 127); returns the squared error in units of the scale.
double code_mxfp4(const float* x, int scale, std::array<std::uint8_t, kBlock>& codes) {
  const double inverse = std::ldexp(1.0, 127 - scale);
  double error = 0.0;
  for (std::size_t i = 0; i < kBlock; ++i) {
    const double unit = static_cast<double>(std::fabs(x[i])) * inverse;
    const std::uint8_t code = nearest_fp4(unit);
    const double miss = unit - kFp4Magnitude[code];
    error += miss * miss;
    codes[i] = static_cast<std::uint8_t>(code | (std::signbit(x[i]) ? 8u : 0u));
  }
  return error;
}

}  // namespace

bool encode_q8_0(const float* row, std::size_t cols, std::uint8_t* out) {
  for (std::size_t first = 0; first < cols; first += kBlock, out += 34) {
    const float* x = row + first;
    const float largest = largest_magnitude(x);
    std::uint16_t code = f16_from_f32(largest / 127.0f);
    // A scale that was rounded down may leave the largest value outside: take the next one.
    if (largest > 127.5f * f32_from_f16(code)) ++code;
    const float d = f32_from_f16(code);
    if (!std::isfinite(d)) return false;
    std::memcpy(out, &code, 2);
    for (std::size_t i = 0; i < kBlock; ++i) {
      const float q = d == 0.0f ? 0.0f : nearest_integer(x[i] / d);
      out[2 + i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(std::clamp(q, -127.0f, 127.0f)));
    }
  }
  return true;
}

bool encode_mxfp4(const float* row, std::size_t cols, std::uint8_t* out) {
  std::array<std::uint8_t, kBlock> codes{};
  std::array<std::uint8_t, kBlock> other{};
  for (std::size_t first = 0; first < cols; first += kBlock, out += 17) {
    const float* x = row + first;
    const float largest = largest_magnitude(x);
    int scale = 0;
    if (largest > 0.0f) {
      // largest / 2^(scale - 127) lies in [4, 8): above 6 it would be clipped, so the next scale competes.
      scale = std::clamp(std::ilogb(largest) - 2 + 127, 0, 254);
    }
    double error = code_mxfp4(x, scale, codes);
    if (error > 0.0 && scale < 254) {
      const double other_error = 4.0 * code_mxfp4(x, scale + 1, other);
      if (other_error < error) {
        ++scale;
        codes = other;
      }
    }
    out[0] = static_cast<std::uint8_t>(scale);
    for (std::size_t i = 0; i < 16; ++i) out[1 + i] = static_cast<std::uint8_t>(codes[i] | (codes[i + 16] << 4));
  }
  return true;
}

bool encode_f16(const float* row, std::size_t cols, std::uint8_t* out, std::size_t& n_inexact) {
  for (std::size_t i = 0; i < cols; ++i) {
    const std::uint16_t code = f16_from_f32(row[i]);
    if ((code & 0x7fffu) >= 0x7c00u) return false;
    if (f32_from_f16(code) != row[i]) ++n_inexact;
    if (out != nullptr) std::memcpy(out + 2 * i, &code, 2);
  }
  return true;
}

bool encode_bf16(const float* row, std::size_t cols, std::uint8_t* out, std::size_t& n_inexact) {
  for (std::size_t i = 0; i < cols; ++i) {
    const std::uint16_t code = bf16_from_f32(row[i]);
    if ((code & 0x7fffu) >= 0x7f80u) return false;
    if (f32_from_bf16(code) != row[i]) ++n_inexact;
    if (out != nullptr) std::memcpy(out + 2 * i, &code, 2);
  }
  return true;
}

}  // namespace ds4::convert
