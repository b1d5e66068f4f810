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

// With the lock: a thread for every grain of work that waits, idle ones first, then new ones. (An idle thread that was
// woken but does not run yet still counts as idle; the work it was woken for still counts as waiting.)
void ReadPool::wake() {
  int64_t parts = 0;
  for (const Batch& b : queue_) parts += (b.n - b.next + b.grain - 1) / b.grain;
  for (int64_t i = std::min<int64_t>(parts, idle_); i > 0; --i) more_.notify_one();
  const SignalsBlocked blocked;  // a new thread has the mask of its maker
  for (int64_t missing = parts - idle_; missing > 0 && static_cast<int>(threads_.size()) < most_; --missing) {
    try {
      threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;
      return;  // the system has no more; those that run will do
    }
  }
}

void ReadPool::insert(Batch batch) {
  const auto later = [&](const Batch& b) { return b.urgency > batch.urgency; };
  queue_.insert(std::find_if(queue_.begin(), queue_.end(), later), std::move(batch));
}

void ReadPool::submit(const void* owner, Urgency urgency, int64_t n, int64_t grain, Part part) {
  if (n <= 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  insert({owner, urgency, 0, n, grain, std::move(part)});
  wake();
}

void ReadPool::promote(const void* owner, Urgency urgency) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::list<Batch> moved;
  for (auto at = queue_.begin(); at != queue_.end();) {
    const auto here = at++;
    if (here->owner == owner && here->urgency > urgency) moved.splice(moved.end(), queue_, here);
  }
  for (Batch& b : moved) {
    b.urgency = urgency;
    insert(std::move(b));
  }
}

void ReadPool::drop(const void* owner) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.remove_if([&](const Batch& b) { return b.owner == owner; });
}

void ReadPool::work() {
  ReadBuffer buffer;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    more_.wait(lock, [&] { return quit_ || !queue_.empty(); });
    --idle_;
    if (quit_) return;
    Batch& front = queue_.front();
    const int64_t first = front.next, last = std::min(front.n, first + front.grain);
    front.next = last;
    const Part part = last < front.n ? front.part : std::move(front.part);
    if (last == front.n) queue_.pop_front();
    lock.unlock();
    for (int64_t i = first; i < last; ++i) part(i, buffer);
    lock.lock();
  }
}

}  // namespace ds4
