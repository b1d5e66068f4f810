// Q4_K: blocks of 256 values in eight groups of 32, value = (d * scale) * code - (dmin * min), with d and dmin in f16
// and scale and min in 6 bits. Four steps: fit each group alone, quantise the fits to 6 bits, try the neighbours of
// each 6-bit pair, then refit d and dmin by least squares. Each step is kept only where the squared error falls.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "encode.h"
#include "half.h"
#include "round.h"

// The two hot loops are compiled for each vector width and picked at load time; lanes are fixed, so the bits are the
// same.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define DS4_CONVERT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DS4_CONVERT_CLONES
#endif

namespace ds4::convert {
namespace {

constexpr int kGroup = 32;
constexpr int kGroups = 8;
constexpr int kLanes = 16;  // accumulators of a sum: fixed, so that vector width does not change the bits
constexpr float kLevels = 15.0f;

// Offsets to the 15 levels of the first guess that the search tries.
constexpr std::array<float, 5> kStretch = {-1.1f, -0.7f, -0.35f, 0.3f, 0.7f};

struct Fit {  // value = step * code - offset, both >= 0
  float step = 0.0f;
  float offset = 0.0f;
};

struct Sums {  // over one group
  float q = 0.0f, qq = 0.0f, qx = 0.0f;
};

struct Super {  // one block of 256 as it will be stored
  std::uint16_t d = 0, dmin = 0;
  std::array<std::uint8_t, kGroups> scale{}, min{};
};

// Adds the upper half to the lower half until one lane is left.
inline float fold(std::array<float, kLanes>& lanes) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

inline float code_of(float x, float inverse, float offset) {
  return std::min(kLevels, std::max(0.0f, nearest_integer((x + offset) * inverse)));
}

DS4_CONVERT_CLONES Sums code_sums(const float* x, float inverse, float offset) {
  std::array<float, kLanes> q{}, qq{}, qx{};
  for (int first = 0; first < kGroup; first += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = x[first + lane];
      const float code = code_of(value, inverse, offset);
      q[lane] += code;
      qq[lane] += code * code;
      qx[lane] += code * value;
    }
  }
  return {fold(q), fold(qq), fold(qx)};
}

// Squared error of a group when it is stored with this step and offset and each value takes its nearest code.
DS4_CONVERT_CLONES float fit_error(const float* x, Fit fit) {
  const float inverse = fit.step > 0.0f ? 1.0f / fit.step : 0.0f;
  std::array<float, kLanes> error{};
  for (int first = 0; first < kGroup; first += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = x[first + lane];
      const float miss = fit.step * code_of(value, inverse, fit.offset) - fit.offset - value;
      error[lane] += miss * miss;
    }
  }
  return fold(error);
}

// Least-squares step and offset for fixed codes, given their sums; the offset may not be negative.
Fit least_squares(const Sums& sums, float sum_x) {
  const double n = kGroup;
  const double q = sums.q, qq = sums.qq, qx = sums.qx, x = sum_x;
  const double determinant = n * qq - q * q;
  if (determinant <= 0.0) return {};
  double step = (n * qx - q * x) / determinant;
  double offset = (q * qx - qq * x) / determinant;
  if (offset < 0.0) {
    offset = 0.0;
    step = qq > 0.0 ? qx / qq : 0.0;
  }
  return {static_cast<float>(std::max(0.0, step)), static_cast<float>(offset)};
}

Fit fit_min_max(const float* x) {
  float low = 0.0f, high = x[0];
  for (int i = 0; i < kGroup; ++i) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  return {(high - low) / kLevels, -low};
}

// Squared error, less the constant sum of x * x, of fixed codes given by their sums. Double: terms cancel.
double sums_error(const Sums& sums, float sum_x, Fit fit) {
  const double step = fit.step, offset = fit.offset;
  return step * (step * sums.qq - 2.0 * sums.qx - 2.0 * offset * sums.q) + offset * (2.0 * sum_x + kGroup * offset);
}

Fit fit_search(const float* x) {
  const Fit plain = fit_min_max(x);
  if (plain.step <= 0.0f) return plain;
  const float range = plain.step * kLevels;
  float sum_x = 0.0f;
  for (int i = 0; i < kGroup; ++i) sum_x += x[i];
  Fit best = plain;
  double best_error = std::numeric_limits<double>::infinity();
  const auto consider = [&](float inverse, float offset) {
    const Sums sums = code_sums(x, inverse, offset);
    const Fit fit = least_squares(sums, sum_x);
    const double error = sums_error(sums, sum_x, fit);
    if (fit.step > 0.0f && error < best_error) {
      best_error = error;
      best = fit;
    }
  };
  for (const float stretch : kStretch) consider((kLevels + stretch) / range, plain.offset);
  consider(1.0f / best.step, best.offset);
  return fit_error(x, best) < fit_error(x, plain) ? best : plain;
}

Fit stored_fit(const Super& super, int group) {
  return {f32_from_f16(super.d) * static_cast<float>(super.scale[group]),
          f32_from_f16(super.dmin) * static_cast<float>(super.min[group])};
}

std::uint8_t six_bits(float value, float unit) {
  if (unit <= 0.0f) return 0;
  return static_cast<std::uint8_t>(std::min(63.0f, std::max(0.0f, nearest_integer(value / unit))));
}

Super quantise_fits(const std::array<Fit, kGroups>& fits) {
  float largest_step = 0.0f, largest_offset = 0.0f;
  for (const Fit& fit : fits) {
    largest_step = std::max(largest_step, fit.step);
    largest_offset = std::max(largest_offset, fit.offset);
  }
  Super super;
  super.d = f16_from_f32(largest_step / 63.0f);
  super.dmin = f16_from_f32(largest_offset / 63.0f);
  for (int group = 0; group < kGroups; ++group) {
    super.scale[group] = six_bits(fits[group].step, f32_from_f16(super.d));
    super.min[group] = six_bits(fits[group].offset, f32_from_f16(super.dmin));
  }
  return super;
}

