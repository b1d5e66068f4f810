// select: scores with the maxima of every 32, then the best entries and the candidate blocks; in batches of rows, so that
// the scores of a long prefill at depth fit into a few megabytes.
#include "select.h"

#include <algorithm>

#include "metal_host/backend.h"
#include "metal_host/products.h"

namespace ds4::metal {

namespace {
}  // namespace

void MetalBackend::select(const SelectArgs& a) {
  const int heads = s_.index_heads, dim = s_.index_dim, topk = s_.index_topk, n_blocks = s_.candidate_blocks, block = s_.candidate_block_size;
  const bool makes = a.made_blocks != nullptr, uses = a.use_blocks != nullptr, shows = a.scores_out != nullptr;
  const int64_t seen = (a.position + a.n) / a.ratio, chosen = static_cast<int64_t>(n_blocks) * block;  // of the last row
  const int64_t most = uses ? std::min(seen, chosen) : seen;
  const bool wanted = makes && seen > chosen;
  const bool scoring = most > 0 && (most > topk || wanted || shows);
  const int64_t stride = groups_of(std::max<int64_t>(most, 1), 32) * 32, sets = stride / 32;
  const int64_t batch = scoring ? std::clamp<int64_t>(kBatchBytes / (stride * 4), 1, a.n) : a.n;
  float* scores = scoring ? temp<float>(Temp::select_scores, batch * stride * (wanted ? 2 : 1)) : nullptr;
  uint32_t* maxima = scoring ? temp<uint32_t>(Temp::select_keys, batch * sets * (wanted ? 2 : 1)) : nullptr;
  float* values = wanted ? scores + batch * stride : nullptr;  // of candidate blocks
  uint32_t* value_maxima = wanted ? maxima + batch * sets : nullptr;

  SelectParams p{};
  p.position = static_cast<uint32_t>(a.position);
  p.ratio = static_cast<uint32_t>(a.ratio);
  p.heads = static_cast<uint32_t>(heads);
  p.dim = static_cast<uint32_t>(dim);
  p.row_bytes = static_cast<uint32_t>(s_.index_row_bytes());
  p.topk = static_cast<uint32_t>(topk);
  p.block = static_cast<uint32_t>(block);
  p.n_blocks = static_cast<uint32_t>(n_blocks);
  p.stride = static_cast<uint32_t>(stride);
  p.makes = makes ? 1 : 0;
  p.uses = uses ? 1 : 0;
  p.shows = shows ? 1 : 0;
  p.show_stride = static_cast<uint32_t>(a.scores_stride);
  const int64_t n = a.n, groups_of_query = dim / 32;
  for (int64_t i = 0; i < n; i += batch) {
    const int64_t rows = std::min(batch, n - i);
    p.first_row = static_cast<uint32_t>(i);
    const Argument use = reads(a.use_blocks, uses ? n * n_blocks : 0), n_use = reads(a.n_use_blocks, uses ? n : 0);
    if (scoring)
      encode("select_scores", {}, p,
             {reads(a.codes, n * heads * dim), reads(a.scales, n * heads * groups_of_query), reads(a.weights, n * heads),
              reads(a.index_rows, seen * s_.index_row_bytes()), use, n_use, writes(scores, rows * stride), writes(maxima, rows * sets),
              writes(a.scores_out, shows ? n * a.scores_stride : 0)},
             {groups_of(most, SELECT_THREADS), rows}, SELECT_THREADS,
             SCORE_HEADS * static_cast<size_t>(dim + groups_of_query + 1) * sizeof(float));
    if (wanted)
      encode("select_blocks", {}, p, {reads(scores, rows * stride), writes(values, rows * stride), writes(value_maxima, rows * sets)},
             {groups_of(groups_of(seen, block), SELECT_THREADS), rows}, SELECT_THREADS);
    encode("select_entries", {}, p,
           {reads(scores, scoring ? rows * stride : 0), reads(maxima, scoring ? rows * sets : 0), use, n_use,
            writes(a.selected, n * topk), writes(a.n_selected, n)},
           {rows}, CHOOSE_THREADS, CHOOSE_WORDS * 4);
    if (makes)
      encode("select_candidates", {}, p,
             {reads(values, wanted ? rows * stride : 0), reads(value_maxima, wanted ? rows * sets : 0), writes(a.made_blocks, n * n_blocks),
              writes(a.n_made_blocks, n)},
             {rows}, CHOOSE_THREADS, CHOOSE_WORDS * 4);
    breathe(a.n);
  }
}

}  // namespace ds4::metal
