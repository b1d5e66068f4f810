// measure: what only measurements need: made-up weights in memory of the device, and copies of it.
#pragma once

#include "compat.h"
#include "synth_units.h"

#define SYNTH_THREADS 256
#define COPY_THREADS 256
#define COPY_EACH 8  // words of 16 bytes a thread

struct SynthParams {
  uint64_t first;  // unit that is written to the start of the buffer
  uint64_t n;
  SynthUnits units;
  uint32_t unused;
};
static_assert(sizeof(SynthParams) == 40, "one layout on both sides");

struct CopyParams {
  uint64_t n;  // words of 16 bytes
};
static_assert(sizeof(CopyParams) == 8, "one layout on both sides");
