#include "cpu/half_table.h"

#include <cstdint>
#include <cstring>

namespace ds4::cpu {

namespace {

struct HalfTable {
  alignas(64) float v[65536];
  HalfTable() {
    for (uint32_t h = 0; h < 65536; ++h) {
      const uint32_t mag = h & 0x7fffu;
      uint32_t bits;
      if (mag >= 0x7c00u) {
        bits = (mag << 13) | 0x7f800000u | (mag > 0x7c00u ? 0x00400000u : 0u);  // a NaN comes out quiet, as from the hardware
      } else if (mag >= 0x0400u) {
        bits = (mag << 13) + (112u << 23);
      } else {
        const float small = static_cast<float>(mag) * 5.9604644775390625e-8f;  // 2^-24
        std::memcpy(&bits, &small, 4);
      }
      bits |= (h & 0x8000u) << 16;
      std::memcpy(&v[h], &bits, 4);
    }
  }
};

}  // namespace

const float* half_table() {
  static const HalfTable table;
  return table.v;
}

}  // namespace ds4::cpu
