#include "base/threads.h"

#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ds4 {

#if defined(__x86_64__)
namespace {
constexpr uint32_t kFlush = 0x8040;  // FTZ | DAZ
}
FlushSubnormals::FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(static_cast<uint32_t>(saved_) | kFlush); }
FlushSubnormals::~FlushSubnormals() { _mm_setcsr(static_cast<uint32_t>(saved_)); }
#elif defined(__aarch64__)
FlushSubnormals::FlushSubnormals() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  uint64_t on = saved_ | (1ull << 24);  // FZ
  asm volatile("msr fpcr, %0" : : "r"(on));
}
FlushSubnormals::~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
FlushSubnormals::FlushSubnormals() : saved_(0) {}
FlushSubnormals::~FlushSubnormals() = default;
#endif

namespace {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int n_threads) : owner_(getpid()) {
  const unsigned cores = std::thread::hardware_concurrency();
  // Spinning helps only when every worker has a core of its own.
  spins_ = cores != 0 && static_cast<unsigned>(n_threads) <= cores ? 4000 : 0;
  for (int i = 1; i < n_threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

void ThreadPool::Deleter::operator()(ThreadPool* pool) const {
  if (getpid() == pool->owner_) delete pool;
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    quit_ = true;
    generation_.fetch_add(1, std::memory_order_release);
  }
  start_.notify_all();
  for (auto& w : workers_) w.join();
}

void ThreadPool::take(int worker, Poll* poll) {
  for (;;) {
    if (stop_.load(std::memory_order_relaxed)) return;
    const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= n_) return;
    body_(context_, i, worker);
    if (poll != nullptr && poll->stop()) stop_.store(true, std::memory_order_relaxed);
  }
}

void ThreadPool::work(int worker) {
  FlushSubnormals flush;
  uint64_t seen = 0;
  for (;;) {
    for (int s = 0; s < spins_ && generation_.load(std::memory_order_acquire) == seen; ++s) relax();
    {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      seen = generation_.load(std::memory_order_relaxed);
      if (quit_) return;
      if (!open_) continue;
      ++inside_;
    }
    take(worker, nullptr);
    std::lock_guard<std::mutex> lock(mutex_);
    if (--inside_ == 0) done_.notify_one();
  }
}

// In a forked child: no workers, and locks that a thread of the parent may have held at the fork are held for ever.
bool ThreadPool::run_alone(int64_t n, Body body, void* context, Poll* poll) {
  FlushSubnormals flush;
  for (int64_t i = 0; i < n; ++i) {
    if (poll != nullptr && poll->stop()) return false;
    body(context, i, 0);
  }
  return true;
}

bool ThreadPool::run(int64_t n, Body body, void* context, Poll* poll) {
  if (getpid() != owner_) return run_alone(n, body, context, poll);
  std::lock_guard<std::mutex> turn(turn_);
  if (poll != nullptr && poll->stop()) return false;
  if (n <= 0) return true;
  const bool alone = n == 1 || workers_.empty();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    n_ = n;
    body_ = body;
    context_ = context;
    stop_.store(false, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    if (!alone) {
      open_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
  }
  if (!alone) start_.notify_all();
  FlushSubnormals flush;
  take(0, poll);
  if (!alone) {
    std::unique_lock<std::mutex> lock(mutex_);
    open_ = false;
    for (int s = 0; s < spins_ && inside_ != 0; ++s) {
      lock.unlock();
      relax();
      lock.lock();
    }
    done_.wait(lock, [&] { return inside_ == 0; });
  }
  return !stop_.load(std::memory_order_relaxed);
}

}  // namespace ds4
