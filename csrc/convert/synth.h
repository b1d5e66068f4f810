// Made-up weights in memory of the host: the units of metal/synth_units.h.
#pragma once

#include <cstdint>

#include "synth_units.h"

namespace ds4 {

// Throws OptionError when there is no such kind of unit, or its table has another length.
void check_units(const SynthUnits& units, int64_t table_words);
// Units first .. first + n - 1 to out.
void synth_fill(const SynthUnits& units, const uint32_t* table, uint64_t first, uint64_t n, uint8_t* out);

}  // namespace ds4
