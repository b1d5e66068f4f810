// The fast row kernels: a few weight rows times 1 to 8 activation rows, weights decoded in registers.
//
// A tile is M weight rows times R activation rows. The 64 accumulators of each of its M * R products are walked in
// passes of G vectors, so that all accumulators of a pass stay in registers. Canonical order as rows.cpp: the element
// order of an accumulator, the segments and the tree do not depend on M, R or G.
#pragma once

#include "cpu/fast_decoders.h"
#include "cpu/rows.h"

DS4_CPU_NAMESPACE_BEGIN

constexpr int kGroups = kLanes / kW;  // vectors that hold the accumulators of one product

// Weight rows that share the loads of the activations.
constexpr int tile_rows(int r) {
  if (kRegisters < 32) return r <= 4 ? 2 : 1;
  return r <= 6 ? 4 : 3;
}

constexpr int tile_groups(int m, int r) {
  const int budget = kRegisters == 32 ? 24 : 10;
  int g = kGroups;
  while (g > 1 && m * r * g > budget) g /= 2;
  return g;
}

template <int I>
struct Int {
  static constexpr int value = I;
};

// f(Int<0>), f(Int<1>), ... f(Int<N - 1>)
template <int N, int I = 0, class F>
DS4_INLINE void unroll(F&& f) {
  if constexpr (I < N) {
    f(Int<I>{});
    unroll<N, I + 1>(f);
  }
}

#define DS4_LAMBDA_INLINE __attribute__((always_inline))

// One pass over a segment: vectors G0 .. G0 + G - 1 of the accumulators of M rows. The first pass prepares scales.
template <int G0, int M, int R, int G, class Dec>
DS4_INLINE void tile_pass(Dec* w, const float* x, int seg0, int seg1, int k, float* total) {
  V acc[M][R][G];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r)
      for (int g = 0; g < G; ++g) acc[m][r][g] = v_zero();
  // Two-byte types in four long streams: Intel's cores read them a tenth faster when asked ahead, Zen 4 a fifth slower.
  const bool fetch = !Dec::kWide || on_intel();
  const Fetch ahead;
  // One activation row: a chunk at a time, with few branches and offsets that are constants.
  constexpr int kRun = Dec::kRun, kParts = R == 1 && G == kGroups ? kChunk / kRun : 1;
  for (int i0 = seg0; i0 < seg1; i0 += kParts * kRun) {
    if constexpr (G0 == 0 && Dec::kPrepares)
      if ((kParts > 1 || i0 % kChunk == 0) && i0 + kChunk < k)
        for (int m = 0; m < M; ++m) w[m].prepare(i0 + kChunk);
    unroll<kParts>([&](auto part) DS4_LAMBDA_INLINE {
      const int i = i0 + decltype(part)::value * kRun;
      if (G0 == 0 && fetch)
        for (int m = 0; m < M; ++m) w[m].fetch(i, ahead);
      const float* xi = x + static_cast<int64_t>(i / (kRun / kLanes)) * R;
      unroll<G>([&](auto gi) DS4_LAMBDA_INLINE {
        constexpr int g = decltype(gi)::value;
        V wv[M];
        for (int m = 0; m < M; ++m) wv[m] = w[m].template get<(G0 + g) * kW>(i);
        for (int r = 0; r < R; ++r) {
          V xv = v_load(xi + ((G0 + g) * R + r) * kW);
          if constexpr (M > 1) v_keep(xv);
          for (int m = 0; m < M; ++m) acc[m][r][g] = Dec::add(wv[m], xv, acc[m][r][g]);
        }
      });
    });
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r)
      for (int g = 0; g < G; ++g) {
        float* t = total + (m * R + r) * kLanes + (G0 + g) * kW;
        v_store(t, seg0 == 0 ? acc[m][r][g] : v_add(v_load(t), acc[m][r][g]));
      }
}

