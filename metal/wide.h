// Sizes of the products in which four lanes share a matrix row (metal/wide_rows.h), for kernels and host.
#pragma once

#include "compat.h"

#define WIDE_GROUPS 8      // of four lanes
#define WIDE_ROWS_OF(rows) ((rows) <= 2 ? 16u : 8u)  // matrix rows of a simdgroup: two a group where activation rows are few
#define WIDE_CHUNK 256     // columns that are staged at a time
#define WIDE_STAGES 2      // chunks in threadgroup memory: one in use, the other on its way
#define WIDE_DEEP_STAGES 8 // the same where there are few simdgroups, each of which waits long
#define WIDE_STAGED_ROWS 2 // with so many activation rows or fewer these are staged as well
#define WIDE_X 1152        // bytes of a chunk of a staged activation row: 16 more after every 128, for the banks
#define WIDE_SEGMENTS 8    // of 2,048 columns that a matrix may have
#define WIDE_DOWN_ROWS 8   // matrix rows of a simdgroup of moe_down_wide
#define WIDE_TASKS 8       // simdgroups of a threadgroup of moe_down_wide
#define WIDE_TOKENS 4      // activation rows that the experts take at a time
// Bytes of a staged row, padded so that the lanes of a simdgroup meet on few banks.
#define WIDE_PITCH_Q8_0 288
#define WIDE_PITCH_Q4_K 160
#define WIDE_PITCH_MXFP4 160
// Tiles of WIDE_ROWS_OF rows that a threadgroup of linear_wide makes at most, each with a simdgroup for every segment.
#define WIDE_TILES(segments) ((segments) >= 4u ? 1u : 4u / (segments))

// A bit of fc_flags, beside those of the kernels that use these products.
#define WIDE_DEEP 8192  // WIDE_DEEP_STAGES
