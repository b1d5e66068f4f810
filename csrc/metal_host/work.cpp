// What the operations keep for themselves (Temp), for the memory plan: at least what temp_bytes() will have given out.
#include <algorithm>
#include <initializer_list>

#include "attend.h"
#include "draft.h"
#include "metal_host/backend.h"
#include "metal_host/products.h"
#include "moe.h"

namespace ds4::metal {

namespace {

constexpr int64_t kPage = 16384;                    // buffers are made of such

int64_t sum(std::initializer_list<int64_t> floats) {
  int64_t bytes = 0;
  for (const int64_t n : floats) bytes += (n * 4 + kPage - 1) / kPage * kPage;
  return bytes;
}

// Floats of scores that are made for as many of n rows at a time as fit.
int64_t batched(int64_t per_row, int64_t n) { return std::clamp<int64_t>(kBatchBytes / (per_row * 4), 1, n) * per_row; }

// What layers of the model and of the drafter have in common; `longest` places are attended to.
int64_t layer_bytes(const Shape& s, int64_t n, int64_t longest) {
  const int64_t c = s.n_streams, d = s.hidden, m = s.mix_rows(), segments = groups_of(c * d, kSegmentColumns);
  const int64_t per_row = s.n_heads * groups_of(longest, ATTEND_PLACES) * ATTEND_PLACES;
  int64_t bytes = sum({std::min<int64_t>(n, kTileRows) * (m + 1) * segments * 64, n * m, n * s.head_dim, batched(per_row, n)});
  if (n > kTileRows) {
    const int64_t rows = std::min<int64_t>(n, kMoeRows), pairs = rows * s.top_k, slots = s.top_k + 1;
    const int64_t groups = pairs / MOE_TILE + std::min<int64_t>(pairs, s.n_experts);
    bytes += sum({MOE_GROUPS + MOE_GROUP_INTS * groups + pairs, std::min(rows * slots * d, std::max(kPartFloats, rows * slots * TILE_OUTPUTS))});
  }
  return bytes;
}

// Scores of the entries in front of the last position, and (twice) of their blocks, with the maxima of every 32. They grow
// with the position, and what is outgrown stays until the run is done: twice again.
int64_t select_bytes(const Shape& s, int64_t n, int64_t context) {
  int64_t most = 0;
  for (const int ratio : s.ratio)
    if (ratio > 0) most = std::max(most, groups_of(context / ratio, 32) * 32);
  if (most == 0) return 0;
  const int64_t scores = 2 * batched(most, n);
  return 2 * sum({scores, groups_of(scores, 32)});
}

}  // namespace

int64_t working_bytes(const Shape& s, int64_t n, int64_t context) {
  const int64_t c = s.n_streams, d = s.hidden;
  int64_t bytes = layer_bytes(s, n, s.window + s.index_topk) + select_bytes(s, n, context);
  bytes += sum({2 * n * s.head_dim, n * s.head_dim, n * s.index_dim, n * s.index_heads * s.index_dim});
  for (const int table : s.engram_index)
    if (table >= 0) return bytes + sum({n * s.engram_columns * s.engram_dim, n * (c + 1) * d});
  return bytes;
}

int64_t draft_working_bytes(const Shape& s, const DrafterWeights& w, int64_t block, int64_t captured) {
  const int64_t rank = w.markov_embed.cols, vocab = s.vocab;
  return layer_bytes(s, std::max(block, captured), s.window + block) +
         sum({captured * w.main_proj.cols, s.hidden + rank, vocab, groups_of(vocab, MARKOV_RUN)});
}

}  // namespace ds4::metal
