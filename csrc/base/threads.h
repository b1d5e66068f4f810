// A pool of persistent workers that run one parallel loop at a time.
//
// run(n, f) calls f(i, worker) once for every i in [0, n), on the workers and on the calling thread. Which thread
// takes which index is not fixed, so f must write only what belongs to i: then the result does not depend on the
// number of threads. Loops from several threads take turns. The calling thread polls `Poll` (Ctrl-C, cancel)
// between indices; once it answers true the remaining indices are skipped and run() returns false.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace ds4 {

// Asked now and then by the thread that started the work; true stops it.
class Poll {
 public:
  virtual ~Poll() = default;
  virtual bool stop() = 0;
  // Told by the engine: `done` of `total` parts of the run are complete.
  virtual void progress(int done, int total) { (void)done, (void)total; }
};

// f32 subnormals are flushed while this lives; the previous mode comes back with it.
class FlushSubnormals {
 public:
  FlushSubnormals();
  ~FlushSubnormals();
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  uint64_t saved_;
};

class ThreadPool {
 public:
  explicit ThreadPool(int n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Deletes a pool, except in a forked child: its threads stayed in the parent, and waiting for them would never end.
  struct Deleter {
    void operator()(ThreadPool* pool) const;
  };

  int n_threads() const { return static_cast<int>(workers_.size()) + 1; }

  using Body = void (*)(void* context, int64_t index, int worker);
  bool run(int64_t n, Body body, void* context, Poll* poll);

 private:
  void work(int worker);
  void take(int worker, Poll* poll);
  static bool run_alone(int64_t n, Body body, void* context, Poll* poll);

  std::vector<std::thread> workers_;
  std::mutex turn_;   // one loop at a time
  std::mutex mutex_;  // guards the loop's description and the two conditions
  std::condition_variable start_, done_;
  std::atomic<uint64_t> generation_{0};
  int inside_ = 0;     // workers in the present loop
  bool open_ = false;  // may a worker still enter it? Closed when every index is taken: nobody waits for late risers
  std::atomic<int64_t> next_{0};
  std::atomic<bool> stop_{false};
  bool quit_ = false;
  int owner_;  // process that has the workers; a forked child has none and works alone
  int64_t n_ = 0;
  Body body_ = nullptr;
  void* context_ = nullptr;
  int spins_ = 0;
};

// Typed front of ThreadPool::run. The lambda's own type keeps every instantiation private to its file.
template <class F>
inline bool parallel_for(ThreadPool& pool, Poll* poll, int64_t n, F& f) {
  return pool.run(
      n, [](void* context, int64_t i, int worker) { (*static_cast<F*>(context))(i, worker); }, &f, poll);
}

}  // namespace ds4
