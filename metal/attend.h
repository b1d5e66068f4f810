// Arguments of the attention kernels: a batch of rows of one call.
#pragma once

#include "compat.h"

#define ATTEND_PLACES 64u    // of a block of the list
#define ATTEND_HEADS 8u      // of a threadgroup, a simdgroup each
#define ATTEND_THREADS 256u
#define ATTEND_SLICE 64u     // elements of a head that a threadgroup of attend_values makes; half of them with ATTEND_NARROW

#define ATTEND_NARROW 1      // bit of fc_flags: few rows, so twice as many threadgroups

struct AttendParams {
  uint32_t first_row;     // rows of this batch: first_row, ...; scratch starts anew for each batch
  uint32_t position;      // of row 0 of the call
  uint32_t heads;
  uint32_t head_dim;
  uint32_t rope_dim;
  uint32_t window;        // places of the window in the list
  uint32_t window_capacity;   // rows of the ring
  uint32_t window_row_bytes;
  uint32_t more_capacity;     // drafting: rows of the ring of the block
  uint32_t more_row_bytes;    // of a selected entry, or of a row of the block
  uint32_t topk;          // selected entries of a row at most; 0: window only
  uint32_t drafting;      // every row sees positions first .. position - 1 and all `n` rows of the block
  uint32_t first;
  uint32_t n;
  uint32_t blocks;        // of the longest list
  uint32_t raw;           // the result before un-rotation is asked for as well
  float scale;           // 1 / sqrt(head_dim)
};
