#include "engram/cache.h"

#include <sys/mman.h>

#include <cstring>

namespace ds4 {

namespace {

constexpr uint8_t kMostCredit = 3;

uint16_t fingerprint(uint64_t mixed_key) { return static_cast<uint16_t>(mixed_key) | 1; }

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

uint64_t RowCache::mixed(uint64_t key) {  // murmur3's finaliser
  key ^= key >> 33;
  key *= 0xff51afd7ed558ccdull;
  key ^= key >> 33;
  key *= 0xc4ceb9fe1a85ec53ull;
  return key ^ (key >> 33);
}

int64_t RowCache::set_of(uint64_t mixed_key) const {
  return static_cast<int64_t>((static_cast<unsigned __int128>(mixed_key) * static_cast<uint64_t>(n_sets_)) >> 64);
}

bool RowCache::get(uint64_t key, uint8_t* out) {
  if (n_sets_ == 0) return false;
  const int64_t at = set_of(mixed(key));
  const std::lock_guard<std::mutex> lock(locks_[at % kLocks]);
  Set& set = sets_[at];
  for (int way = 0; way < kWays; ++way) {
    if (set.keys[way] != key) continue;
    if (set.credit[way] < kMostCredit) ++set.credit[way];
    std::memcpy(out, row(at, way), static_cast<size_t>(row_bytes_));
    return true;
  }
  return false;
}

// The hand goes round and takes credit until it meets a row that has none. Places that were never used come first.
int RowCache::place_to_stay(Set& set) {
  for (;;) {
    const int way = kNew + set.hand;
    set.hand = static_cast<uint8_t>((set.hand + 1) % (kWays - kNew));
    if (set.credit[way] == 0) return way;
    --set.credit[way];
  }
}

// The oldest new row makes room: it stays if it was hit or if there is an unused place, else only its mark does.
int RowCache::place_for_new(int64_t at, Set& set) {
  const int way = set.next_new;
  set.next_new = static_cast<uint8_t>((way + 1) % kNew);
  const uint64_t old = set.keys[way];
  if (old == 0) return way;
  if (set.credit[way] > 0 || set.keys[kNew + set.hand] == 0) {
    const int to = place_to_stay(set);
    if (set.keys[to] == 0) used_.fetch_add(1, std::memory_order_relaxed);
    set.keys[to] = old;
    std::memcpy(row(at, to), row(at, way), static_cast<size_t>(row_bytes_));
  } else {
    set.gone[set.next_gone] = fingerprint(mixed(old));
    set.next_gone = static_cast<uint8_t>((set.next_gone + 1) % kGone);
  }
  return way;
}

void RowCache::put(uint64_t key, const uint8_t* bytes) {
  if (n_sets_ == 0) return;
  const uint64_t hash = mixed(key);
  const int64_t at = set_of(hash);
  const std::lock_guard<std::mutex> lock(locks_[at % kLocks]);
  Set& set = sets_[at];
  for (int way = 0; way < kWays; ++way)
    if (set.keys[way] == key) return;  // somebody else read it at the same time
  bool again = false;
  for (uint16_t& mark : set.gone) {
    if (mark != fingerprint(hash)) continue;
    mark = 0;
    again = true;
    break;
  }
  const int way = again ? place_to_stay(set) : place_for_new(at, set);
  if (set.keys[way] == 0) used_.fetch_add(1, std::memory_order_relaxed);
  set.keys[way] = key;
  set.credit[way] = 0;
  std::memcpy(row(at, way), bytes, static_cast<size_t>(row_bytes_));
}

}  // namespace ds4
