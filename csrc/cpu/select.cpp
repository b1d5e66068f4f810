// select: scores of the entries that a row may read, candidate blocks, and the index_topk best entries.
#include "cpu/backend.h"
#include "cpu/score.h"
#include "cpu/score_folded.h"
#include "cpu/topk.h"

namespace ds4::cpu::DS4_ISA {

namespace {

constexpr float kMinusInf = -__builtin_inff();

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

// The query of one row, as the scoring kernels read it.
struct Query {
  int32_t* pairs;  // [heads][dim / 2] of int16
#if defined(DS4_ISA_AVX512)
  ByteQuery* bytes;  // [heads / 4][dim / 32], instead of pairs and scales
  FoldedQuad* quads;  // [heads / 4], instead of those as long as keys fit
  bool folds;
#endif
  const float* scales;
  const float* weights;
};

// What scoring a run of entries needs, for each worker.
struct ScoreScratch {
  KeyBlock keys[2];
#if defined(DS4_ISA_AVX512)
  FoldedKeys* folded[2];  // two blocks that are scored and two that come next
  FoldedQuad* quads;      // a copy of the query's, beside them: caches look at parts of addresses
#endif
};

// What choosing among the scores of one row needs.
struct RowScratch {
  float* scores;     // [entries]
  float* blocks;     // [entries / block + 1]
  int32_t* entries;  // [entries] entry numbers when only some blocks are admitted
  int32_t* picked;   // [index_topk or candidate blocks]
  uint64_t* bin;     // [entries + 1]
};

Query carve_query(Carver& c, int heads, int dim) {
  Query q{};
  q.pairs = c.take<int32_t>(static_cast<size_t>(heads) * dim / 2);
#if defined(DS4_ISA_AVX512)
  q.bytes = c.take<ByteQuery>(static_cast<size_t>(heads) / 4 * dim / 32);
  if (dim == kFoldDim) q.quads = c.take<FoldedQuad>(static_cast<size_t>(heads) / 4);
#endif
  return q;
}

ScoreScratch carve_score(Carver& c, int heads, int dim) {
  ScoreScratch s{};
  for (KeyBlock& keys : s.keys) {
    keys.pairs = c.take<int32_t>(static_cast<size_t>(dim) / 2 * kScoreRows);
    keys.scales = c.take<float>(static_cast<size_t>(dim) / 32 * kScoreRows);
  }
#if defined(DS4_ISA_AVX512)
  if (dim == kFoldDim) {
    for (FoldedKeys*& keys : s.folded) keys = c.take<FoldedKeys>(2);
    s.quads = c.take<FoldedQuad>(static_cast<size_t>(heads) / 4);
  }
#else
  (void)heads;
#endif
  return s;
}

RowScratch carve_row(Carver& c, int64_t entries, int topk, int n_blocks) {
  RowScratch s{};
  s.scores = c.take<float>(entries + kScoreRows);
  s.blocks = c.take<float>(entries + 1);
  s.entries = c.take<int32_t>(entries);
  s.picked = c.take<int32_t>(topk > n_blocks ? topk : n_blocks);
  s.bin = c.take<uint64_t>(entries + 1);
  return s;
}

// One call's constants.
struct Selection {
  const SelectArgs& a;
  int heads, dim, topk, block, n_blocks, row_bytes;
  bool round, bytes, folded;
  PairTable table;

  int64_t visible(int64_t i) const { return (a.position + i + 1) / a.ratio; }
  bool some() const { return a.use_blocks != nullptr; }
  bool blocks_wanted(int64_t i) const {
    return a.made_blocks != nullptr && visible(i) > static_cast<int64_t>(n_blocks) * block;
  }

  // The entries to score: every visible one, or those of the admitted blocks, which are listed.
  int64_t admitted(int64_t i, int32_t* entries) const {
    const int64_t seen = visible(i);
    if (!some()) return seen;
    int64_t m = 0;
    const int32_t* blocks = a.use_blocks + i * n_blocks;
    for (int32_t b = 0; b < a.n_use_blocks[i]; ++b)
      for (int64_t j = static_cast<int64_t>(blocks[b]) * block; j < (blocks[b] + 1LL) * block && j < seen; ++j)
        entries[m++] = static_cast<int32_t>(j);
    return m;
  }

  // Nothing to choose: all of them, unscored.
  bool all(int64_t i, int64_t m) const { return m <= topk && !blocks_wanted(i) && a.scores_out == nullptr; }

  void make_query(int64_t i, Query& q) const {
    const int8_t* codes = a.codes + i * heads * dim;
    q.scales = a.scales + i * heads * (dim / 32);
    q.weights = a.weights + i * heads;
#if defined(DS4_ISA_AVX512)
    q.folds = bytes && folded && fold_query(codes, q.scales, q.weights, heads, q.quads);
    if (bytes) return byte_query(codes, q.scales, heads, dim, q.bytes);
#endif
    for (int p = 0; p < heads * dim / 2; ++p) {
      const uint32_t lo = static_cast<uint16_t>(static_cast<int16_t>(codes[2 * p]));
      q.pairs[p] = static_cast<int32_t>(lo | (static_cast<uint32_t>(static_cast<int32_t>(codes[2 * p + 1])) << 16));
    }
  }

