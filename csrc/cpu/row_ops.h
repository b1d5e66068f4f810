// What is done to one row (token) at a time: norms, rotation, fake quantisers, packed cache rows.
// Plain loops over numerics.h that the compiler vectorises; element-wise, so the width never shows.
#pragma once

#include "cpu/isa.h"
#include "cpu/decoders.h"
#include "cpu/rows.h"
#include "cpu/simd.h"

DS4_CPU_NAMESPACE_BEGIN

DS4_INLINE float rounded(float v, bool round) { return round ? ds4_bf16(v) : v; }

inline void round_row(float* x, int n, bool round) {
  if (!round) return;
  for (int i = 0; i < n; ++i) x[i] = ds4_bf16(x[i]);
}

// 1 / sqrt(mean(x^2) + eps)
inline float inverse_rms(const float* x, int n, float eps) {
  const float mean = dot_f32(x, x, n) / static_cast<float>(n);
  return ds4_rsqrt(mean + eps);
}

// RMSNorm: weight * (x * inverse rms), rounded.
inline void norm_row(const float* x, const float* weight, int n, float eps, bool round, float* out) {
  const float r = inverse_rms(x, n, eps);
  if (round)
    for (int i = 0; i < n; ++i) out[i] = ds4_bf16(weight[i] * (x[i] * r));
  else
    for (int i = 0; i < n; ++i) out[i] = weight[i] * (x[i] * r);
}

// Rotates adjacent pairs of the last `rope_dim` elements; sign -1 undoes it.
inline void rotate_tail(float* x, int dim, int rope_dim, const float* cos, const float* sin, float sign, bool round) {
  float* t = x + (dim - rope_dim);
  for (int i = 0; i < rope_dim / 2; ++i) {
    const float a = t[2 * i], b = t[2 * i + 1], c = cos[i], s = sign * sin[i];
    const float re = a * c - b * s;
    const float im = a * s + b * c;
    t[2 * i] = rounded(re, round);
    t[2 * i + 1] = rounded(im, round);
  }
}

DS4_INLINE float group_amax(const float* x, int n) {
  float m = 0.f;
  for (int i = 0; i < n; ++i) m = ds4_max(m, DS4_FABS(x[i]));
  return m;
}

// Activation quantiser Q8: e4m3 with a power-of-two scale per 32, in place; values stay f32.
inline void fake_q8(float* x, int n) {
  for (int g = 0; g < n; g += 32) {
    const int m = n - g < 32 ? n - g : 32;
    const float s = ds4_scale_q8(group_amax(x + g, m));
    const float inv = 1.0f / s;  // exact: a power of two
    for (int i = 0; i < m; ++i) x[g + i] = ds4_to_e4m3(x[g + i] * inv) * s;
  }
}

// Window row: head_dim e4m3 codes, then one e8m0 scale per 32.
inline void pack_window_row(const float* x, int dim, uint8_t* row) {
  for (int g = 0; g < dim; g += 32) {
    const float s = ds4_scale_q8(group_amax(x + g, 32));
    const float inv = 1.0f / s;
    for (int i = 0; i < 32; ++i) row[g + i] = ds4_e4m3_code(ds4_to_e4m3(x[g + i] * inv));
    row[dim + g / 32] = ds4_e8m0_code(s);
  }
}

inline void unpack_window_row(const uint8_t* row, int dim, float* out) {
  for (int g = 0; g < dim; g += 32) {
    const V s = v_set(scale_256(row[dim + g / 32]));
    for (int i = 0; i < 32; i += kW) v_store(out + g + i, v_mul(v_e4m3_256th(row + g + i), s));
  }
}

// Compressed row: head_dim / 2 bytes of e2m1 pairs (low nibble first), then one e4m3 scale per 16.
inline void pack_compressed_row(const float* x, int dim, uint8_t* row) {
  for (int g = 0; g < dim; g += 16) {
    const float s = ds4_scale_q4_kv(group_amax(x + g, 16));
    for (int i = 0; i < 16; i += 2) {
      const float a = ds4_min(ds4_max(x[g + i] / s, -6.f), 6.f);
      const float b = ds4_min(ds4_max(x[g + i + 1] / s, -6.f), 6.f);
      row[(g + i) / 2] = static_cast<uint8_t>(ds4_e2m1_code(a) | (ds4_e2m1_code(b) << 4));
    }
    row[dim / 2 + g / 16] = ds4_e4m3_code(s);
  }
}

inline void unpack_compressed_row(const uint8_t* row, int dim, float* out) {
  for (int g = 0; g < dim; g += 16) {
    const V s = v_set(ds4_e4m3(row[dim / 2 + g / 16]));
    for (int i = 0; i < 16; i += kW) v_store(out + g + i, v_mul(v_e2m1_pairs(row + (g + i) / 2), s));
  }
}

// Index row: dim / 2 bytes of e2m1 pairs, then one e8m0 scale per 32.
inline void pack_index_row(const float* x, int dim, uint8_t* row) {
  for (int g = 0; g < dim; g += 32) {
    const float s = ds4_scale_q4_index(group_amax(x + g, 32));
    const float inv = 1.0f / s;
    for (int i = 0; i < 32; i += 2)
      row[(g + i) / 2] =
          static_cast<uint8_t>(ds4_e2m1_code(x[g + i] * inv) | (ds4_e2m1_code(x[g + i + 1] * inv) << 4));
    row[dim / 2 + g / 32] = ds4_e8m0_code(s);
  }
}

DS4_CPU_NAMESPACE_END
