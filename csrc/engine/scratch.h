// The activations of one run, in two allocations that grow to the largest run so far: what only operations touch, and what the
// host writes or reads in every run, which a device with memory of its own may keep elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/backend.h"

namespace ds4 {

struct Scratch {
  int32_t* tokens;
  float *stream, *mix, *pre, *post, *comb;
  float *x, *xq;  // xq is x unless activations are quantised
  float *qr, *q, *o, *low, *y;
  float *cos, *sin, *yarn_cos, *yarn_sin;  // n + 1 rows: the position before the run first
  int8_t* index_codes;
  float *index_scales, *index_weights;
  int32_t *selected, *n_selected, *blocks, *n_blocks;
  float* route_scores;
  int32_t* experts;
  float *expert_weights, *mid;
  float *head_x, *logits;

  // The same from row `row` of the run on; head_x and logits stay.
  Scratch from(const Shape& shape, int64_t row) const;
};

struct ScratchBytes {
  size_t own = 0, host = 0;
  size_t total() const { return own + host; }
};
// Bytes for n rows of which n_logits get logits; with `out` not null, its pointers into the two allocations as well.
ScratchBytes lay_out(const Shape& shape, Activations activations, int64_t n, int64_t n_logits, uint8_t* own, uint8_t* host, Scratch* out);

}  // namespace ds4
