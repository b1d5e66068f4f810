// The activations of one run, laid out in one allocation that grows to the largest run so far.
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

// Bytes for n rows of which n_logits get logits; with base not null, fills the pointers as well.
size_t lay_out(const Shape& shape, Activations activations, int64_t n, int64_t n_logits, uint8_t* base, Scratch* out);

}  // namespace ds4
