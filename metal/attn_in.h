// attn_in: what follows the two down-projections: norm of the low-rank query; norm, rotation and packing of the window row.
#pragma once

#include "compat.h"

#define ATTN_IN_THREADS 256

struct AttnInParams {
  uint32_t q_rank, head_dim, rope_dim;
  uint32_t window_capacity, window_row_bytes;
  uint64_t position;
  float norm_eps;
  uint32_t zero;
};
