// What the operations of the CPU back end take beside the activations of a run, for the memory plan: an upper bound that
// is near (tests/model/test_memory.py compares it with what a back end holds).
#include <algorithm>

#include "cpu/cpu.h"
#include "cpu/slices.h"

namespace ds4::cpu {

namespace {

// select: a query in three forms, blocks of keys in two, and for every entry its score, its block's, its number and a place to sort (two).
int64_t select_numbers(const Shape& s, int64_t entries) {
  return 2 * int64_t{s.index_heads} * s.index_dim + 40 * s.index_dim + 5 * entries + std::max(s.index_topk, s.candidate_blocks) + 256;
}

// Numbers of 4 bytes that each worker has for itself, at most.
int64_t per_worker(const Shape& s, int64_t rows, int64_t entries, int n_threads, const Ops& ops, const MatrixClass* matrix) {
  const auto product = [&](int64_t k) {
    const size_t canonical = ops.product_scratch(static_cast<int>(k));
    return static_cast<int64_t>(matrix == nullptr ? canonical : std::max(canonical, matrix->scratch(static_cast<int>(k))));
  };
  const int64_t d = s.hidden, f = s.expert_dim, hd = s.head_dim;
  const int64_t columns = std::max({int64_t{s.n_streams} * d, int64_t{s.engram_columns} * s.engram_dim,
                                    int64_t{s.o_groups} * s.o_rank, int64_t{s.group_dim()}, int64_t{s.q_rank}, f, hd});
  // moe: sums of all rows over a block of columns, beside two areas.
  const auto sums = [&](int64_t n) { return n * ((ops.block_rows(d, n_threads, static_cast<int>(n)) + 31) / 32 * 32); };
  const int64_t moe = product(std::max(d, f)) + 2 * std::max(kMoeArea, moe_area(matrix != nullptr, matrix == nullptr ? 0 : matrix->batch)) +
                      std::max(sums(rows), sums(std::min<int64_t>(rows, 8)));
  const int64_t attend = int64_t{s.window + s.index_topk} * hd + int64_t{s.n_heads} * 72 + product(hd) + 128;
  const int64_t most = std::max({product(columns), moe, select_numbers(s, entries), attend, d, int64_t{s.n_experts} * 4});
  return (most + 1023) / 1024 * 1024;
}

// Numbers of 4 bytes that an operation has for all its rows together, at most. (select with few rows: those of one row.)
int64_t shared(const Shape& s, int64_t rows, int64_t entries) {
  const int64_t slice = std::min(rows, kSliceRows), d = s.hidden, hd = s.head_dim;
  const int64_t engram = slice * (int64_t{s.engram_columns} * s.engram_dim + (s.n_streams + 1) * d);
  const int64_t index = slice * s.index_heads * s.index_dim;
  const int64_t compress = rows * (3 * hd + s.index_dim);
  const int64_t moe = int64_t{s.n_experts} * 3 + 3 + rows * (s.top_k + 1) * 2;
  return std::max({engram, index, compress, moe, select_numbers(s, entries), rows * s.mix_rows(), rows * hd});
}

}  // namespace

int64_t working_bytes(const Shape& shape, int64_t rows, int64_t context, int n_threads, bool matrix) {
  if (n_threads < 1) return 0;
  int64_t entries = 0;  // of the longest list that is scored
  for (const int ratio : shape.ratio)
    if (ratio > 0) entries = std::max(entries, context / ratio);
  int64_t most = 0;
  for (const std::string& isa : available_isas())
    most = std::max(most, per_worker(shape, rows, entries, n_threads, ops(isa), matrix ? &matrix_class(isa) : nullptr));
  return 4 * (most * n_threads + shared(shape, rows, entries));
}

int64_t draft_working_bytes(const Shape& shape, const DrafterWeights& w, int64_t block, int64_t captured, int n_threads) {
  if (n_threads < 1) return 0;
  Shape s = shape;  // nothing is compressed or selected, and no n-grams are looked up
  s.index_heads = s.index_dim = s.index_topk = s.candidate_blocks = s.engram_columns = s.engram_dim = 0;
  const int64_t d = s.hidden, hd = s.head_dim, wide = w.main_proj.cols, rank = w.markov_embed.cols;
  int64_t most = (s.window + block) * hd;  // draft_attend
  for (const std::string& isa : available_isas()) {
    const auto scratch = ops(isa).product_scratch;
    most = std::max({most, per_worker(s, block, 0, n_threads, ops(isa), nullptr),
                     static_cast<int64_t>(scratch(static_cast<int>(std::max(wide, d + rank))))});
  }
  most = (most + 1023) / 1024 * 1024;
  return 4 * (most * n_threads + std::max({shared(s, block, 0), captured * std::max(wide, hd), d + rank + int64_t{s.vocab}}));
}

}  // namespace ds4::cpu
