// The row types that a converted file can hold, and the source types that an official checkpoint can hold.
//
// A row is the innermost dimension of a matrix; every type stores a row as whole blocks of consecutive values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace ds4::convert {

// Types written. Block layouts (little endian):
//   q8_0  34 bytes for 32 values: f16 scale d, 32 signed codes; value = d * code
//   q4_k  144 bytes for 256 values: f16 d, f16 dmin, 12 bytes of eight 6-bit scales and eight 6-bit mins, 128 bytes of
//         4-bit codes; value = d * scale * code - dmin * min
//   mxfp4 17 bytes for 32 values: e8m0 scale, 16 bytes of e2m1 codes (byte i: value i low, value i + 16 high)
enum class RowType { q8_0, q4_k, mxfp4, f16, bf16, f32 };

// Types read. Scales are e8m0 bytes, value 2^(byte - 127).
//   e4m3_block32  one code a value, one scale for each 32x32 block (edges may be ragged)
//   fp4_row32     two e2m1 codes a byte (lower index low), one scale for 32 values of a row
enum class SourceType { f32, f16, bf16, e4m3_block32, fp4_row32 };

struct BlockShape {
  std::size_t values;  // values in one block
  std::size_t bytes;   // bytes of one block
};

constexpr BlockShape block_shape(RowType type) {
  switch (type) {
    case RowType::q8_0:
      return {32, 34};
    case RowType::q4_k:
      return {256, 144};
    case RowType::mxfp4:
      return {32, 17};
    case RowType::f16:
      return {1, 2};
    case RowType::bf16:
      return {1, 2};
    case RowType::f32:
      return {1, 4};
  }
  return {1, 0};
}

// Bytes of a row of `cols` values; the caller checks that cols is a multiple of the block.
constexpr std::size_t row_bytes(RowType type, std::size_t cols) {
  const BlockShape block = block_shape(type);
  return cols / block.values * block.bytes;
}

constexpr std::size_t source_row_bytes(SourceType type, std::size_t cols) {
  switch (type) {
    case SourceType::f32:
      return 4 * cols;
    case SourceType::f16:
      return 2 * cols;
    case SourceType::bf16:
      return 2 * cols;
    case SourceType::e4m3_block32:
      return cols;
    case SourceType::fp4_row32:
      return cols / 2;
  }
  return 0;
}

// Bytes of all scales that belong to `rows` rows.
constexpr std::size_t source_scale_bytes(SourceType type, std::size_t rows, std::size_t cols) {
  switch (type) {
    case SourceType::e4m3_block32:
      return (rows + 31) / 32 * ((cols + 31) / 32);
    case SourceType::fp4_row32:
      return rows * (cols / 32);
    default:
      return 0;
  }
}

inline std::optional<RowType> row_type_of(std::string_view name) {
  if (name == "Q8_0") return RowType::q8_0;
  if (name == "Q4_K") return RowType::q4_k;
  if (name == "MXFP4") return RowType::mxfp4;
  if (name == "F16") return RowType::f16;
  if (name == "BF16") return RowType::bf16;
  if (name == "F32") return RowType::f32;
  return std::nullopt;
}

inline std::optional<SourceType> source_type_of(std::string_view name) {
  if (name == "F32") return SourceType::f32;
  if (name == "F16") return SourceType::f16;
  if (name == "BF16") return SourceType::bf16;
  if (name == "F8_E4M3") return SourceType::e4m3_block32;
  if (name == "I8") return SourceType::fp4_row32;
  return std::nullopt;
}

}  // namespace ds4::convert
