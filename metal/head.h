// head: final collapse and norm; the vocabulary is a row product.
#pragma once

#include "compat.h"

#define HEAD_THREADS 512

struct HeadParams {
  uint32_t streams, hidden;
  float norm_eps;
};
