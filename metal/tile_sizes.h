// Sizes of the products of many activation rows (metal/tiles.h), for kernels and host.
#pragma once

#include "compat.h"

#define TILE_OUTPUTS 32   // matrix rows of a threadgroup
#define TILE_TOKENS 32    // activation rows of a threadgroup
#define TILE_CHUNK 256    // columns that are in threadgroup memory at a time, of which a pass looks at a quarter
#define TILE_STRIDE 36    // floats between two places of the staged columns: 32, and no two lanes on one bank
#define TILE_HALF 2304    // floats of the staged weights, and of the staged activations: 64 * TILE_STRIDE
#define TILE_THREADS 512
#define TILE_BYTES 18432  // threadgroup memory: 2 * TILE_HALF floats
#define TILE_ROW 33       // floats between the results of two activation rows in threadgroup memory

// A bit of fc_flags, beside those of the kernels that use tiles.
#define TILE_FOLDS 4096  // the rows have more than one segment
