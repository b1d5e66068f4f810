// The hyper-connection arithmetic of one row.
#pragma once

#include "cpu/simd.h"

DS4_CPU_NAMESPACE_BEGIN

constexpr int kMaxStreams = 8;

// Sinkhorn: softmax along the target, + eps, then column and row divisions; sums in index order.
inline void sinkhorn(float* m, int c, int iters, float eps) {
  for (int j = 0; j < c; ++j) {
    float* row = m + j * c;
    float top = row[0];
    for (int k = 1; k < c; ++k) top = ds4_max(top, row[k]);
    float sum = 0.f;
    for (int k = 0; k < c; ++k) {
      row[k] = ds4_exp(row[k] - top);
      sum = sum + row[k];
    }
    for (int k = 0; k < c; ++k) row[k] = row[k] / sum + eps;
  }
  for (int it = 0; it < iters; ++it) {
    if (it > 0)
      for (int j = 0; j < c; ++j) {
        float sum = 0.f;
        for (int k = 0; k < c; ++k) sum = sum + m[j * c + k];
        for (int k = 0; k < c; ++k) m[j * c + k] = m[j * c + k] / (sum + eps);
      }
    for (int k = 0; k < c; ++k) {
      float sum = 0.f;
      for (int j = 0; j < c; ++j) sum = sum + m[j * c + k];
      for (int j = 0; j < c; ++j) m[j * c + k] = m[j * c + k] / (sum + eps);
    }
  }
}

// z: [(2 + c) c] mixes, already times the inverse rms.
inline void hc_coefficients(const float* z, const float* scale, const float* base, int c, int iters, float eps,
                            float* pre, float* post, float* comb) {
  for (int j = 0; j < c; ++j) pre[j] = ds4_sigmoid(z[j] * scale[0] + base[j]) + eps;
  for (int j = 0; j < c; ++j) post[j] = 2.0f * ds4_sigmoid(z[c + j] * scale[1] + base[c + j]);
  for (int j = 0; j < c * c; ++j) comb[j] = z[2 * c + j] * scale[2] + base[2 * c + j];
  sinkhorn(comb, c, iters, eps);
}

inline void collapse_row(const float* stream, const float* mix, int c, int d, bool round, float* out) {
  for (int k = 0; k < d; ++k) {
    float v = mix[0] * stream[k];
    for (int j = 1; j < c; ++j) v = DS4_FMA(mix[j], stream[j * d + k], v);
    out[k] = round ? ds4_bf16(v) : v;
  }
}

inline void expand_row(const float* y, const float* post, const float* comb, int c, int d, bool round, float* stream) {
  for (int k = 0; k < d; ++k) {
    float s[kMaxStreams];
    for (int j = 0; j < c; ++j) s[j] = stream[j * d + k];
    for (int t = 0; t < c; ++t) {
      float v = post[t] * y[k];
      for (int j = 0; j < c; ++j) v = DS4_FMA(comb[j * c + t], s[j], v);
      stream[t * d + k] = round ? ds4_bf16(v) : v;
    }
  }
}

DS4_CPU_NAMESPACE_END
