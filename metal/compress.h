// Arguments of the compress kernels.
#pragma once

#include "compat.h"

#define COMPRESS_THREADS 128u

struct CompressParams {
  uint32_t n;            // rows of the call
  uint32_t position;     // of row 0
  uint32_t ratio;
  uint32_t head_dim, index_dim, rope_dim;
  uint32_t first_entry;  // the entries that this call completes start here
  uint32_t first_rope;   // position of the first row of the rotary tables
  uint32_t capacity;     // rows of the ring of unpooled rows
  uint32_t keep;         // the last rows of the call, which go into the ring
  uint32_t row_bytes;    // of a compressed row
  uint32_t index_row_bytes;
  float eps;
};
