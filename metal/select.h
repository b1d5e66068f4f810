// Arguments of the select kernels: a batch of rows of one call.
#pragma once

#include "compat.h"

#define SELECT_THREADS 128u       // of select_scores and select_blocks: a thread an entry, a block
#define CHOOSE_THREADS 512u       // of select_best
#define CHOOSE_BATCH 8u           // keys that a thread has on the way at a time
#define CHOOSE_BINS 1024u         // of its histogram
#define CHOOSE_LIST 4096u         // sets that its bounded method can list
// Words of threadgroup memory of select_best: histogram, list, numbers of 16 simdgroups, a few words.
#define CHOOSE_WORDS (CHOOSE_BINS + CHOOSE_LIST + 3u * 16u + 8u)
#define SCORE_HEADS 16u           // heads whose queries are in threadgroup memory together

struct SelectParams {
  uint32_t first_row;  // rows of this batch: first_row, ...; scratch starts anew for each batch
  uint32_t position;   // of row 0 of the call
  uint32_t ratio;
  uint32_t heads;
  uint32_t dim;
  uint32_t row_bytes;  // of an index row
  uint32_t topk;
  uint32_t block;      // entries of a candidate block
  uint32_t n_blocks;   // most candidate blocks of a row
  uint32_t stride;     // scores of a row in scratch, a multiple of 32
  uint32_t makes;      // candidate blocks are chosen as well
  uint32_t uses;       // only entries of given blocks are scored
  uint32_t shows;      // every score is asked for
  uint32_t show_stride;
};