#if defined(DS4_ISA_AVX512)
// The same for four weight rows and one activation row, by decoders that add whole runs. Accumulators have names, since
// an array of them would be stored again and again.
template <class Dec>
void run_pass(Dec* w, const float* x, int seg0, int seg1, int k, float* total) {
  Four a = four_zeros(), b = a, c = a, d = a;
  const Fetch ahead;
  const bool fetch = !Dec::kWide || on_intel();
  for (int i0 = seg0; i0 < seg1; i0 += kChunk) {
    if (Dec::kPrepares && i0 + kChunk < k)
      for (int m = 0; m < 4; ++m) w[m].prepare(i0 + kChunk);
    unroll<kChunk / Dec::kRun>([&](auto part) DS4_LAMBDA_INLINE {
      const int i = i0 + decltype(part)::value * Dec::kRun;
      if (fetch)
        for (int m = 0; m < 4; ++m) w[m].fetch(i, ahead);
      const Four xv = four_at(x + i / (Dec::kRun / kLanes));
      w[0].add_run(i, xv, a);
      w[1].add_run(i, xv, b);
      w[2].add_run(i, xv, c);
      w[3].add_run(i, xv, d);
    });
  }
  const bool first = seg0 == 0;
  add_four(a, first, total);
  add_four(b, first, total + kLanes);
  add_four(c, first, total + 2 * kLanes);
  add_four(d, first, total + 3 * kLanes);
}
#endif

// sums[o] = tree over total[o], for n outputs whose accumulators lie in a layout.
template <int kLayout>
void trees(const float (*total)[kLanes], int n, float* sums) {
  int o = 0;
#if defined(DS4_ISA_AVX512)
  for (; o + 4 <= n; o += 4) pairwise_tree4<kLayout>(total[o], kLanes, sums + o);
  for (; o < n; ++o) {  // alone: four times the same run
    float same[4];
    pairwise_tree4<kLayout>(total[o], 0, same);
    sums[o] = same[0];
  }
#else
  static_assert(kLayout == 1);
  for (; o < n; ++o) {
    V t[kGroups];
    for (int g = 0; g < kGroups; ++g) t[g] = v_load(total[o] + g * kW);
    sums[o] = pairwise_tree<kGroups>(t);
  }
#endif
}

// x: R rows packed by vector ([k / kW][R][kW]); the result of weight row m and activation row r at out[r * ldo + m * step].
template <int M, int R, class Dec>
void row_tile(const Dec* rows, const float* x, int k, int n_rows, float* out, int64_t ldo, int64_t step) {
  constexpr int G = tile_groups(M, R);
  alignas(64) float room[M * R][kLanes];
  float* total = room[0];
  asm("" : "+r"(total));  // in memory, not spread over registers that the passes need
  Dec w[M];
  for (int m = 0; m < M; ++m) w[m] = rows[m];
  for (int m = 0; m < M; ++m) w[m].prepare(0);
  for (int seg0 = 0; seg0 < k; seg0 += kSegment) {
    const int seg1 = seg0 + kSegment < k ? seg0 + kSegment : k;
#if defined(DS4_ISA_AVX512)
    if constexpr (M == 4 && R == 1 && Dec::kAddsRun) {
      run_pass(w, x, seg0, seg1, k, total);
      continue;
    }
#endif
    unroll<kGroups / G>([&](auto pass) DS4_LAMBDA_INLINE {
      tile_pass<decltype(pass)::value * G, M, R, G>(w, x, seg0, seg1, k, total);
    });
  }
  asm("" : : "r"(total) : "memory");
  float sums[M * R];
  trees<Dec::kLayout>(room, M * R, sums);
  for (int m = 0; m < n_rows; ++m)
    for (int r = 0; r < R; ++r) out[r * ldo + m * step] = sums[m * R + r];
}

