// The state of one session: packed caches, tokens, and the marks one can go back to.
//
// Window rows of all layers live in rings that are longer than the window, so that going back a little is only a
// change of position. Compressed and index rows are append-only. Everything is one reservation of address space that
// is committed as it grows. Row formats: docs/formats.md.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/backend.h"
#include "engine/shape.h"

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

class State {
 public:
  // context: tokens it can hold. retain: positions one can go back without a mark. chunk: most rows of one run.
  // extra_windows: rings beside those of the layers, window(n_layers + i); their owner fills them (the drafter).
  State(const Shape& shape, Backend& backend, int64_t context, int64_t retain, int64_t chunk, int extra_windows = 0);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  int64_t position() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t context() const { return context_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }

  RowRing window(int layer) const;
  RowRing pending(int source) const;
  uint8_t* compressed(int source) const { return compressed_[source]; }
  uint8_t* index(int source) const { return index_[source]; }

  // Before n rows are written from position(): saves what live marks still need. After: takes the tokens.
  void prepare(int64_t n);
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

  // Rows of the extra windows from this position on are what their owner wrote; it may raise it when it skips rows.
  int64_t extra_low() const { return extra_low_ > low_ ? extra_low_ : low_; }
  void raise_extra_low(int64_t position) { extra_low_ = position; }
  int n_windows() const { return static_cast<int>(windows_.size()); }

  // The live state as bytes (window rows in position order, compressed rows, index rows, open pair, tokens): equal
  // bytes mean equal futures.
  std::vector<uint8_t> live_bytes() const;
  size_t reserved_bytes() const { return bytes_; }

  // Benchmarks only (Session::fill_for_benchmark): an empty state becomes one of `position` random tokens and rows.
  void fill_for_benchmark(int64_t position, uint64_t seed);

 private:
  int64_t window_first(int64_t position) const;
  int64_t mark_first(int64_t position) const;
  void save_window(Mark& mark) const;
  bool pending_kept(int64_t position) const;
  void forget_marks_above(int64_t position);

  const Shape& shape_;
  Backend& backend_;
  const uint64_t id_;
  int64_t context_, ring_;
  uint8_t* base_ = nullptr;
  size_t bytes_ = 0;
  std::vector<uint8_t*> windows_, compressed_, index_, pending_;
  std::vector<int32_t> tokens_;
  int64_t extra_low_ = 0;
  int64_t low_ = 0;          // window rows below this position are gone
  int64_t high_ = 0;         // highest position written
  int64_t pending_low_ = 0;  // unpooled rows below this position are gone
  std::vector<std::weak_ptr<Mark>> marks_;
};

// Bytes that a session's caches take: reserved for the whole context.
struct CacheBytes {
  int64_t window = 0, compressed = 0, pending = 0;
};
CacheBytes cache_bytes(const Shape& shape, int64_t context, int64_t retain, int64_t chunk, int extra_windows = 0);

}  // namespace ds4
