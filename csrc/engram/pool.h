// Threads that wait for the disk, so that nobody else has to.
//
// Work comes as batches of parts. Urgent batches go first, in order of arrival within one urgency; the parts of a batch
// run on any threads in any order. Threads are started when there is work for them and nobody is idle: a table in
// memory, or a cache that has everything, never starts one. They take no signals and know nothing of Python.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
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

  // Runs part(i, buffer) for i in 0 .. n - 1, `grain` neighbours at a time on one thread. owner: for promote and drop.
  void submit(const void* owner, Urgency urgency, int64_t n, int64_t grain, Part part);
  void promote(const void* owner, Urgency urgency);
  void drop(const void* owner);  // what has not begun never runs

  int n_threads() const;  // started so far
  int most_threads() const { return most_; }

 private:
  struct Batch {
    const void* owner;
    Urgency urgency;
    int64_t next, n, grain;
    Part part;
  };
  void work();
  void wake();
  void insert(Batch batch);

  const int most_;
  mutable std::mutex mutex_;
  std::condition_variable more_;
  std::list<Batch> queue_;  // by urgency, then by arrival
  std::vector<std::thread> threads_;
  int idle_ = 0;
  bool quit_ = false;
};

}  // namespace ds4
