// The state of one session: packed caches, tokens, and the marks one can go back to.
//
// Window rows of all layers live in rings that are longer than the window, so that going back a little is only a
// change of position. Compressed and index rows are append-only. Everything is one reservation of address space that
// is committed as it grows and shared by forks (kv/arena.h). Row formats: docs/formats.md.
//
// A state is "ready" when the window rows in front of its position are there. One that was restored or went back
// further than its rings reach may lack them for a while: Session::replay computes them again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
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
  int64_t low = 0;               // rows below were gone when it was made
  int64_t extra_low = 0;         // State::extra_low() when it was made
  std::vector<float> pending;    // [sources][2 head_dim] at odd positions
};

// A run of bytes of the state.
struct Section {
  uint8_t* data;
  size_t bytes;
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

  RowRing window(int layer) const;
  RowRing pending(int source) const;
  uint8_t* compressed(int source) const { return compressed_[source]; }
  uint8_t* index(int source) const { return index_[source]; }

  // Before n rows are written from position(): saves what live marks still need, and makes the memory this state's
  // own (entries: the compressed and index rows too). After: takes the tokens.
  void prepare(int64_t n, bool entries = true);
  void commit(const int32_t* tokens, int64_t n);
  // After a failed run whose caller put the open pair's row back.
  void keep_pending() { pending_low_ = position() % 2 == 1 ? position() - 1 : position(); }

  std::shared_ptr<Mark> mark();
  // Goes back to `position`. Returns how many tokens must be run again (0 or 1) because an open pair's first row is
  // gone; they are removed from the state. Throws StateError when the window rows are gone.
  int truncate(int64_t position);
  int truncate(const Mark& mark);
  // Marks above the present position are void: what follows may differ from what they stood on.
  void forget_marks_above_here() { forget_marks_above(position()); }
  // Lowest position that truncate(position) can reach.
  int64_t lowest() const;
  bool reaches(int64_t position) const;
  bool ready() const { return position() == 0 || window_first(position()) >= low_; }

  // ---- replay: window rows of `position` computed again from position `start` on, all compressed rows kept ----
  // First position from which every layer's rows at `position` can be computed again, exactly.
  int64_t replay_start(int64_t position) const;
  void begin_replay(int64_t start, int64_t position);
  void end_replay();
  // Gives up half-way: the state holds `tokens`, and is not ready.
  void abandon_replay(const std::vector<int32_t>& tokens);

  // ---- rows and frontiers as bytes (docs/formats-store.md) ----
  // Compressed and index rows of the entries that tokens begin .. end - 1 complete: per source, compressed then index.
  std::vector<Section> sections(int64_t begin, int64_t end) const;
  size_t rows_bytes(int64_t begin, int64_t end) const;
  void export_rows(int64_t begin, int64_t end, uint8_t* out) const;
  // A restore: keeps the rows of the first `keep` tokens, takes rows in ascending order, then all the tokens. The
  // state is not ready afterwards.
  void begin_restore(int64_t keep);
  // Says how far rows will come, so that memory is taken at once.
  void expect_rows(int64_t end);
  void import_rows(int64_t begin, int64_t end, const uint8_t* data, size_t bytes);
  // The same from an open file; returns the XXH64 of what was read. Throws StoreError when the file ends early.
  uint64_t read_rows(int fd, int64_t offset, int64_t begin, int64_t end);
  void finish_restore(const int32_t* tokens, int64_t n);
  // Window rows in front of position(), the open pair's rows. Layout: window_bytes().
  size_t window_bytes(int64_t position) const;
  void export_window(uint8_t* out) const;
  // Takes them piece by piece; the state is ready after window_complete().
  using Reader = std::function<void(uint8_t* to, size_t bytes)>;
  void import_window(const Reader& read);
  void window_complete();

  const Arena& arena() const { return arena_; }
  const Shape& shape() const { return shape_; }

  // Rows of the extra windows from this position on are what their owner wrote; it may raise it when it skips rows.
  int64_t extra_low() const { return extra_low_ > low_ ? extra_low_ : low_; }
  void raise_extra_low(int64_t position) { extra_low_ = position; }
  // Before their owner writes rows first .. first + n - 1.
  void prepare_extra(int64_t first, int64_t n) {
    for (int l = shape_.n_layers; l < n_windows(); ++l) own_ring(window(l), first, n);
  }
  int n_windows() const { return static_cast<int>(windows_.size()); }

  // The live state as bytes (window rows in position order, compressed rows, index rows, open pair, tokens): equal
  // bytes mean equal futures.
  std::vector<uint8_t> live_bytes() const;
  size_t reserved_bytes() const { return arena_.bytes(); }

  // Benchmarks only (Session::fill_for_benchmark): an empty state becomes one of `position` random tokens and rows.
  void fill_for_benchmark(int64_t position, uint64_t seed);

 private:
  int64_t window_first(int64_t position) const;
  int64_t mark_first(int64_t position) const;
  void lay_out(int n_windows);
  void save_window(Mark& mark) const;
  void save_marks();
  void own_ring(const RowRing& ring, int64_t first, int64_t n);
  std::vector<Section> import_target(int64_t begin, int64_t end);
  bool pending_kept(int64_t position) const;
  void forget_marks_above(int64_t position);

  const Shape& shape_;
  const uint64_t id_;  // of this state alone
  int64_t context_, ring_;
  Arena arena_;
  std::vector<uint8_t*> windows_, compressed_, index_, pending_;
  std::vector<int32_t> tokens_;
  int64_t extra_low_ = 0;
  int64_t low_ = 0;          // window rows below this position are gone
  int64_t high_ = 0;         // highest position written
  int64_t pending_low_ = 0;  // unpooled rows below this position are gone
  int64_t imported_ = 0;     // a restore in progress has rows of this many tokens
  std::vector<std::weak_ptr<Mark>> marks_;
};

// Bytes that a session's caches take: reserved for the whole context.
struct CacheBytes {
  int64_t window = 0, compressed = 0, pending = 0;
};
CacheBytes cache_bytes(const Shape& shape, int64_t context, int64_t retain, int64_t chunk, int extra_windows = 0);

}  // namespace ds4
