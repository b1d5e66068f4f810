// The state of one session: packed caches, tokens, and the marks one can go back to.
//
// Window rows of all layers live in rings that are longer than the window, so that going back a little is only a
// change of position. Compressed and index rows are append-only. Everything is one reservation of address space that
// is committed as it grows and shared by forks (kv/arena.h). Row formats: docs/formats.md.
//
// A state is "ready" when the window rows in front of its position are there, in every layer. One that was restored,
// went back further than its rings reach, or stopped within a long prefill, lacks those of some or all layers:
// Session::bring computes them again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/shape.h"
#include "kv/arena.h"

namespace ds4 {

// A position to come back to. It keeps its own copy of the window rows once the rings are about to overwrite them.
struct Mark {
  int64_t position = 0;
  uint64_t state = 0;            // the state it belongs to
  bool valid = true;             // false after the state was truncated below it
  std::vector<uint8_t> window;   // [windows][window rows or fewer], filled only when needed
  int64_t low = 0;               // rows below were gone in some layer when it was made
  int64_t extra_low = 0;         // State::extra_low() when it was made
  std::vector<float> pending;    // [sources][2 head_dim] at odd positions
};

// A run of bytes of the state.
struct Section {
  uint8_t* data;
  size_t bytes;
};

// Bytes on their way into the state. The first `held` of them are there already and must not be touched: what comes is
// not known to be sound before all of it was read.
struct Incoming {
  Section to;
  size_t held;
};

// Where the rows of positions begin .. end - 1 are: in an open file from `offset` on, or in memory when `data` is set.
struct PageSource {
  int64_t begin, end;
  int fd;
  int64_t offset;
  uint64_t sum;  // the XXH64 that a file's must have
  const uint8_t* data;
};

// What could not be used, by its number, and why.
struct BadSource {
  int64_t number;
  std::string why;
};

// Reads exactly so many bytes of a file. Throws StoreError when it ends early.
void read_all(int fd, int64_t offset, uint8_t* to, size_t bytes);

class State {
 public:
  // context: tokens it can hold. retain: positions one can go back without a mark. chunk: most rows of one run.
  // extra_windows: rings beside those of the layers, window(n_layers + i); their owner fills them (the drafter).
  State(const Shape& shape, Backend& backend, int64_t context, int64_t retain, int64_t chunk, int extra_windows = 0);
  // A fork: equal content, shared memory, no marks. Nobody may write to `parent` meanwhile.
  State(const State& parent, Backend& backend);
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  int64_t position() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t context() const { return context_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  // The numeric class that each token was computed in: what a replay has to use.
  const std::vector<NumericClass>& classes() const { return classes_; }

  RowRing window(int layer) const;
  RowRing pending(int source) const;
  uint8_t* compressed(int source) const { return compressed_[source]; }
  uint8_t* index(int source) const { return index_[source]; }

  // Before a run of n rows from position(): saves what live marks still need, and makes the memory that will be
  // written this state's own. Layer l gets window rows from window_from[l] on, sources compressed and unpooled rows
  // from entries_from on. After: takes the tokens.
  void prepare(int64_t n, const std::vector<int64_t>& window_from, int64_t entries_from);
  void commit(const int32_t* tokens, int64_t n, NumericClass c);
  // Instead of commit, when the run failed and its caller put the open pair's row back.
  void undo_prepare(int64_t n);

  std::shared_ptr<Mark> mark();
  void truncate(const Mark& mark);
  // Goes back to `position`, whether or not the state is ready there.
  void go_back(int64_t position);
  // Lowest position at which all window rows are kept.
  int64_t lowest() const;
  // Would the state be ready at `position` after at most one token (of an open pair) has been run again?
  bool reaches(int64_t position) const;
  bool ready() const { return ready_at(position(), shape_.n_layers); }
  // The same at an earlier position, and for the first n_layers only.
  bool ready_at(int64_t position, int n_layers) const {
    return position == 0 || (window_kept(position, n_layers) && pending_kept(position));
  }
  // Is the first row of the pair that is open at `position` there (or none open)?
  bool pending_kept(int64_t position) const;
  // For each layer the first position from which on its window rows are kept up to `position`; `position` if none.
  std::vector<int64_t> window_low(int64_t position) const;

  // ---- replay: tokens from `start` on are run again, up to the present position ----
  // Window rows of layers with kept[l] stay; those of others are forgotten.
  void begin_replay(int64_t start, const std::vector<char>& kept);
  void end_replay() {
    if (!pending_kept(position())) pending_low_ = position() - 1;
  }
  // Gives up half-way: the state holds `tokens` again, and is not ready.
  void abandon_replay(const std::vector<int32_t>& tokens, const std::vector<NumericClass>& classes, const std::vector<char>& kept);

  // ---- rows and frontiers as bytes (docs/formats-store.md) ----
  // Compressed and index rows of the entries that tokens begin .. end - 1 complete: per source, compressed then index.
  std::vector<Section> sections(int64_t begin, int64_t end) const;
  size_t rows_bytes(int64_t begin, int64_t end) const;
  void export_rows(int64_t begin, int64_t end, uint8_t* out) const;
  // A restore: keeps the rows of the first `keep` tokens, whatever comes for them, takes rows in ascending order, then
  // all the tokens. The state is not ready afterwards.
  void begin_restore(int64_t keep);
  // Says how far rows will come, so that memory is taken at once.
  void expect_rows(int64_t end);
  void import_rows(int64_t begin, int64_t end, const uint8_t* data, size_t bytes);
  // The same for several pages on several threads, while `beside` runs on the calling one. Returns the first page
  // that is damaged or ends early; rows of other pages may be there then.
  // prepare_pages makes their memory this state's own, so `beside` may write to other parts of it.
  void prepare_pages(const std::vector<PageSource>& pages);
  std::optional<BadSource> read_pages(const std::vector<PageSource>& pages, const std::function<void()>& beside);
  void finish_restore(const int32_t* tokens, const NumericClass* classes, int64_t n);
  // Window rows of the first n_layers in front of position(), the open pair's rows. Layout: window_bytes().
  size_t window_bytes(int64_t position, int n_layers) const;
  void export_window(uint8_t* out, int n_layers) const;
  // Takes them piece by piece; the state is ready(n_layers) after window_complete().
  using Reader = std::function<void(uint8_t* to, size_t bytes)>;
  void import_window(const Reader& read, int n_layers);
  void window_complete(int n_layers);
  // For such a Reader: memcpy to memory of this state, or to any other.
  void put(uint8_t* to, const uint8_t* from, size_t n) { arena_.put(to, from, n); }

  const Arena& arena() const { return arena_; }
  const Shape& shape() const { return shape_; }

  // Rows of the extra windows from this position on are what their owner wrote; it may raise it when it skips rows.
  int64_t extra_low() const { return extra_low_; }
  void raise_extra_low(int64_t position) { extra_low_ = position; }
  // Before their owner writes rows first .. first + n - 1.
  void prepare_extra(int64_t first, int64_t n);
  int n_windows() const { return static_cast<int>(windows_.size()); }

  // The live state as bytes (window rows in position order, compressed rows, index rows, open pair, tokens): equal
  // bytes mean equal futures.
  std::vector<uint8_t> live_bytes() const;
  size_t reserved_bytes() const { return arena_.bytes(); }

  // Benchmarks only (Session::fill_for_benchmark): an empty state becomes one of `position` random tokens and rows.
  void fill_for_benchmark(int64_t position, uint64_t seed);

 private:
  // Window rows low .. end - 1 of a layer are in its ring. end is position(), or more while tokens are run again.
  struct Kept {
    int64_t low = 0, end = 0;
  };

  int64_t window_first(int64_t position) const;
  int64_t mark_first(int64_t position) const;
  bool window_kept(int64_t position, int n_layers) const;
  int64_t highest_low() const;
  void keep_nothing(int64_t position);
  void save_marks_above(int64_t low);
  void lay_out(int n_windows);
  void save_window(Mark& mark) const;
  void own_ring(const RowRing& ring, int64_t first, int64_t n);
  std::vector<Incoming> incoming(int64_t begin, int64_t end) const;
  std::vector<Incoming> import_target(int64_t begin, int64_t end);
  void take_large_pages();
  void join_pages(int64_t end);
  void forget_marks_above(int64_t position);
  void keep_tokens(int64_t n);

  const Shape& shape_;
  const uint64_t id_;  // of this state alone
  int64_t context_, ring_;
  Arena arena_;
  std::vector<uint8_t*> windows_, compressed_, index_, pending_;
  std::vector<int32_t> tokens_;
  std::vector<NumericClass> classes_;  // of each token
  std::vector<Kept> kept_, kept_before_;  // [layers] now, and before the run at hand
  int64_t extra_low_ = 0;
  int64_t pending_low_ = 0;  // unpooled rows below this position are gone
  int64_t pending_before_ = 0;
  int64_t imported_ = 0;     // a restore in progress has rows of this many tokens
  int64_t held_ = 0;         // the first of them are the session's own, not from outside
  std::vector<Arena::LargePages> large_;  // that it will take
  std::vector<std::weak_ptr<Mark>> marks_;
};

// Bytes that a session's caches take: reserved for the whole context.
struct CacheBytes {
  int64_t window = 0, compressed = 0, pending = 0;
};
CacheBytes cache_bytes(const Shape& shape, int64_t context, int64_t retain, int64_t chunk, int extra_windows = 0);

}  // namespace ds4
