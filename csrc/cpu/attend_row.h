// Attention of one head's query over a block of at most 64 unpacked rows, with a running maximum.
// Order of every sum: docs/numerics.md, R2 and R3.
#pragma once

#include "cpu/row_ops.h"
#include "cpu/rows.h"

DS4_CPU_NAMESPACE_BEGIN

constexpr int kPlaces = 64;
constexpr int kDotLanes = 64;
constexpr int kDotVectors = kDotLanes / kW;

#if defined(DS4_ISA_AVX512)
// Four keys at once: the query is loaded once, and one tree adds up all four.
inline void four_key_scores(const float* q, const float* keys, int hd, float scale, float* out) {
  V acc[4][kDotVectors];
  for (int j = 0; j < 4; ++j)
    for (int g = 0; g < kDotVectors; ++g) acc[j][g] = v_zero();
  for (int i = 0; i < hd; i += kDotLanes)
    for (int g = 0; g < kDotVectors; ++g) {
      V qv = v_load(q + i + g * kW);
      v_keep(qv);
      for (int j = 0; j < 4; ++j) acc[j][g] = v_fma(qv, v_load(keys + static_cast<int64_t>(j) * hd + i + g * kW), acc[j][g]);
    }
  alignas(64) float sums[4][kDotLanes];
  for (int j = 0; j < 4; ++j)
    for (int g = 0; g < kDotVectors; ++g) v_store(sums[j] + g * kW, acc[j][g]);
  float total[4];
  pairwise_tree4<1>(sums[0], kDotLanes, total);
  for (int j = 0; j < 4; ++j) out[j] = total[j] * scale;
}
#endif

// Scores of `n` keys, 64 accumulators each; a head may have only 32 (then the upper half stays zero).
inline void key_scores(const float* q, const float* keys, int n, int hd, float scale, float* out) {
  int j = 0;
#if defined(DS4_ISA_AVX512)
  if (hd % kDotLanes == 0)
    for (; j + 4 <= n; j += 4) four_key_scores(q, keys + static_cast<int64_t>(j) * hd, hd, scale, out + j);
#endif
  for (; j < n; ++j) {
    const float* k = keys + static_cast<int64_t>(j) * hd;
    V acc[kDotVectors];
    for (int g = 0; g < kDotVectors; ++g) acc[g] = v_zero();
    int i = 0;
    for (; i + kDotLanes <= hd; i += kDotLanes)
      for (int g = 0; g < kDotVectors; ++g) acc[g] = v_fma(v_load(q + i + g * kW), v_load(k + i + g * kW), acc[g]);
    for (int g = 0; i < hd; ++g, i += kW) acc[g] = v_fma(v_load(q + i), v_load(k + i), acc[g]);
    out[j] = pairwise_tree<kDotVectors>(acc) * scale;
  }
}

// o = o * alpha, then o += p_j v_j for ascending j.
inline void add_values(float* o, const float* values, const float* p, int n, int hd, float alpha, bool first) {
  constexpr int U = kRegisters == 32 ? 8 : 4;
  const V va = v_set(alpha);
  for (int i = 0; i < hd; i += U * kW) {
    const int u_end = hd - i < U * kW ? (hd - i) / kW : U;
    V acc[U];
    for (int u = 0; u < u_end; ++u) acc[u] = first ? v_zero() : v_mul(v_load(o + i + u * kW), va);
    if (u_end == U)
      for (int j = 0; j < n; ++j) {
        const V pj = v_set(p[j]);
        const float* v = values + static_cast<int64_t>(j) * hd + i;
        for (int u = 0; u < U; ++u) acc[u] = v_fma(pj, v_load(v + u * kW), acc[u]);
      }
    else
      for (int j = 0; j < n; ++j)
        for (int u = 0; u < u_end; ++u)
          acc[u] = v_fma(v_set(p[j]), v_load(values + static_cast<int64_t>(j) * hd + i + u * kW), acc[u]);
    for (int u = 0; u < u_end; ++u) v_store(o + i + u * kW, acc[u]);
  }
}

// Sum of 64 places, pairwise by index bit, the lowest first; missing places count 0.
inline float sum_places(float* e, int n) {
  for (int j = n; j < kPlaces; ++j) e[j] = 0.f;
  V t[kPlaces / kW];
  for (int g = 0; g < kPlaces / kW; ++g) t[g] = v_load(e + g * kW);
  return pairwise_tree<kPlaces / kW>(t);
}

struct Softmax {
  float max = -1e30f, sum = 0.f;
  bool first = true;
};