  const uint8_t* row_of(const int32_t* entries, int64_t j) const { return a.index_rows + (some() ? entries[j] : j) * row_bytes; }

  // The rows of the admitted entries j .. j + 15, as many of them as lie before j1; returns how many. Those two blocks on
  // are fetched: two cores that read rows as they need them wait for memory a fifth of the time.
  int rows_at(const int32_t* entries, int64_t j, int64_t j1, const uint8_t** rows) const {
    const int c = j1 - j < kScoreRows ? static_cast<int>(j1 - j) : kScoreRows;
    for (int e = 0; e < c; ++e) rows[e] = row_of(entries, j + e);
    for (int64_t e = j + 2 * kScoreRows; e < j + 3 * kScoreRows && e < j1; ++e) __builtin_prefetch(row_of(entries, e));
    return c;
  }

#if defined(DS4_ISA_AVX512)
  // The rows of the admitted entries j .. j + 31, more than 16 of which lie before j1; the last one stands for the others.
  // Those of three calls on are fetched.
  void pair_at(const int32_t* entries, int64_t j, int64_t j1, FoldRows& rows) const {
    for (int64_t e = 0; e < 2 * kScoreRows; ++e)
      rows.row[e / kScoreRows][e % kScoreRows] = row_of(entries, j + e < j1 ? j + e : j1 - 1);
    const int64_t a = j + 6 * kScoreRows, b = a + 2 * kScoreRows;
    if (b >= j1) return;
    if (some())
      for (int64_t e = a; e < b; ++e) __builtin_prefetch(row_of(entries, e), 0, 2);
    else
      for (const uint8_t* p = row_of(entries, a); p < row_of(entries, b); p += 64) __builtin_prefetch(p, 0, 2);
  }

  // score() by folded scales, two blocks at a time as long as there is more than one; returns where it stopped.
  int64_t score_pairs(const Query& q, const int32_t* entries, int64_t j0, int64_t j1, const ScoreScratch& t, float* scores) const {
    const Rounding rounding = folded_rounding(round);
    FoldRows rows[2];
    int64_t j = j0;
    if (j1 - j <= kScoreRows) return j;
    std::memcpy(t.quads, q.quads, static_cast<size_t>(heads) / 4 * sizeof(FoldedQuad));
    pair_at(entries, j, j1, rows[0]);
    fold_rows(rows[0], t.folded[0]);
    for (int now = 0; j1 - j > kScoreRows; j += 2 * kScoreRows, now ^= 1) {
      const bool more = j1 - j > 3 * kScoreRows;
      if (more) pair_at(entries, j + 2 * kScoreRows, j1, rows[now ^ 1]);
      const FoldedKeys* keys = t.folded[now];
      FoldedKeys* next = more ? t.folded[now ^ 1] : nullptr;
      if (keys[0].fits && keys[1].fits) {
        score_folded(rounding, keys, t.quads, heads, next, rows[now ^ 1], scores + j);
        continue;
      }
      for (int b = 0; b < 2; ++b) load_byte_keys(rows[now].row[b], kScoreRows, dim, t.keys[b]);
      score_byte_keys<2>(t.keys, q.bytes, q.weights, heads, dim, round, scores + j);
      if (more) fold_rows(rows[now ^ 1], next);
    }
    return j;
  }
#endif

  // Scores of the admitted entries j0 .. j1 - 1 (j0 a multiple of 16); writes up to 15 scores more.
  void score(const Query& q, const int32_t* entries, int64_t j0, int64_t j1, const ScoreScratch& t, float* scores) const {
    const uint8_t* rows[kScoreRows];
    int64_t j = j0;
#if defined(DS4_ISA_AVX512)
    if (q.folds) j = score_pairs(q, entries, j, j1, t, scores);
    if (bytes) {
      for (; j1 - j > kScoreRows; j += 2 * kScoreRows) {
        for (int b = 0; b < 2; ++b) load_byte_keys(rows, rows_at(entries, j + b * kScoreRows, j1, rows), dim, t.keys[b]);
        score_byte_keys<2>(t.keys, q.bytes, q.weights, heads, dim, round, scores + j);
      }
      if (j < j1) {
        load_byte_keys(rows, rows_at(entries, j, j1, rows), dim, t.keys[0]);
        score_byte_keys<1>(t.keys, q.bytes, q.weights, heads, dim, round, scores + j);
      }
      return;
    }
#endif
    for (; j < j1; j += kScoreRows) {
      load_keys(table, rows, rows_at(entries, j, j1, rows), dim, t.keys[0]);
      score_keys(t.keys[0], q.pairs, q.scales, q.weights, heads, dim, round, scores + j);
    }
  }

