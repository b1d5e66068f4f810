// Rows that somebody waits for: from row numbers to bytes in the caller's memory.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/process.h"
#include "base/threads.h"
#include "engram/pool.h"

namespace ds4 {

// Each wanted row once, sorted, with every place it goes to; filled by prepare().
struct Wanted {
  int64_t row;
  int32_t first, n;  // places[first .. first + n - 1]
};

// Neighbouring rows that one read brings: wanted[first .. last - 1].
struct Span {
  int32_t first, last;
};

// A span whose codes and scales come by two reads: what has arrived.
struct Halves {
  std::atomic<uint8_t*> data{nullptr};
  std::atomic<int> missing{2};
  ~Halves() { delete[] data.load(); }
};

class Request {
 public:
  Request(int table, std::vector<int64_t> rows, int row_bytes, uint8_t* out, Urgency urgency)
      : urgency(urgency), table_(table), row_bytes_(row_bytes), rows_(std::move(rows)), out_(out) {}

  std::atomic<Urgency> urgency;

  // Made by the parent of this process: nobody works on it here.
  bool forked() const { return home_.forked(); }

  int table() const { return table_; }
  const std::vector<int64_t>& rows() const { return rows_; }
  const std::vector<Wanted>& wanted() const { return wanted_; }
  const std::vector<Span>& spans() const { return spans_; }

  // Sorts and removes duplicates.
  void sort();
  // Joins what is missing (indices into wanted(), ascending) into spans: rows at most `gap` apart, at most
  // `most` rows from first to last.
  void join(const std::vector<int32_t>& missing, int64_t gap, int64_t most, bool split);
  // Of a span that comes in halves: memory for both, made by whoever is first; and whether this was the last half.
  uint8_t* halves(size_t span, size_t bytes);
  bool half_done(size_t span) { return halves_[span].missing.fetch_sub(1) == 1; }
  void drop_halves(size_t span) { delete[] halves_[span].data.exchange(nullptr); }

  // Copies a row to its places, unless the request was abandoned.
  void deliver(const Wanted& wanted, const uint8_t* row);
  void span_done();
  void finish();
  void fail(std::exception_ptr error);

  // f is called once, by the thread that brings the last row or finds an error, or here and now when that was before.
  // Null: what was given is forgotten, and does not run any more when this returns.
  void when_done(std::function<void()> f);

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Once it is done: from being asked for to having arrived, and what the disk gave for it.
  double seconds() const { return std::chrono::duration<double>(end_ - begin_).count(); }
  int64_t disk_bytes() const { return disk_bytes_.load(std::memory_order_relaxed); }
  void count_disk_bytes(int64_t n) { disk_bytes_.fetch_add(n, std::memory_order_relaxed); }
  bool stopped() const { return stopped_.load(); }

  // Returns the seconds waited; throws what went wrong, or Cancelled when the poll says so.
  double wait(Poll* poll);
  // From now on nothing is written to `out`, and nobody is told. Does not wait for reads, only for copies.
  void abandon();

 private:
  using Clock = std::chrono::steady_clock;

  const HomeProcess home_;
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point end_;  // before done_
  const int table_, row_bytes_;
  const std::vector<int64_t> rows_;
  uint8_t* const out_;
  std::vector<Wanted> wanted_;
  std::vector<int32_t> places_;
  std::vector<Span> spans_;
  std::unique_ptr<Halves[]> halves_;
  std::atomic<int64_t> left_{0};     // spans
  std::atomic<int64_t> disk_bytes_{0};
  std::atomic<bool> stopped_{false};  // abandoned or failed
  std::atomic<int> writers_{0};
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  void tell();
  std::mutex tell_mutex_;  // held while it is called
  std::function<void()> tell_;
};

}  // namespace ds4
