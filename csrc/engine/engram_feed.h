// The Engram rows of one session: asked for when the tokens of a run are known, there when a layer wants them.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/backend.h"
#include "engine/model.h"

namespace ds4 {

struct FeedCounters {
  double wait_seconds = 0;  // that layers waited for rows, or the host after it had issued a run: what the disk cost
  int64_t runs = 0;
  int64_t expected = 0;  // requests that were right and had begun during the run before
  int64_t joined = 0;    // requests that the device waited for itself
};

// The rows of one table for a run: [n][columns][row bytes].
struct FedRows {
  const uint8_t* data;
  double waited;   // seconds that the layer stood still for them
  double hidden;   // seconds that they were on their way behind other work
  int64_t bytes;   // that came from disk
};

class EngramFeed {
 public:
  EngramFeed(const Model& model, Backend& backend) : model_(model), backend_(backend) {}
  ~EngramFeed();
  EngramFeed(const EngramFeed&) = delete;
  EngramFeed& operator=(const EngramFeed&) = delete;

  // line: `history` tokens before the run, the n of the run, n_ahead that are expected after it. Asks for the rows of
  // all tables, those of the run first.
  void begin(const int32_t* line, int64_t history, int64_t n, int64_t n_ahead);
  // The run's rows of a table, valid until the next begin(). Throws EngramError, Cancelled. With `behind`, a device that
  // can do so waits for them itself: what is issued from now on runs behind them, and they count only after settle().
  FedRows take(int table, bool behind, Poll* poll);
  // Before anybody waits for the device: all rows of the run are there. Throws EngramError, Cancelled.
  void settle(Poll* poll);
  // Nothing that was asked for is wanted any more, and no device waits for it; before Backend::abandon().
  void abandon();

  size_t bytes() const;
  const FeedCounters& counters() const { return counters_; }

 private:
  struct Slot {
    uint8_t* data = nullptr;
    size_t bytes = 0;
    Engram::Ticket ticket;
    Latch* latch = nullptr;  // closed until the rows are there
  };
  void ask(int table, std::vector<int64_t> rows, Slot& slot, Urgency urgency);
  void release(Slot& slot);
  void reserve(Slot& slot, size_t bytes);

  const Model& model_;
  Backend& backend_;
  std::vector<Slot> now_, next_;  // [tables] of this run, and of the one that is expected
  bool step_ = false;  // the run is a step or a verification
  FeedCounters counters_;
};

// Bytes for runs of n tokens that follow each other.
int64_t feed_bytes(const Shape& shape, int64_t n);

}  // namespace ds4