  // The best of m scored entries (or all of them, unscored), and the candidate blocks.
  void choose(int64_t i, int64_t m, const RowScratch& t) const {
    int32_t* selected = a.selected + i * topk;
    if (all(i, m)) {
      for (int64_t j = 0; j < m; ++j) selected[j] = some() ? t.entries[j] : static_cast<int32_t>(j);
      a.n_selected[i] = static_cast<int32_t>(m);
    } else {
      if (a.scores_out != nullptr)
        for (int64_t j = 0; j < m; ++j) a.scores_out[i * a.scores_stride + (some() ? t.entries[j] : j)] = t.scores[j];
      const int64_t got = top_k(t.scores, m, topk, t.picked, t.bin);
      for (int64_t j = 0; j < got; ++j) selected[j] = some() ? t.entries[t.picked[j]] : t.picked[j];
      a.n_selected[i] = static_cast<int32_t>(got);
    }
    if (a.made_blocks != nullptr) choose_blocks(i, t);
  }

  void choose_blocks(int64_t i, const RowScratch& t) const {
    int32_t* made = a.made_blocks + i * n_blocks;
    const int64_t seen = visible(i), n_visible = (seen + block - 1) / block;
    if (!blocks_wanted(i)) {
      for (int64_t b = 0; b < n_visible; ++b) made[b] = static_cast<int32_t>(b);
      a.n_made_blocks[i] = static_cast<int32_t>(n_visible);
      return;
    }
    for (int64_t b = 0; b < n_visible; ++b) {
      float best = kMinusInf;
      for (int64_t j = b * block; j < (b + 1) * block && j < seen; ++j) best = ds4_max(best, t.scores[j]);
      t.blocks[b] = best;
    }
    t.blocks[(seen - 1) / block] = __builtin_inff();
    a.n_made_blocks[i] = static_cast<int32_t>(top_k(t.blocks, n_visible, n_blocks, made, t.bin));
  }
};

bool byte_dots(int heads) {
#if defined(DS4_ISA_AVX512)
  return heads % 4 == 0 && has_byte_dots();
#else
  (void)heads;
  return false;
#endif
}

bool folded_dots(int heads, int dim) {
#if defined(DS4_ISA_AVX512)
  return byte_dots(heads) && dim == kFoldDim && has_folded_scores();
#else
  (void)heads, (void)dim;
  return false;
#endif
}

}  // namespace

void CpuBackend::select(const SelectArgs& a) {
  const int heads = s_.index_heads, dim = s_.index_dim;
  const int64_t most = (a.position + a.n) / a.ratio;
  Selection s{a,      heads,          dim,    s_.index_topk, s_.candidate_block_size, s_.candidate_blocks, s_.index_row_bytes(),
              round_, byte_dots(heads), folded_dots(heads, dim), {}};
  fill_pair_table(s.table);
  const auto layout = [&](char* base, Query& q, ScoreScratch& t, RowScratch& r, bool with_row) {
    Carver c{base};
    q = carve_query(c, heads, dim);
    t = carve_score(c, heads, dim);
    if (with_row) r = carve_row(c, most, s.topk, s.n_blocks);
    return static_cast<size_t>(c.at - base);
  };
  Query q;
  ScoreScratch t;
  RowScratch r{};
  if (a.n >= 2 * pool_->n_threads()) {  // a row is a task
    need_scratch(layout(nullptr, q, t, r, true) / sizeof(float) + 16);
    loop(a.n, [&](int64_t i, int worker) {
      Query wq;
      ScoreScratch wt;
      RowScratch wr{};
      layout(reinterpret_cast<char*>(scratch(worker)), wq, wt, wr, true);
      const int64_t m = s.admitted(i, wr.entries);
      if (!s.all(i, m)) {
        s.make_query(i, wq);
        s.score(wq, wr.entries, 0, m, wt, wr.scores);
      }
      s.choose(i, m, wr);
    });
    return;
  }
  // Few rows: the entries of each are shared among the threads.
  need_scratch(layout(nullptr, q, t, r, false) / sizeof(float) + 16);
  const size_t bytes = layout(nullptr, q, t, r, true);
  layout(reinterpret_cast<char*>(need_temp(bytes / sizeof(float) + 16)), q, t, r, true);
  constexpr int64_t kPiece = 1024;
  for (int64_t i = 0; i < a.n; ++i) {
    const int64_t m = s.admitted(i, r.entries);
    if (!s.all(i, m)) {
      s.make_query(i, q);
      loop((m + kPiece - 1) / kPiece, [&](int64_t piece, int worker) {
        Query unused;
        ScoreScratch wt;
        RowScratch none{};
        layout(reinterpret_cast<char*>(scratch(worker)), unused, wt, none, false);
        const int64_t j0 = piece * kPiece, j1 = j0 + kPiece < m ? j0 + kPiece : m;
        s.score(q, r.entries, j0, j1, wt, r.scores);
      });
    }
    s.choose(i, m, r);
  }
}

}  // namespace ds4::cpu::DS4_ISA
