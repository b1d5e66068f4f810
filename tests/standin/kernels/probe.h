// Argument structs of probe.metal.
#pragma once
#include "compat.h"

struct ProbeRowArgs {
  int32_t rows;
  int32_t cols;
};
static_assert(sizeof(ProbeRowArgs) == 8, "shared with the host");