float super_error(const float* x, const Super& super) {
  float error = 0.0f;
  for (int group = 0; group < kGroups; ++group) error += fit_error(x + group * kGroup, stored_fit(super, group));
  return error;
}

// Tries the 6-bit neighbours of one group's scale and min.
void try_neighbours(const float* x, Super& super, int group) {
  const float* values = x + group * kGroup;
  const int scale = super.scale[group], min = super.min[group];
  float best = fit_error(values, stored_fit(super, group));
  Super trial = super;
  for (int ds = -1; ds <= 1; ++ds) {
    for (int dm = -1; dm <= 1; ++dm) {
      if ((ds == 0 && dm == 0) || scale + ds < 0 || scale + ds > 63 || min + dm < 0 || min + dm > 63) continue;
      trial.scale[group] = static_cast<std::uint8_t>(scale + ds);
      trial.min[group] = static_cast<std::uint8_t>(min + dm);
      const float error = fit_error(values, stored_fit(trial, group));
      if (error < best) {
        best = error;
        super.scale[group] = trial.scale[group];
        super.min[group] = trial.min[group];
      }
    }
  }
}

// d and dmin by least squares over the whole block, codes, scales and mins held.
Super refit(const float* x, const Super& super) {
  double aa = 0.0, ab = 0.0, bb = 0.0, ax = 0.0, bx = 0.0;
  for (int group = 0; group < kGroups; ++group) {
    const Fit fit = stored_fit(super, group);
    const float* values = x + group * kGroup;
    const Sums sums = code_sums(values, fit.step > 0.0f ? 1.0f / fit.step : 0.0f, fit.offset);
    float sum_x = 0.0f;
    for (int i = 0; i < kGroup; ++i) sum_x += values[i];
    const double scale = super.scale[group], min = super.min[group];
    aa += scale * scale * static_cast<double>(sums.qq);
    ab += scale * min * static_cast<double>(sums.q);
    bb += min * min * static_cast<double>(kGroup);
    ax += scale * static_cast<double>(sums.qx);
    bx += min * static_cast<double>(sum_x);
  }
  Super result = super;
  const double determinant = aa * bb - ab * ab;
  if (determinant > 1e-9 * aa * bb && bb > 0.0) {
    const double d = (ax * bb - bx * ab) / determinant;
    const double dmin = (ax * ab - bx * aa) / determinant;
    if (d >= 0.0 && dmin >= 0.0) {
      result.d = f16_from_f32(static_cast<float>(d));
      result.dmin = f16_from_f32(static_cast<float>(dmin));
    }
  } else if (bb == 0.0 && aa > 0.0 && ax > 0.0) {
    result.d = f16_from_f32(static_cast<float>(ax / aa));
  }
  return result;
}

bool fits_f16(const Super& super) { return (super.d & 0x7fffu) < 0x7c00u && (super.dmin & 0x7fffu) < 0x7c00u; }

Super encode_block(const float* x, Q4kMode mode) {
  std::array<Fit, kGroups> plain{};
  for (int group = 0; group < kGroups; ++group) plain[group] = fit_min_max(x + group * kGroup);
  const Super base = quantise_fits(plain);
  if (mode == Q4kMode::min_max || !fits_f16(base)) return base;
  std::array<Fit, kGroups> searched{};
  for (int group = 0; group < kGroups; ++group) searched[group] = fit_search(x + group * kGroup);
  Super best = quantise_fits(searched);
  for (int group = 0; group < kGroups; ++group) try_neighbours(x, best, group);
  float best_error = super_error(x, best);
  const Super refitted = refit(x, best);
  if (fits_f16(refitted)) {
    const float error = super_error(x, refitted);
    if (error < best_error) {
      best = refitted;
      best_error = error;
    }
  }
  return super_error(x, base) < best_error ? base : best;
}

void store_block(const float* x, const Super& super, std::uint8_t* out) {
  std::memcpy(out, &super.d, 2);
  std::memcpy(out + 2, &super.dmin, 2);
  std::uint8_t* packed = out + 4;
  for (int group = 0; group < 4; ++group) {
    const unsigned high_scale = super.scale[group + 4], high_min = super.min[group + 4];
    packed[group] = static_cast<std::uint8_t>(super.scale[group] | (high_scale >> 4 << 6));
    packed[group + 4] = static_cast<std::uint8_t>(super.min[group] | (high_min >> 4 << 6));
    packed[group + 8] = static_cast<std::uint8_t>((high_scale & 15u) | ((high_min & 15u) << 4));
  }
  std::uint8_t* codes = out + 16;
  std::memset(codes, 0, 128);
  for (int group = 0; group < kGroups; ++group) {
    const Fit fit = stored_fit(super, group);
    const float inverse = fit.step > 0.0f ? 1.0f / fit.step : 0.0f;
    const int shift = (group & 1) * 4;
    std::uint8_t* bytes = codes + group / 2 * 32;
    for (int i = 0; i < kGroup; ++i) {
      const float code = code_of(x[group * kGroup + i], inverse, fit.offset);
      bytes[i] = static_cast<std::uint8_t>(bytes[i] | (static_cast<unsigned>(code) << shift));
    }
  }
}

}  // namespace

bool encode_q4_k(const float* row, std::size_t cols, Q4kMode mode, std::uint8_t* out) {
  for (std::size_t first = 0; first < cols; first += 256, out += 144) {
    const Super super = encode_block(row + first, mode);
    if (!fits_f16(super)) return false;
    store_block(row + first, super, out);
  }
  return true;
}

}  // namespace ds4::convert
