// hc: hyper-connections. Mixer rows, coefficients, collapse + norm, expand.
#pragma once

#include "compat.h"

#define HC_IN_THREADS 512     // of hc_in and hc_coefficients: 16 simdgroups
#define HC_WRITE_THREADS 256

// Bits of fc_flags.
#define HC_MIXED 1        // the mixer rows are finished sums, and the squares are summed by hc_coefficients (many rows)
#define HC_SEPARATE_XQ 2  // xq is not x

struct HcInParams {
  uint64_t row_bytes;
  uint32_t scale_row_bytes;
  uint32_t n, mix_rows, width, segments;
  uint32_t streams, hidden;
  float norm_eps;
};

struct HcCoefficientParams {
  uint32_t mix_rows, segments;  // of the mixer; segments of its width
  uint32_t streams, hidden, iters;
  float norm_eps, hc_eps;
};

struct HcWriteParams {
  uint32_t n, streams, hidden;
};
