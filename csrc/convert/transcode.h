// Official rows in, file rows out, spread over threads by rows.
#pragma once

#include <stdexcept>
#include <string>

#include "encode.h"
#include "sources.h"

namespace ds4::convert {

// A value that cannot be stored. `row` counts from the first row given.
struct ConvertFault : std::runtime_error {
  ConvertFault(std::size_t row_, std::size_t col_, const std::string& what)
      : std::runtime_error(what), row(row_), col(col_) {}
  std::size_t row;
  std::size_t col;
};

// Encodes all rows of `source` to `out` (rows * row_bytes(type, cols) bytes; null: only look for faults and count).
// Returns how many values the type F16 or BF16 changed (0 for the other types, which are not exact by nature, and F32).
// Throws ConvertFault for the first row, in row order, that holds NaN, infinity or a value that the type cannot hold.
// The result does not depend on n_threads.
std::size_t transcode(const SourceRows& source, RowType type, Q4kMode mode, std::uint8_t* out, int n_threads);

// Puts codes [rows, dim] (e4m3) and scales [rows, dim / 32] (e8m0) side by side: out [rows, dim + dim / 32].
// Throws ConvertFault for a NaN code or scale.
void pack_engram_rows(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t rows, std::size_t dim,
                      std::uint8_t* out, int n_threads);

}  // namespace ds4::convert
