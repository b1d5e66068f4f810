#include "engram/pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>

namespace ds4 {

namespace {

// Signals are for the threads of the program, not for these: they would only interrupt reads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

ReadPool::~ReadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    quit_ = true;
    queue_.clear();
  }
  more_.notify_all();
  for (auto& t : threads_) t.join();
}

int ReadPool::n_threads() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(threads_.size());
}

// With the lock: starts threads for the grains that wait and find nobody idle; returns how many idle ones to wake. (An
// idle thread that was woken but does not run yet still counts as idle; the work it was woken for still waits.)
int ReadPool::start_threads() {
  int64_t wanted = 0;
  for (const auto& b : queue_) wanted += std::max<int64_t>(0, b->wanted());
  const SignalsBlocked blocked;  // a new thread has the mask of its maker
  for (int64_t missing = wanted - idle_; missing > 0 && static_cast<int>(threads_.size()) < most_; --missing) {
    try {
      threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;
      break;  // the system has no more; those that run will do
    }
  }
  return static_cast<int>(std::min<int64_t>(wanted, idle_));
}

void ReadPool::insert(std::shared_ptr<Batch> batch) {
  const auto later = [&](const auto& b) { return b->urgency > batch->urgency; };
  queue_.insert(std::find_if(queue_.begin(), queue_.end(), later), std::move(batch));
}

void ReadPool::submit(const void* owner, Urgency urgency, int64_t n, Spread spread, Part part) {
  if (n <= 0) return;
  auto batch = std::make_shared<Batch>(Batch{owner, urgency, 0, n, spread, 0, std::move(part)});
  int to_wake = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    insert(std::move(batch));
    to_wake = start_threads();
  }
  // Without the lock, or all who wake would only queue for it.
  for (; to_wake > 0; --to_wake) more_.notify_one();
}

void ReadPool::promote(const void* owner, Urgency urgency) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Queue moved;
  for (auto at = queue_.begin(); at != queue_.end();) {
    const auto here = at++;
    if ((*here)->owner == owner && (*here)->urgency > urgency) moved.splice(moved.end(), queue_, here);
  }
  for (auto& b : moved) {
    b->urgency = urgency;
    insert(std::move(b));
  }
}

void ReadPool::drop(const void* owner) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.remove_if([&](const auto& b) { return b->owner == owner; });
}

// With the lock: the first batch that may have one more thread.
ReadPool::Queue::iterator ReadPool::next_batch() {
  return std::find_if(queue_.begin(), queue_.end(), [&](const auto& b) {
    return b->running < b->spread.width && (b->urgency == Urgency::step || behind_ < most_behind());
  });
}

void ReadPool::work() {
  ReadBuffer buffer;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    more_.wait(lock, [&] { return quit_ || next_batch() != queue_.end(); });
    --idle_;
    if (quit_) return;
    const auto at = next_batch();
    const std::shared_ptr<Batch> batch = *at;
    const int64_t first = batch->next, last = std::min(batch->n, first + batch->spread.grain);
    batch->next = last;
    ++batch->running;
    const int behind = batch->urgency == Urgency::step ? 0 : 1;
    behind_ += behind;
    if (last == batch->n) queue_.erase(at);
    lock.unlock();
    for (int64_t i = first; i < last; ++i) batch->part(i, buffer);
    lock.lock();
    --batch->running;
    behind_ -= behind;
  }
}

}  // namespace ds4
