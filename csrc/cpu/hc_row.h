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

constexpr int kHcRun = 64;  // elements handled together: local copies, so that compilers vectorise along them

template <int kC>
inline void collapse_run(const float* stream, const float* mix, int c, int64_t d, int n, bool round, float* out) {
  float v[kHcRun];
  for (int i = 0; i < n; ++i) v[i] = mix[0] * stream[i];
  for (int j = 1; j < (kC > 0 ? kC : c); ++j)
    for (int i = 0; i < n; ++i) v[i] = DS4_FMA(mix[j], stream[j * d + i], v[i]);
  if (round)
    for (int i = 0; i < n; ++i) v[i] = ds4_bf16(v[i]);
  for (int i = 0; i < n; ++i) out[i] = v[i];
}

inline void collapse_row(const float* stream, const float* mix, int c, int d, bool round, float* out) {
  int k = 0;
  if (c == 4)
    for (; k + kHcRun <= d; k += kHcRun) collapse_run<4>(stream + k, mix, 4, d, kHcRun, round, out + k);
  for (; k < d; k += kHcRun) collapse_run<0>(stream + k, mix, c, d, d - k < kHcRun ? d - k : kHcRun, round, out + k);
}

template <int kC>
inline void expand_run(const float* y, const float* post, const float* comb, int c, int64_t d, int n, bool round, float* stream) {
  const int streams = kC > 0 ? kC : c;
  float s[kMaxStreams][kHcRun];
  for (int j = 0; j < streams; ++j)
    for (int i = 0; i < n; ++i) s[j][i] = stream[j * d + i];
  for (int t = 0; t < streams; ++t) {
    float v[kHcRun];
    for (int i = 0; i < n; ++i) v[i] = post[t] * y[i];
    for (int j = 0; j < streams; ++j)
      for (int i = 0; i < n; ++i) v[i] = DS4_FMA(comb[j * streams + t], s[j][i], v[i]);
    if (round)
      for (int i = 0; i < n; ++i) v[i] = ds4_bf16(v[i]);
    for (int i = 0; i < n; ++i) stream[t * d + i] = v[i];
  }
}

inline void expand_row(const float* y, const float* post, const float* comb, int c, int d, bool round, float* stream) {
  int k = 0;
  if (c == 4)
    for (; k + kHcRun <= d; k += kHcRun) expand_run<4>(y + k, post, comb, 4, d, kHcRun, round, stream + k);
  for (; k < d; k += kHcRun) expand_run<0>(y + k, post, comb, c, d, d - k < kHcRun ? d - k : kHcRun, round, stream + k);
}

DS4_CPU_NAMESPACE_END
