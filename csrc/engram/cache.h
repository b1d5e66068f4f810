// Rows that are read often, kept in memory under a byte budget. Thread-safe.
//
// Sets of 16 rows; inside a set, re-reference prediction: a row enters with little credit, every hit gives it full
// credit, and when room is needed the rows without credit go first. A long scan of rows that are used once therefore
// pushes out only what it brought itself. Keys are compared in full, so a hit is always the right row.
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
  static constexpr int kLocks = 64;
  struct Set {
    uint64_t keys[kWays];
    uint8_t credit[kWays];
  };

  int64_t set_of(uint64_t key) const;
  uint8_t* row(int64_t set, int way) const { return rows_ + (set * kWays + way) * row_bytes_; }
  static int victim(Set& set);

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