// The activation rows by vector, in a layout: what the tiles read is one stream.
template <int kLayout>
void pack_rows(XRows x, int n, int k, float* out) {
  constexpr int kRun = kLayout * kW;
  for (int r = 0; r < n; ++r) {
    const float* row = x.row(r);
    for (int i = 0; i < k; i += kRun) {
      V v[kLayout];
      for (int j = 0; j < kLayout; ++j) v[j] = v_load(row + i + j * kW);
#if defined(DS4_ISA_AVX512)
      spread<kLayout>(v);
#endif
      for (int j = 0; j < kLayout; ++j) v_store(out + static_cast<int64_t>(i) * n + (j * n + r) * kW, v[j]);
    }
  }
}

// All tiles of a block of weight rows; the activations are packed already.
template <int R, class Dec>
void tiles_of(const Matrix& m, int r0, int nr, const float* packed, float* scales, float* out, int64_t ldo) {
  constexpr int M = tile_rows(R);
  const int k = m.cols;
  const int64_t room = (Dec::floats(k) + 15) & ~static_cast<int64_t>(15);
  const auto tile = [&](int first, int step, int n_rows, float* to) {
    Dec w[M];
    for (int j = 0; j < M; ++j) {
      const int r = r0 + first + j * step;
      w[j] = Dec(m, r < r0 + nr ? r : r0 + nr - 1, scales + j * room);
    }
    row_tile<M, R>(w, packed, k, n_rows, to, ldo, step);
  };
  // The rows of a tile stand far apart, so that each is the next piece of one of M long streams.
  const int step = nr / M;
  for (int r = 0; r < step; ++r) tile(r, step, M, out + r);
  if (step * M < nr) tile(step * M, 1, nr - step * M, out + step * M);
}

template <int R, class Dec>
void tile_rows_of(const Matrix& m, int r0, int nr, XRows x, float* out, int64_t ldo, float* scratch) {
  if constexpr (R == 1 && Dec::kLayout == 1) {
    tiles_of<R, Dec>(m, r0, nr, x.row(0), scratch, out, ldo);
  } else {
    pack_rows<Dec::kLayout>(x, R, m.cols, scratch);
    tiles_of<R, Dec>(m, r0, nr, scratch, scratch + static_cast<int64_t>(R) * m.cols, out, ldo);
  }
}

// Floats of scratch for a matrix of k columns: packed rows and the scales of a tile.
constexpr int64_t few_scratch(int k) { return static_cast<int64_t>(kFewRows) * k + 4 * (static_cast<int64_t>(k) / 8 + 64); }

// False: this matrix has no fast kernel. Four-lane instruction sets have none at all: their tiles would need sixteen
// passes, and nobody has measured them.
inline bool few_rows_fast(const Matrix& m, int r0, int nr, XRows x, int n, float* out, int64_t ldo, float* scratch) {
#if defined(DS4_ISA_AVX512) || defined(DS4_ISA_AVX2)
  return with_fast_decoder(m, [&](auto tag) {
    using Dec = typename decltype(tag)::type;
    switch (n) {
      case 1: return tile_rows_of<1, Dec>(m, r0, nr, x, out, ldo, scratch);
      case 2: return tile_rows_of<2, Dec>(m, r0, nr, x, out, ldo, scratch);
      case 3: return tile_rows_of<3, Dec>(m, r0, nr, x, out, ldo, scratch);
      case 4: return tile_rows_of<4, Dec>(m, r0, nr, x, out, ldo, scratch);
      case 5: return tile_rows_of<5, Dec>(m, r0, nr, x, out, ldo, scratch);
      case 6: return tile_rows_of<6, Dec>(m, r0, nr, x, out, ldo, scratch);
      case 7: return tile_rows_of<7, Dec>(m, r0, nr, x, out, ldo, scratch);
      case 8: return tile_rows_of<8, Dec>(m, r0, nr, x, out, ldo, scratch);
      default: return;
    }
  });
#else
  (void)m, (void)r0, (void)nr, (void)x, (void)n, (void)out, (void)ldo, (void)scratch;
  return false;
#endif
}

DS4_CPU_NAMESPACE_END
