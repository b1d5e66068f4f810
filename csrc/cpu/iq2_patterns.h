// The patterns of IQ2_XXS (metal/iq2_table.h) as a table.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "iq2_table.h"

DS4_CPU_NAMESPACE_BEGIN

constexpr uint16_t kIq2Patterns[256] = {DS4_IQ2_PATTERNS};

DS4_CPU_NAMESPACE_END
