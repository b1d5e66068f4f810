// Collapse and expand of the streams (docs/numerics.md, R7), shared by the families that fold them in.
#pragma once

#define HC_MAX_STREAMS 5

// Element k of the collapse of one token's streams.
KERNEL_INLINE float collapsed(device const float* stream, device const float* mix, uint k, uint c, uint d) {
  float v = mix[0] * stream[k];
  for (uint j = 1u; j < c; ++j) v = fma(mix[j], stream[j * d + k], v);
  return rounded(v);
}

template <int Q>
KERNEL_INLINE float pick(thread const float* values, uint q) {
  float v = values[0];
  for (int i = 1; i < Q; ++i) v = q == uint(i) ? values[i] : v;
  return v;
}

// expand where R * N results are at hand in every lane of a simdgroup: values[r * N + j] is element row + r of token i0 + j.
// A lane has one stream of one result; the streams of a result meet by exchange, so each is read once and written once.
template <int R, int N>
KERNEL_INLINE void expand_results(thread const float* values, uint row, uint rows, uint i0, uint n, uint c, device float* stream,
                                  device const float* post, device const float* comb, uint lane) {
  uint together = 32u / c;
  for (uint q0 = 0u; q0 < uint(R * N); q0 += together) {
    uint q = q0 + lane / c, k = lane % c;
    uint r = row + q / uint(N), i = i0 + q % uint(N);
    bool mine = lane < together * c && q < uint(R * N) && r < rows && i < n;
    uint token = mine ? i : 0u;
    ulong at = (ulong(token) * c + k) * rows + (mine ? r : 0u);
    float own = mine ? stream[at] : 0.0f;
    float v = post[token * c + k] * pick<R * N>(values, min(q, uint(R * N) - 1u));
    for (uint j = 0u; j < c; ++j) v = fma(comb[(token * c + j) * c + k], simd_shuffle(own, ushort((lane - k + j) & 31u)), v);
    if (mine) stream[at] = rounded(v);
  }
}

// expand of element k of token i in one thread, which holds the result `value`.
KERNEL_INLINE void expand_element(float value, uint i, uint k, uint c, uint d, device float* stream, device const float* post,
                                  device const float* comb) {
  float own[HC_MAX_STREAMS];
  device float* s = stream + ulong(i) * c * d + k;
  for (uint j = 0u; j < c; ++j) own[j] = s[j * d];
  for (uint t = 0u; t < c; ++t) {
    float v = post[i * c + t] * value;
    for (uint j = 0u; j < c; ++j) v = fma(comb[(i * c + j) * c + t], own[j], v);
    s[t * d] = rounded(v);
  }
}
