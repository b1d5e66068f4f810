// select: scores of the entries that a row may read, candidate blocks, and the index_topk best entries.
#include "cpu/backend.h"
#include "cpu/score.h"
#include "cpu/topk.h"

namespace ds4::cpu::DS4_ISA {

namespace {

constexpr float kMinusInf = -__builtin_inff();

// What one row needs while it is scored; lives in the worker's scratch.
struct SelectScratch {
  int32_t* query;    // [heads][dim / 2]
  KeyBlock keys;
  float* scores;     // [entries]
  float* blocks;     // [entries / block + 1]
  int32_t* entries;  // [entries] entry numbers when only some blocks are admitted
  int32_t* picked;   // [index_topk or candidate blocks]
  uint64_t* bin;     // [entries]
};

size_t aligned(size_t bytes) { return (bytes + 63) & ~static_cast<size_t>(63); }

struct Carver {
  char* at;
  template <class T>
  T* take(size_t n) {
    T* p = reinterpret_cast<T*>(at);
    at += aligned(n * sizeof(T));
    return p;
  }
};

SelectScratch carve(char* base, int heads, int dim, int64_t entries, int topk, int n_blocks, size_t* used) {
  Carver c{base};
  SelectScratch s;
  s.query = c.take<int32_t>(static_cast<size_t>(heads) * dim / 2);
  s.keys.pairs = c.take<int32_t>(static_cast<size_t>(dim) / 2 * kScoreRows);
  s.keys.scales = c.take<float>(static_cast<size_t>(dim) / 32 * kScoreRows);
  s.scores = c.take<float>(entries + kScoreRows);
  s.blocks = c.take<float>(entries + 1);
  s.entries = c.take<int32_t>(entries);
  s.picked = c.take<int32_t>(topk > n_blocks ? topk : n_blocks);
  s.bin = c.take<uint64_t>(entries + 1);
  *used = static_cast<size_t>(c.at - base);
  return s;
}

}  // namespace

void CpuBackend::select(const SelectArgs& a) {
  const int heads = s_.index_heads, dim = s_.index_dim, topk = s_.index_topk;
  const int bs = s_.candidate_block_size, nb = s_.candidate_blocks;
  const int row_bytes = s_.index_row_bytes();
  const int64_t most = (a.position + a.n) / a.ratio;
  PairTable table;
  fill_pair_table(table);
  size_t bytes = 0;
  carve(nullptr, heads, dim, most, topk, nb, &bytes);
  need_scratch(bytes / sizeof(float) + 16);

  loop(a.n, [&](int64_t i, int worker) {
    size_t used;
    SelectScratch t = carve(reinterpret_cast<char*>(scratch(worker)), heads, dim, most, topk, nb, &used);
    const int64_t visible = (a.position + i + 1) / a.ratio;
    int32_t* selected = a.selected + i * topk;

    // The entries to score: every visible one, or those of the admitted blocks.
    int64_t m = visible;
    const bool some = a.use_blocks != nullptr;
    if (some) {
      m = 0;
      const int32_t* blocks = a.use_blocks + i * nb;
      for (int32_t b = 0; b < a.n_use_blocks[i]; ++b)
        for (int64_t j = static_cast<int64_t>(blocks[b]) * bs; j < (blocks[b] + 1LL) * bs && j < visible; ++j)
          t.entries[m++] = static_cast<int32_t>(j);
    }
    // Nothing to choose: all of them, unscored.
    const bool blocks_wanted = a.made_blocks != nullptr && visible > static_cast<int64_t>(nb) * bs;
    if (m <= topk && !blocks_wanted && a.scores_out == nullptr) {
      for (int64_t j = 0; j < m; ++j) selected[j] = some ? t.entries[j] : static_cast<int32_t>(j);
      a.n_selected[i] = static_cast<int32_t>(m);
    } else {
      const int8_t* codes = a.codes + i * heads * dim;
      for (int p = 0; p < heads * dim / 2; ++p) {
        const uint32_t lo = static_cast<uint16_t>(static_cast<int16_t>(codes[2 * p]));
        t.query[p] = static_cast<int32_t>(lo | (static_cast<uint32_t>(static_cast<int32_t>(codes[2 * p + 1])) << 16));
      }
      for (int64_t j = 0; j < m; j += kScoreRows) {
        const int c = m - j < kScoreRows ? static_cast<int>(m - j) : kScoreRows;
        const uint8_t* rows[kScoreRows];
        for (int e = 0; e < c; ++e) rows[e] = a.index_rows + (some ? t.entries[j + e] : j + e) * row_bytes;
        load_keys(table, rows, c, dim, t.keys);
        score_keys(t.keys, t.query, a.scales + i * heads * (dim / 32), a.weights + i * heads, heads, dim, round_,
                   t.scores + j);
      }
      if (a.scores_out != nullptr)
        for (int64_t j = 0; j < m; ++j) a.scores_out[i * a.scores_stride + (some ? t.entries[j] : j)] = t.scores[j];
      const int64_t got = top_k(t.scores, m, topk, t.picked, t.bin);
      for (int64_t j = 0; j < got; ++j) selected[j] = some ? t.entries[t.picked[j]] : t.picked[j];
      a.n_selected[i] = static_cast<int32_t>(got);
    }
    if (a.made_blocks == nullptr) return;
    int32_t* made = a.made_blocks + i * nb;
    const int64_t n_visible_blocks = (visible + bs - 1) / bs;
    if (!blocks_wanted) {
      for (int64_t b = 0; b < n_visible_blocks; ++b) made[b] = static_cast<int32_t>(b);
      a.n_made_blocks[i] = static_cast<int32_t>(n_visible_blocks);
      return;
    }
    for (int64_t b = 0; b < n_visible_blocks; ++b) {
      float best = kMinusInf;
      for (int64_t j = b * bs; j < (b + 1) * bs && j < visible; ++j) best = ds4_max(best, t.scores[j]);
      t.blocks[b] = best;
    }
    t.blocks[(visible - 1) / bs] = __builtin_inff();
    a.n_made_blocks[i] = static_cast<int32_t>(top_k(t.blocks, n_visible_blocks, nb, made, t.bin));
  });
}

}  // namespace ds4::cpu::DS4_ISA
