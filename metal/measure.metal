// measure: one thread a unit of made-up weights; copies, whose rate is the roof of a device.
#include "compat.h"
#include "numerics.h"
#include "measure.h"

kernel void synth_fill(constant SynthParams& a [[buffer(0)]], device uchar* out [[buffer(1)]], device const uint* table [[buffer(2)]],
                       uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]]) {
  ulong i = ulong(group.x) * ulong(SYNTH_THREADS) + ulong(tid);
  if (i < a.n) {
    ulong unit = a.first + i;
    uint base = synth_base(a.units.key, uint(unit & 0xffffffffu), uint(unit >> 32));
    synth_unit(a.units.kind, a.units.unit_bytes, a.units.heads, a.units.codes, base, table, out + i * a.units.unit_bytes);
  }
}

kernel void copy_words(constant CopyParams& a [[buffer(0)]], device const uint4* from [[buffer(1)]], device uint4* to [[buffer(2)]],
                       uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]]) {
  ulong begin = ulong(group.x) * ulong(COPY_THREADS * COPY_EACH) + ulong(tid);
  uint4 words[COPY_EACH];
  for (uint k = 0u; k < uint(COPY_EACH); ++k)
    if (begin + ulong(k * uint(COPY_THREADS)) < a.n) words[k] = from[begin + ulong(k * uint(COPY_THREADS))];
  for (uint k = 0u; k < uint(COPY_EACH); ++k)
    if (begin + ulong(k * uint(COPY_THREADS)) < a.n) to[begin + ulong(k * uint(COPY_THREADS))] = words[k];
}
