// hc: hyper-connections. Mixer rows, coefficients, collapse + norm, expand.
#pragma once

#include "compat.h"

#define HC_MIX_SIMDGROUPS 4   // of a threadgroup of hc_mix, one mixer row each
#define HC_READ_THREADS 512
#define HC_WRITE_THREADS 256

// Bits of fc_flags of hc_read.
#define HC_MIXED 1       // the mixer rows are finished sums, and the squares are summed here (many rows)
#define HC_SEPARATE_XQ 2  // xq is not x

struct HcMixParams {
  uint64_t row_bytes;
  uint32_t scale_row_bytes;
  uint32_t n, mix_rows, width, segments;
};

struct HcReadParams {
  uint32_t mix_rows, segments;  // of the mixer; segments of its width
  uint32_t streams, hidden, iters;
  float norm_eps, hc_eps;
};

struct HcWriteParams {
  uint32_t n, streams, hidden;
};
