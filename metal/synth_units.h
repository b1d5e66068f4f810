// Units of made-up weights: what the bytes of one block, or of one number, follow from. One text for the kernel that fills
// memory of a device and for the C++ that fills memory of the host; tests/ref/synth_units.py says the same in numpy.
//
// A unit's random words come from a counter: mix(base + golden ratio * (word + 1)), base from the tensor's key and the number of
// the unit. Bytes are looked up in tables that the host makes, so there is no arithmetic on floats here.
#ifndef DS4_SYNTH_UNITS_H
#define DS4_SYNTH_UNITS_H

#include "compat.h"
#include "numerics.h"

// Kinds of units, and what their table holds:
#define SYNTH_VALUES 0u  // a number of 1, 2 or 4 bytes; 4,096 numbers
#define SYNTH_BLOCK 1u   // a head of 0, 1 or 2 bytes, then codes; 256 heads, then 256 codes
#define SYNTH_Q4_K 2u    // d and dmin, eight 6-bit scales that are minima as well, nibbles; 256 heads (d, dmin << 16), then 256 codes
#define SYNTH_ROW 3u     // codes, then heads of a byte each; tables as SYNTH_BLOCK

#define SYNTH_NUMBERS 4096
#define SYNTH_HEADS 256      // in front of the codes in a table
#define SYNTH_HEAD_WORDS 65536u  // words of heads begin here, far behind those of codes

struct SynthUnits {
  uint32_t kind;
  uint32_t unit_bytes;
  uint32_t heads;  // bytes of heads
  uint32_t codes;  // bytes of codes
  uint32_t key;    // of the tensor
};

DS4_FN ds4_u32 synth_mix(ds4_u32 x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}
DS4_FN ds4_u32 synth_base(ds4_u32 key, ds4_u32 unit_low, ds4_u32 unit_high) { return synth_mix(synth_mix(unit_high ^ key) + unit_low); }
DS4_FN ds4_u32 synth_word(ds4_u32 base, ds4_u32 word) { return synth_mix(base + 0x9e3779b9u * (word + 1u)); }

// The pointers are of whatever address space the caller has them in.
template <class Out>
DS4_FN void synth_bytes(ds4_u32 value, ds4_u32 n, Out out) {
  for (ds4_u32 i = 0u; i < n; ++i) out[i] = ds4_u8(value >> (8u * i) & 255u);
}

template <class Table, class Out>
DS4_FN void synth_q4_k_head(ds4_u32 base, Table table, Out out) {
  synth_bytes(table[synth_word(base, SYNTH_HEAD_WORDS) >> 24], 4u, out);
  ds4_u32 lows = synth_word(base, SYNTH_HEAD_WORDS + 1u), highs = synth_word(base, SYNTH_HEAD_WORDS + 2u);
  for (ds4_u32 i = 0u; i < 4u; ++i) {
    ds4_u32 low = 40u + ((lows >> (8u * i) & 255u) * 17u >> 8), high = 40u + ((highs >> (8u * i) & 255u) * 17u >> 8);
    ds4_u8 both = ds4_u8(low | high >> 4 << 6);
    out[4u + i] = both;
    out[8u + i] = both;
    out[12u + i] = ds4_u8((high & 15u) | (high & 15u) << 4);
  }
}

template <class Table, class Out>
DS4_FN void synth_unit(ds4_u32 kind, ds4_u32 unit_bytes, ds4_u32 heads, ds4_u32 codes, ds4_u32 base, Table table, Out out) {
  if (kind == SYNTH_VALUES) {
    synth_bytes(table[synth_word(base, 0u) >> 20], unit_bytes, out);
    return;
  }
  if (kind == SYNTH_Q4_K) synth_q4_k_head(base, table, out);
  if (kind == SYNTH_BLOCK && heads > 0u) synth_bytes(table[synth_word(base, SYNTH_HEAD_WORDS) >> 24], heads, out);
  ds4_u32 at = kind == SYNTH_ROW ? 0u : unit_bytes - codes;
  for (ds4_u32 i = 0u; i < codes; i += 4u) {
    ds4_u32 word = synth_word(base, i >> 2);
    for (ds4_u32 k = i; k < codes && k < i + 4u; ++k)
      out[at + k] = ds4_u8(table[SYNTH_HEADS + (word >> (8u * (k - i)) & 255u)]);
  }
  if (kind == SYNTH_ROW)
    for (ds4_u32 g = 0u; g < heads; ++g) out[codes + g] = ds4_u8(table[synth_word(base, SYNTH_HEAD_WORDS + g) >> 24]);
}

#endif
