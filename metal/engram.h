// Arguments of the Engram kernels.
#pragma once

#include "compat.h"

struct EngramParams {
  uint32_t groups;     // engram_unpack: groups of 32 elements of all rows
  uint32_t dim;        // elements of a table row
  uint32_t row_bytes;
  uint32_t streams;
  uint32_t hidden;
  float eps;
  float inverse_root;  // 1 / sqrt(hidden)
};
