#include "engine/rope.h"

#include <cmath>

namespace ds4 {

void sin_cos(float x, float* sin, float* cos) {
  const double a = static_cast<double>(x);
  const double k = std::nearbyint(a * 0.63661977236758134308);
  // pi/2 in three parts of 33 bits: k * part is exact for |k| < 2^20, and the rest is small.
  double r = std::fma(-k, 1.57079632673412561417e+00, a);
  r = std::fma(-k, 6.07710050630396597660e-11, r);
  r = std::fma(-k, 2.02226624879595063154e-21, r);
  const double z = r * r;
  double s = 2.8114572543455206e-15;  // Taylor to r^17 and r^16: below 1e-17 on |r| <= pi/4
  s = std::fma(s, z, -7.6471637318198164e-13);
  s = std::fma(s, z, 1.6059043836821613e-10);
  s = std::fma(s, z, -2.5052108385441720e-08);
  s = std::fma(s, z, 2.7557319223985893e-06);
  s = std::fma(s, z, -1.9841269841269841e-04);
  s = std::fma(s, z, 8.3333333333333332e-03);
  s = std::fma(s, z, -1.6666666666666666e-01);
  s = std::fma(s * z, r, r);
  double c = 4.7794773323873853e-14;
  c = std::fma(c, z, -1.1470745597729725e-11);
  c = std::fma(c, z, 2.0876756987868099e-09);
  c = std::fma(c, z, -2.7557319223985888e-07);
  c = std::fma(c, z, 2.4801587301587302e-05);
  c = std::fma(c, z, -1.3888888888888889e-03);
  c = std::fma(c, z, 4.1666666666666664e-02);
  c = std::fma(c, z, -0.5);
  c = std::fma(c, z, 1.0);
  const int64_t q = static_cast<int64_t>(k) & 3;
  const double sq = (q & 1) != 0 ? c : s, cq = (q & 1) != 0 ? s : c;
  *sin = static_cast<float>((q & 2) != 0 ? -sq : sq);
  *cos = static_cast<float>(q == 1 || q == 2 ? -cq : cq);
}

std::vector<float> rope_frequencies(const Shape& shape, bool yarn) {
  const int dim = shape.rope_dim;
  const double base = yarn ? shape.compress_rope_base : shape.rope_base;
  std::vector<float> f(static_cast<size_t>(dim / 2));
  for (int i = 0; i < dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(dim);
    f[i] = 1.0f / static_cast<float>(std::pow(base, static_cast<double>(exponent)));
  }
  if (!yarn) return f;
  const double pi = 3.14159265358979323846;
  const auto dimension = [&](double rotations) {
    return dim * std::log(shape.yarn_original / (rotations * 2.0 * pi)) / (2.0 * std::log(base));
  };
  const double low = std::fmax(std::floor(dimension(shape.yarn_beta_fast)), 0.0);
  const double high = std::fmin(std::ceil(dimension(shape.yarn_beta_slow)), dim - 1.0);
  const float width = static_cast<float>(std::fmax(high - low, 0.001));
  for (int i = 0; i < dim / 2; ++i) {
    float ramp = (static_cast<float>(i) - static_cast<float>(low)) / width;
    ramp = ramp < 0.f ? 0.f : (ramp > 1.f ? 1.f : ramp);
    const float stretched = f[i] / static_cast<float>(shape.yarn_factor) * ramp;
    const float plain = f[i] * (1.0f - ramp);
    f[i] = stretched + plain;
  }
  return f;
}

void fill_rope(const std::vector<float>& frequencies, int64_t first, int n, float* cos, float* sin) {
  const size_t half = frequencies.size();
  for (int i = 0; i < n; ++i) {
    const float position = static_cast<float>(first + i);
    for (size_t k = 0; k < half; ++k) sin_cos(position * frequencies[k], sin + i * half + k, cos + i * half + k);
  }
}

}  // namespace ds4
