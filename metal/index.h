// Arguments of the index kernel.
#pragma once

#include "compat.h"

#define INDEX_HEADS 8u  // of a threadgroup, a simdgroup each

struct IndexParams {
  uint32_t heads, dim;
  float factor;  // 1 / sqrt(dim) / sqrt(heads)
};
