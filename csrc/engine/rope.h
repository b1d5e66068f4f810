// Rotary angles, made on the host by our own sine and cosine so that every machine has the same table.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/shape.h"

namespace ds4 {

// sin and cos of x (|x| < 2^26), each rounded to f32 from a double result that is good to about 1e-16.
void sin_cos(float x, float* sin, float* cos);

// One f32 frequency per pair. base^(2i/dim) is rounded to f32 before the division; with yarn the stretched and the
// plain frequency are mixed by a ramp between the two correction dimensions (docs/numerics.md, rotary position).
std::vector<float> rope_frequencies(const Shape& shape, bool yarn);

// cos, sin: [n][rope_dim / 2] for positions first .. first + n - 1. The product position * frequency is formed in f32.
void fill_rope(const std::vector<float>& frequencies, int64_t first, int n, float* cos, float* sin);

}  // namespace ds4