inline void attend_block(const float* q, const float* keys, int n, int hd, float scale, bool round, Softmax& state, float* o) {
  if (n == 0) return;
  float s[kPlaces], p[kPlaces], e[kPlaces];
  key_scores(q, keys, n, hd, scale, s);
  float top = state.max;
  for (int j = 0; j < n; ++j) top = ds4_max(top, s[j]);
  const float alpha = ds4_exp(state.max - top);
  for (int j = 0; j < n; ++j) e[j] = ds4_exp(s[j] - top);
  for (int j = 0; j < n; ++j) p[j] = round ? ds4_bf16(e[j]) : e[j];
  state.sum = DS4_FMA(state.sum, alpha, sum_places(e, n));
  add_values(o, keys, p, n, hd, alpha, state.first);
  state.max = top;
  state.first = false;
}

// Several heads that read the same rows: what one head of attend_block does, but the rows come from memory once.
struct HeadRun {
  const float* q;  // [n][hd]
  float* o;        // [n][hd]
  int n;
  Softmax* state;  // [n]
  float* weights;  // [n][kPlaces]: scores, then what the values are multiplied by
  float* alpha;    // [n]
  float* dots;     // scratch of dot_block
};

constexpr int64_t head_floats(int n) { return static_cast<int64_t>(n) * (kPlaces + 1 + (sizeof(Softmax) + 3) / 4) + 64; }

// One head's share of a block: scores become weights; alpha rescales what is there.
inline float soften(float* s, int n, float scale, bool round, Softmax& state) {
  float top = state.max;
  for (int j = 0; j < n; ++j) {
    s[j] = s[j] * scale;
    top = ds4_max(top, s[j]);
  }
  float e[kPlaces];
  const float alpha = ds4_exp(state.max - top);
  for (int j = 0; j < n; ++j) e[j] = ds4_exp(s[j] - top);
  for (int j = 0; j < n; ++j) s[j] = round ? ds4_bf16(e[j]) : e[j];
  state.sum = DS4_FMA(state.sum, alpha, sum_places(e, n));
  state.max = top;
  return alpha;
}

// H heads times U vectors of the values.
template <int H, int U>
inline void add_values_of(const HeadRun& r, int h, const float* values, int n, int hd, int i, bool first) {
  V acc[H][U];
  for (int x = 0; x < H; ++x)
    for (int u = 0; u < U; ++u)
      acc[x][u] = first ? v_zero() : v_mul(v_load(r.o + static_cast<int64_t>(h + x) * hd + i + u * kW), v_set(r.alpha[h + x]));
  for (int j = 0; j < n; ++j) {
    V v[U];
    for (int u = 0; u < U; ++u) {
      v[u] = v_load(values + static_cast<int64_t>(j) * hd + i + u * kW);
      v_keep(v[u]);
    }
    for (int x = 0; x < H; ++x) {
      const V p = v_set(r.weights[(h + x) * kPlaces + j]);
      for (int u = 0; u < U; ++u) acc[x][u] = v_fma(p, v[u], acc[x][u]);
    }
  }
  for (int x = 0; x < H; ++x)
    for (int u = 0; u < U; ++u) v_store(r.o + static_cast<int64_t>(h + x) * hd + i + u * kW, acc[x][u]);
}

// A multiple of 64 wide heads; the places of a block are the same for all heads, so `first` is too.
inline void attend_heads(const HeadRun& r, const float* keys, int n, int hd, float scale, bool round, bool first) {
  Matrix m;
  m.type = RowType::f32;
  m.rows = n;
  m.cols = hd;
  m.data = reinterpret_cast<const uint8_t*>(keys);
  m.row_bytes = static_cast<int64_t>(hd) * 4;
  dot_block(m, 0, n, XRows{r.q, hd, nullptr}, r.n, r.weights, kPlaces, r.dots);
  for (int h = 0; h < r.n; ++h) r.alpha[h] = soften(r.weights + h * kPlaces, n, scale, round, r.state[h]);
  constexpr int H = kRegisters == 32 ? 4 : 2, U = 4;
  for (int i = 0; i < hd; i += U * kW) {  // hd is a multiple of 64, so of U * kW
    int h = 0;
    for (; h + H <= r.n; h += H) add_values_of<H, U>(r, h, keys, n, hd, i, first);
    for (; h < r.n; ++h) add_values_of<1, U>(r, h, keys, n, hd, i, first);
  }
}

DS4_CPU_NAMESPACE_END
