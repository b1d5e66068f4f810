#include "engram/cache.h"

#include <sys/mman.h>

#include <cstring>

namespace ds4 {

namespace {

constexpr uint8_t kEnter = 1, kFull = 3;  // credit of a new row, and of one that was hit

}  // namespace

RowCache::RowCache(int64_t budget, int row_bytes)
    : row_bytes_(row_bytes),
      set_bytes_(static_cast<int64_t>(sizeof(Set)) + static_cast<int64_t>(kWays) * row_bytes),
      n_sets_(budget > 0 ? budget / set_bytes_ : 0),
      locks_(new std::mutex[kLocks]) {
  if (n_sets_ == 0) return;
  // Pages are committed when rows arrive, not here.
  mapped_ = static_cast<size_t>(bytes());
  void* p = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    n_sets_ = 0;  // a cache that cannot be had is no reason to fail
    return;
  }
  sets_ = static_cast<Set*>(p);
  rows_ = reinterpret_cast<uint8_t*>(sets_ + n_sets_);
}

RowCache::~RowCache() {
  if (sets_ != nullptr) ::munmap(sets_, mapped_);
}

int64_t RowCache::set_of(uint64_t key) const {
  uint64_t x = key * 0x9e3779b97f4a7c15ull;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  return static_cast<int64_t>((static_cast<unsigned __int128>(x) * static_cast<uint64_t>(n_sets_)) >> 64);
}

bool RowCache::get(uint64_t key, uint8_t* out) {
  if (n_sets_ == 0) return false;
  const int64_t at = set_of(key);
  const std::lock_guard<std::mutex> lock(locks_[at % kLocks]);
  Set& set = sets_[at];
  for (int way = 0; way < kWays; ++way) {
    if (set.keys[way] != key) continue;
    set.credit[way] = kFull;
    std::memcpy(out, row(at, way), static_cast<size_t>(row_bytes_));
    return true;
  }
  return false;
}

// The first row without credit; when all have some, everybody pays until one has none.
int RowCache::victim(Set& set) {
  for (;;) {
    for (int way = 0; way < kWays; ++way)
      if (set.credit[way] == 0) return way;
    for (int way = 0; way < kWays; ++way) --set.credit[way];
  }
}

void RowCache::put(uint64_t key, const uint8_t* bytes) {
  if (n_sets_ == 0) return;
  const int64_t at = set_of(key);
  const std::lock_guard<std::mutex> lock(locks_[at % kLocks]);
  Set& set = sets_[at];
  for (int way = 0; way < kWays; ++way)
    if (set.keys[way] == key) return;  // somebody else read it at the same time
  const int way = victim(set);
  if (set.keys[way] == 0) used_.fetch_add(1, std::memory_order_relaxed);
  set.keys[way] = key;
  set.credit[way] = kEnter;
  std::memcpy(row(at, way), bytes, static_cast<size_t>(row_bytes_));
}

}  // namespace ds4
