#include "engram/request.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"

namespace ds4 {

void Request::sort() {
  std::vector<std::pair<int64_t, int32_t>> order;
  order.reserve(rows_.size());
  for (size_t i = 0; i < rows_.size(); ++i) order.emplace_back(rows_[i], static_cast<int32_t>(i));
  std::sort(order.begin(), order.end());
  places_.reserve(order.size());
  wanted_.reserve(order.size());
  for (const auto& [row, place] : order) {
    if (wanted_.empty() || wanted_.back().row != row)
      wanted_.push_back({row, static_cast<int32_t>(places_.size()), 0});
    ++wanted_.back().n;
    places_.push_back(place);
  }
}

void Request::join(const std::vector<int32_t>& missing, int64_t gap, int64_t most, bool split) {
  int64_t start = 0, end = 0;  // rows of the span that grows
  for (const int32_t i : missing) {
    const int64_t row = wanted_[static_cast<size_t>(i)].row;
    if (!spans_.empty() && row - end <= gap && row - start < most) {
      spans_.back().last = i + 1;
    } else {
      spans_.push_back({i, i + 1});
      start = row;
    }
    end = row;
  }
  left_.store(static_cast<int64_t>(spans_.size()));
  if (split) halves_.reset(new Halves[spans_.size()]);
}

uint8_t* Request::halves(size_t span, size_t bytes) {
  auto& data = halves_[span].data;
  uint8_t* there = data.load();
  if (there != nullptr) return there;
  auto made = std::make_unique<uint8_t[]>(bytes);
  return data.compare_exchange_strong(there, made.get()) ? made.release() : there;
}

void Request::deliver(const Wanted& wanted, const uint8_t* row) {
  // abandon() sets the flag and then waits for the writers; here the other way round: one of the two sees the other.
  writers_.fetch_add(1);
  if (!stopped_.load())
    for (int32_t i = 0; i < wanted.n; ++i)
      std::memcpy(out_ + static_cast<int64_t>(places_[static_cast<size_t>(wanted.first + i)]) * row_bytes_, row,
                  static_cast<size_t>(row_bytes_));
  writers_.fetch_sub(1);
}

void Request::span_done() {
  if (left_.fetch_sub(1) == 1) finish();
}

void Request::finish() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    end_ = Clock::now();
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  tell();
}

void Request::fail(std::exception_ptr error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::move(error);
    stopped_.store(true);
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  tell();
}

void Request::tell() {
  const std::lock_guard<std::mutex> lock(tell_mutex_);
  if (const auto f = std::exchange(tell_, nullptr)) f();
}

void Request::when_done(std::function<void()> f) {
  const std::lock_guard<std::mutex> lock(tell_mutex_);
  tell_ = nullptr;
  if (f && done()) return f();  // done() comes before tell(): either this sees it, or tell() finds f
  tell_ = std::move(f);
}

double Request::wait(Poll* poll) {
  double waited = 0;
  if (!done()) {
    const auto begin = Clock::now();
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(25), [&] { return done(); })) {
      if (poll == nullptr) continue;
      lock.unlock();
      if (poll->stop()) throw Cancelled("[run] cancelled while waiting for Engram rows");
      lock.lock();
    }
    waited = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  return waited;
}

void Request::abandon() {
  stopped_.store(true);
  while (writers_.load() != 0) std::this_thread::yield();
  when_done(nullptr);
}

}  // namespace ds4
