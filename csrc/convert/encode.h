// Encoders from finite f32 rows to file rows. Pure functions of the row: the same bits for any number of threads and on
// every machine.
#pragma once

#include "row_types.h"

namespace ds4::convert {

enum class Q4kMode {
  search,   // scales and mins searched for the smallest squared error
  min_max,  // scale and min from the smallest and largest value of each 32: the yardstick for the search
};

// Each encoder takes `cols` finite values (a multiple of the type's block) and writes row_bytes(type, cols) bytes.
// They return false when a block's scale does not fit in f16 (values beyond about 8e6); nothing is clipped silently.

// |error| <= d / 2 for each value, d the stored scale (largest value / 127, rounded to f16 so that the largest value
// fits).
bool encode_q8_0(const float* row, std::size_t cols, std::uint8_t* out);

// The search never has a larger squared error than min_max for a block (min_max is one of its candidates). Measured RMS
// error relative to the values, search / min_max: normal values 0.0706 / 0.0786, trained fp4 weights 0.0501 / 0.0883.
bool encode_q4_k(const float* row, std::size_t cols, Q4kMode mode, std::uint8_t* out);

// Of the two scales that can hold the largest value the one with the smaller squared error. Exact when the block came
// from e2m1 codes with one e8m0 scale.
bool encode_mxfp4(const float* row, std::size_t cols, std::uint8_t* out);

// Counts the values that change in the rounding (0: the row is stored exactly). `out` may be null to count only.
// f16 returns false when a value overflows.
bool encode_f16(const float* row, std::size_t cols, std::uint8_t* out, std::size_t& n_inexact);
bool encode_bf16(const float* row, std::size_t cols, std::uint8_t* out, std::size_t& n_inexact);

}  // namespace ds4::convert
