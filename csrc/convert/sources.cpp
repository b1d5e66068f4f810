#include "sources.h"

#include <array>
#include <cstring>
#include <limits>

#include "half.h"

namespace ds4::convert {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::array<float, 256> make_e4m3_table() {
  std::array<float, 256> table{};
  for (unsigned code = 0; code < 256; ++code) {
    const unsigned exponent = (code >> 3) & 15u;
    const float mantissa = static_cast<float>(code & 7u);
    float value =
        exponent == 0 ? mantissa * 0x1p-9f : (8.0f + mantissa) * 0x1p-10f * static_cast<float>(1u << exponent);
    if ((code & 0x7fu) == 0x7fu) value = kNaN;
    table[code] = (code & 0x80u) ? -value : value;
  }
  return table;
}

const std::array<float, 256>& e4m3_table() {
  static const std::array<float, 256> table = make_e4m3_table();
  return table;
}

constexpr std::array<float, 16> kFp4 = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

float scale_value(std::uint8_t code) { return code == 255 ? kNaN : f32_from_e8m0(code); }

void decode_16bit(const std::uint8_t* codes, std::size_t cols, bool bf16, float* out) {
  for (std::size_t i = 0; i < cols; ++i) {
    std::uint16_t code;
    std::memcpy(&code, codes + 2 * i, 2);
    out[i] = bf16 ? f32_from_bf16(code) : f32_from_f16(code);
  }
}

void decode_e4m3(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t cols, float* out) {
  const auto& table = e4m3_table();
  for (std::size_t first = 0; first < cols; first += 32) {
    const float scale = scale_value(scales[first / 32]);
    const std::size_t last = first + 32 < cols ? first + 32 : cols;
    for (std::size_t i = first; i < last; ++i) out[i] = table[codes[i]] * scale;
  }
}

void decode_fp4(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t cols, float* out) {
  for (std::size_t first = 0; first < cols; first += 32) {
    const float scale = scale_value(scales[first / 32]);
    for (std::size_t i = first; i < first + 32; i += 2) {
      const std::uint8_t pair = codes[i / 2];
      out[i] = kFp4[pair & 15u] * scale;
      out[i + 1] = kFp4[pair >> 4] * scale;
    }
  }
}

}  // namespace

void decode_row(const SourceRows& source, std::size_t row, float* out) {
  const std::size_t cols = source.cols;
  const std::uint8_t* codes = source.codes + row * source_row_bytes(source.type, cols);
  switch (source.type) {
    case SourceType::f32:
      std::memcpy(out, codes, 4 * cols);
      return;
    case SourceType::f16:
      decode_16bit(codes, cols, false, out);
      return;
    case SourceType::bf16:
      decode_16bit(codes, cols, true, out);
      return;
    case SourceType::e4m3_block32:
      decode_e4m3(codes, source.scales + row / 32 * ((cols + 31) / 32), cols, out);
      return;
    case SourceType::fp4_row32:
      decode_fp4(codes, source.scales + row * (cols / 32), cols, out);
      return;
  }
}

}  // namespace ds4::convert
