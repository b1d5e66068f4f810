// Decoding of official checkpoint rows to f32, exactly (no rounding in any of the types).
#pragma once

#include "row_types.h"

namespace ds4::convert {

// `rows` consecutive rows of a matrix. For e4m3_block32 the first row must begin a 32-row block, and `scales` begin
// with that block.
struct SourceRows {
  SourceType type;
  const std::uint8_t* codes;
  const std::uint8_t* scales;  // null for types without scales
  std::size_t rows;
  std::size_t cols;
};

// Writes row `row` as `cols` f32 values. NaN codes and the NaN scale (255) decode to NaN; the caller looks for
// non-finite values.
void decode_row(const SourceRows& source, std::size_t row, float* out);

}  // namespace ds4::convert
