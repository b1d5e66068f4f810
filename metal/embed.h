// embed: the token's row in every stream, and the start mix (1, 0, ...).
#pragma once

#include "compat.h"

#define EMBED_THREADS 256

struct EmbedParams {
  uint64_t row_bytes;
  uint32_t scale_row_bytes;
  uint32_t hidden, streams;
};
