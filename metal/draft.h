// Arguments of the kernels that only the drafter needs.
#pragma once

#include "compat.h"

#define DRAFT_THREADS 256u

struct DraftRowsArgs {
  uint32_t streams;   // stream_mean, collapse
  uint32_t width;     // elements of a row
  uint32_t stride;    // stream_mean: from one result to the next
  uint32_t rope_dim;  // draft_pack
  uint32_t position;  // draft_pack: of row 0
  uint32_t capacity;  // draft_pack: rows of the ring
  uint32_t row_bytes;
  float share;        // stream_mean: 1 / streams
  float eps;
};

#define MARKOV_THREADS 512u
#define MARKOV_RUN 2048u  // logits of a threadgroup of markov_logits, and of one turn of markov_top

struct MarkovParams {
  uint64_t row_bytes;  // of the embedding
  uint32_t scale_row_bytes;
  uint32_t previous;   // its row
  uint32_t vocab, hidden, rank;
  uint32_t groups;     // threadgroups of markov_logits
};
