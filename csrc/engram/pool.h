// Threads that wait for the disk, so that nobody else has to.
//
// Work comes as batches of parts. Urgent batches go first, in order of arrival within one urgency; the parts of a batch
// run on any threads in any order, on at most so many at a time as the batch says; half of the threads work for steps
// alone. Threads are started when there is
// work for them and nobody is idle: a table in memory, or a cache that has everything, never starts one. They take no
// signals and know nothing of Python.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engram/table.h"

namespace ds4 {

// Lower goes first.
enum class Urgency : uint8_t { step, chunk, ahead };

class ReadPool {
 public:
  using Part = std::function<void(int64_t index, ReadBuffer& buffer)>;  // must not throw

  explicit ReadPool(int most_threads) : most_(most_threads) {}
  ~ReadPool();  // drops what is queued, waits for the parts that run. Not in a forked child: see LeakInFork
  ReadPool(const ReadPool&) = delete;
  ReadPool& operator=(const ReadPool&) = delete;

  // How parts are handed out: `grain` neighbours at a time to one thread, to at most `width` threads at the same time.
  struct Spread {
    int64_t grain = 1;
    int width = 1;
  };

  // Runs part(i, buffer) for i in 0 .. n - 1. owner: for promote and drop.
  void submit(const void* owner, Urgency urgency, int64_t n, Spread spread, Part part);
  void promote(const void* owner, Urgency urgency);
  void drop(const void* owner);  // what has not begun never runs

  int n_threads() const;  // started so far
  int most_threads() const { return most_; }

 private:
  struct Batch {
    const void* owner;
    Urgency urgency;
    int64_t next, n;
    Spread spread;
    int running;  // threads that work on it
    Part part;
    int64_t grains_left() const { return (n - next + spread.grain - 1) / spread.grain; }
    int64_t wanted() const { return std::min<int64_t>(grains_left(), spread.width - running); }  // more threads
  };
  using Queue = std::list<std::shared_ptr<Batch>>;
  void work();
  int start_threads();
  void insert(std::shared_ptr<Batch> batch);
  Queue::iterator next_batch();
  int most_behind() const { return std::max(1, most_ / 2); }

  const int most_;
  mutable std::mutex mutex_;
  std::condition_variable more_;
  Queue queue_;  // by urgency, then by arrival; what has parts that nobody took
  std::vector<std::thread> threads_;
  int idle_ = 0;
  int behind_ = 0;  // threads that work for something else than a step
  bool quit_ = false;
};

}  // namespace ds4
