#include "convert/synth.h"

#include <string>

#include "base/error.h"

namespace ds4 {

void check_units(const SynthUnits& u, int64_t table_words) {
  const bool values = u.kind == SYNTH_VALUES;
  const int64_t want = values ? SYNTH_NUMBERS : SYNTH_HEADS + 256;
  const uint32_t made = values ? u.unit_bytes : u.kind == SYNTH_Q4_K ? 16 + u.codes : u.heads + u.codes;
  const bool known = values ? u.unit_bytes == 1 || u.unit_bytes == 2 || u.unit_bytes == 4
                            : u.kind == SYNTH_Q4_K ? u.codes == 128 : u.kind == SYNTH_BLOCK ? u.heads <= 2 : u.kind == SYNTH_ROW;
  if (!known || made != u.unit_bytes || u.unit_bytes == 0 || u.unit_bytes > 65536)
    throw OptionError("[synth] there is no unit of kind " + std::to_string(u.kind) + " with " + std::to_string(u.unit_bytes) + " bytes, " +
                      std::to_string(u.heads) + " of heads and " + std::to_string(u.codes) + " of codes");
  if (table_words != want)
    throw OptionError("[synth] table: expected " + std::to_string(want) + " words, got " + std::to_string(table_words));
}

void synth_fill(const SynthUnits& u, const uint32_t* table, uint64_t first, uint64_t n, uint8_t* out) {
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t unit = first + i;
    const uint32_t base = synth_base(u.key, static_cast<uint32_t>(unit), static_cast<uint32_t>(unit >> 32));
    synth_unit(u.kind, u.unit_bytes, u.heads, u.codes, base, table, out + i * u.unit_bytes);
  }
}

}  // namespace ds4
