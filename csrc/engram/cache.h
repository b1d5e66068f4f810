// Rows that are read often, kept in memory under a byte budget. Thread-safe.
//
// Sets of 16 rows. A new row first passes through 4 of them, in order of arrival; only if it is wanted again on the
// way, or soon after it left (the set remembers 16 fingerprints of those), it comes to the other 12, where a hand goes
// round and takes what was not hit since its last visits. A long scan of rows that are used once therefore never
// touches the rows that are used often. Keys are compared in full, so a hit is always the right row.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace ds4 {

class RowCache {
 public:
  static constexpr int kWays = 16;

  // Keeps as many rows as fit into `budget` bytes, book-keeping included; a small budget keeps none.
  RowCache(int64_t budget, int row_bytes);
  ~RowCache();
  RowCache(const RowCache&) = delete;
  RowCache& operator=(const RowCache&) = delete;

  // Copies the row to out and returns true when it is here. Key 0 is not allowed.
  bool get(uint64_t key, uint8_t* out);
  void put(uint64_t key, const uint8_t* row);

  int64_t n_rows() const { return n_sets_ * kWays; }
  int64_t bytes() const { return n_sets_ * set_bytes_; }
  int64_t used() const { return used_.load(std::memory_order_relaxed); }

 private:
  static constexpr int kLocks = 64, kNew = 4, kGone = 16;
  struct Set {
    uint64_t keys[kWays];    // 0: empty; the first kNew are for new rows
    uint8_t credit[kWays];   // hits since the hand's last visit, at most 3
    uint16_t gone[kGone];    // fingerprints of new rows that left unused, the oldest replaced first
    uint8_t next_new, next_gone, hand;
  };

  static uint64_t mixed(uint64_t key);
  int64_t set_of(uint64_t mixed_key) const;
  uint8_t* row(int64_t set, int way) const { return rows_ + (set * kWays + way) * row_bytes_; }
  int place_for_new(int64_t at, Set& set);
  static int place_to_stay(Set& set);

  const int row_bytes_;
  const int64_t set_bytes_;
  int64_t n_sets_ = 0;
  size_t mapped_ = 0;
  Set* sets_ = nullptr;
  uint8_t* rows_ = nullptr;
  std::unique_ptr<std::mutex[]> locks_;
  std::atomic<int64_t> used_{0};
};

}  // namespace ds4
