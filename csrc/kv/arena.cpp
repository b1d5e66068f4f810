#include "kv/arena.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "base/error.h"
#include "kv/memory_file.h"

namespace ds4 {

// One memory file and how many arenas use each of its segments.
struct Arena::Layer {
  Layer(int fd_, size_t n) : fd(fd_), users(std::make_unique<std::atomic<uint32_t>[]>(n)) {}
  ~Layer() { close(fd); }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  int fd;
  std::unique_ptr<std::atomic<uint32_t>[]> users;
};

// Every arena of the process, so that a fork of the process itself does not let two processes write to one segment.
struct ArenaList {
  static ArenaList& get() {
    static auto* list = new ArenaList;  // lives as long as the process
    return *list;
  }
  ArenaList() { pthread_atfork(&before, &in_parent, &in_child); }
  void add(Arena* a) {
    const std::lock_guard<std::mutex> lock(mutex);
    all.insert(a);
  }
  void remove(Arena* a) {
    const std::lock_guard<std::mutex> lock(mutex);
    all.erase(a);
  }
  static void before() {
    get().mutex.lock();
    for (Arena* a : get().all) a->before_process_fork();
  }
  static void in_parent() { get().mutex.unlock(); }
  static void in_child() {
    for (Arena* a : get().all) a->in_child_process();
    get().mutex.unlock();
  }

  std::mutex mutex;
  std::set<Arena*> all;
};

void Arena::before_process_fork() {
  for (size_t k = 0; k < owner_.size(); ++k)
    if (owner_[k] != 0) layers_[owner_[k] - 1]->users[k].fetch_add(1, std::memory_order_relaxed);
}

void Arena::in_child_process() {
  own_.clear();  // the parent goes on filling them
  first_is_mine_ = false;
}

namespace {

[[noreturn]] void refuse(size_t bytes) {
  throw MemoryPlanError("[state] the system refused a mapping of " + std::to_string(bytes) +
                        " bytes; close other sessions or forks, or raise vm.max_map_count");
}

constexpr size_t kLargePage = size_t{2} << 20;
constexpr size_t kPerLarge = kLargePage / Arena::kSegment;
constexpr size_t kPutBytes = 4096;  // for less, a system call saves nothing

void map_over(uint8_t* at, size_t bytes, int fd, size_t offset) {
  void* p = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset));
  if (p == MAP_FAILED) refuse(bytes);
}

}  // namespace

Arena::Arena(Backend& backend, size_t bytes) : backend_(backend), bytes_(bytes) { reserve(); }

void Arena::reserve() {
  allocated_bytes_ = bytes_ + kLargePage;
  allocated_ = static_cast<uint8_t*>(backend_.alloc(allocated_bytes_));
  base_ = allocated_ + (-reinterpret_cast<uintptr_t>(allocated_) & (kLargePage - 1));
  owner_.assign((bytes_ + kSegment - 1) / kSegment, 0);
  joined_.assign(bytes_ / kLargePage, 0);
  if (!backend_.remappable()) return;
  const int fd = memory_file(bytes_);
  if (fd < 0) return;
  layers_.push_back(std::make_shared<Layer>(fd, owner_.size()));
  own_.push_back(1);
  try {
    map_over(base_, bytes_, fd, 0);
  } catch (...) {
    backend_.free(allocated_, allocated_bytes_);
    throw;
  }
  shares_ = true;
  ArenaList::get().add(this);
}

Arena::Arena(Backend& backend, const Arena& parent) : backend_(backend), bytes_(parent.bytes_) {
  reserve();
  try {
    share(parent);
  } catch (...) {
    if (shares_) ArenaList::get().remove(this);
    for (size_t k = 0; k < owner_.size(); ++k) release(k);
    backend_.free(allocated_, allocated_bytes_);
    throw;
  }
}

// Which of the parent's layers to map: those with most segments, so that a long line of forks of forks keeps few
// files open. Segments of the others are copied. Returns for each owner_ value of the parent that of this arena, or 0.
std::vector<uint16_t> Arena::adopt_layers(const Arena& parent) {
  std::vector<uint16_t> to(std::max<size_t>(parent.layers_.size(), 1) + 1, 0);  // 1 marks what is in use where nothing is shared
  if (!shares_ || !parent.shares_) return to;
  std::vector<std::pair<size_t, uint16_t>> count(parent.layers_.size());
  for (size_t i = 0; i < count.size(); ++i) count[i].second = static_cast<uint16_t>(i + 1);
  for (const uint16_t o : parent.owner_)
    if (o != 0) ++count[o - 1].first;
  std::sort(count.rbegin(), count.rend());
  for (size_t i = 0; i < count.size() && i < kMaxLayers && count[i].first > 0; ++i) {
    layers_.push_back(parent.layers_[count[i].second - 1]);
    to[count[i].second] = static_cast<uint16_t>(layers_.size());
  }
  return to;
}

void Arena::share(const Arena& parent) {
  const std::vector<uint16_t> to = adopt_layers(parent);
  for (size_t k = 0; k < owner_.size();) {  // runs of one layer: one mapping each
    const uint16_t from = parent.owner_[k];
    size_t end = k + 1;
    while (end < owner_.size() && parent.owner_[end] == from) ++end;
    const size_t bytes = (end - 1 - k) * kSegment + length(end - 1);
    uint8_t* at = base_ + k * kSegment;
    if (to[from] != 0) {
      Layer& layer = *parent.layers_[from - 1];
      map_over(at, bytes, layer.fd, k * kSegment);
      for (size_t i = k; i < end; ++i) {
        layer.users[i].fetch_add(1, std::memory_order_relaxed);
        owner_[i] = to[from];
      }
    } else if (from != 0) {
      own(at, bytes);
      std::memcpy(at, parent.base_ + k * kSegment, bytes);
    }
    k = end;
  }
  for (size_t b = 0; b < joined_.size(); ++b) joined_[b] = static_cast<char>(parent.joined_[b] != 0 && joinable(b));
}

Arena::~Arena() {
  if (shares_) ArenaList::get().remove(this);
  backend_.free(allocated_, allocated_bytes_);
  if (!shares_) return;
  // A layer that nobody else holds gives its memory back as a whole.
  for (size_t k = 0; k < owner_.size(); ++k)
    if (owner_[k] != 0 && layers_[owner_[k] - 1].use_count() > 1) release(k);
}

void Arena::release(size_t k) {
  if (owner_[k] == 0 || !shares_) return;
  Layer& layer = *layers_[owner_[k] - 1];
  owner_[k] = 0;
  if (layer.users[k].fetch_sub(1, std::memory_order_acq_rel) == 1) punch(layer.fd, k * kSegment, length(k));
}

size_t Arena::length(size_t k) const { return k + 1 < owner_.size() ? kSegment : bytes_ - k * kSegment; }

void Arena::own(const void* p, size_t n) {
  if (n == 0) return;
  const size_t at = static_cast<size_t>(static_cast<const uint8_t*>(p) - base_);
  for (size_t k = at / kSegment; k <= (at + n - 1) / kSegment; ++k) own_segment(k);
}

void Arena::own_segment(size_t k) {
  if (owner_[k] == 0 && shares_ && !first_is_mine_) return copy_segment(k);
  if (owner_[k] == 0) {  // untouched: mapped from the first layer already
    owner_[k] = 1;
    if (shares_) layers_[0]->users[k].store(1, std::memory_order_relaxed);
    return;
  }
  if (shares_ && layers_[owner_[k] - 1]->users[k].load(std::memory_order_acquire) != 1) copy_segment(k);
}

// One of this arena's own layers in which segment k is free; a new one when there is none.
size_t Arena::free_layer(size_t k) {
  for (const uint16_t i : own_)
    if (layers_[i - 1]->users[k].load(std::memory_order_acquire) == 0) return i - 1;
  if (layers_.size() >= UINT16_MAX) throw MemoryPlanError("[state] too many generations of forks; save and load the session");
  const int fd = memory_file(bytes_);
  if (fd < 0) throw MemoryPlanError("[state] the system has no more memory files; close other sessions or forks");
  layers_.push_back(std::make_shared<Layer>(fd, owner_.size()));
  own_.push_back(static_cast<uint16_t>(layers_.size()));
  return layers_.size() - 1;
}

void Arena::copy_segment(size_t k) {
  const size_t to = free_layer(k), n = length(k), offset = k * kSegment;
  uint8_t* at = base_ + offset;
  if (!fill(layers_[to]->fd, offset, at, n))
    throw MemoryPlanError("[state] no memory for a copy of " + std::to_string(n) + " bytes that a fork shares");
  map_over(at, n, layers_[to]->fd, offset);
  layers_[to]->users[k].store(1, std::memory_order_relaxed);
  release(k);
  owner_[k] = static_cast<uint16_t>(to + 1);
  if (k / kPerLarge < joined_.size()) joined_[k / kPerLarge] = 0;
}

void Arena::plan_large_pages(const void* p, size_t n, std::vector<LargePages>* out) const {
#ifdef __linux__
  if (!shares_ || !first_is_mine_) return;
  const size_t begin = static_cast<size_t>(static_cast<const uint8_t*>(p) - base_), end = begin + n;
  for (size_t b = begin / kLargePage; b * kLargePage < end; ++b) {
    const size_t at = b * kLargePage;
    const size_t covered = std::min(end, at + kLargePage) - std::max(begin, at);
    if (covered < kLargePage / 8 || at + kLargePage > bytes_) continue;  // 4 KiB at a time, an eighth takes longer
    bool untouched = true;
    for (size_t k = b * kPerLarge; k < (b + 1) * kPerLarge; ++k) untouched = untouched && owner_[k] == 0;
    if (!untouched) continue;
    static_cast<volatile uint8_t*>(base_)[at] = 0;  // one page must be there
    if (!out->empty() && out->back().at + out->back().bytes == at)
      out->back().bytes += kLargePage;
    else if (out->empty() || out->back().at + out->back().bytes <= at)
      out->push_back({at, kLargePage});
  }
#else
  (void)p, (void)n, (void)out;
#endif
}

void Arena::take(const LargePages& pages) {
#ifdef __linux__
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, Linux 6.1
  (void)madvise(base_ + pages.at, pages.bytes, kCollapse);  // where it is refused, pages come one at a time
  for (size_t b = pages.at / kLargePage; b * kLargePage < pages.at + pages.bytes; ++b) joined_[b] = 1;
#else
  (void)pages;
#endif
}

// All of it written, and one mapping: every segment in one layer.
bool Arena::joinable(size_t block) const {
  const uint16_t owner = owner_[block * kPerLarge];
  for (size_t k = block * kPerLarge + 1; k < (block + 1) * kPerLarge; ++k)
    if (owner_[k] != owner) return false;
  return owner != 0;
}

void Arena::join(const void* p, size_t n) {
  if (!shares_) return;
  const size_t begin = static_cast<size_t>(static_cast<const uint8_t*>(p) - base_), end = begin + n;
  for (size_t b = begin / kLargePage; (b + 1) * kLargePage <= end;) {
    size_t to = b;
    while ((to + 1) * kLargePage <= end && joined_[to] == 0 && joinable(to)) ++to;
    if (to > b) take({b * kLargePage, (to - b) * kLargePage});  // one call: each waits for every processor
    b = std::max(to, b + 1);
  }
}

void Arena::put(uint8_t* to, const uint8_t* from, size_t n) {
  if (!shares_ || to < base_ || to >= base_ + bytes_) {
    std::memcpy(to, from, n);
    return;
  }
  while (n > 0) {
    const size_t at = static_cast<size_t>(to - base_), k = at / kSegment;
    size_t end = k + 1;
    while (end * kSegment < at + n && owner_[end] == owner_[k]) ++end;
    const size_t bytes = std::min(n, end * kSegment - at);
#ifdef __linux__
    const bool done = bytes >= kPutBytes && owner_[k] != 0 && fill(layers_[owner_[k] - 1]->fd, at, from, bytes);
#else
    const bool done = false;
#endif
    if (!done) std::memcpy(to, from, bytes);
    to += bytes, from += bytes, n -= bytes;
  }
}

Arena::Usage Arena::usage() const {
  Usage u;
  for (size_t k = 0; k < owner_.size(); ++k) {
    if (owner_[k] == 0) continue;
    const bool alone = !shares_ || layers_[owner_[k] - 1]->users[k].load(std::memory_order_relaxed) == 1;
    (alone ? u.own : u.shared) += length(k);
  }
  return u;
}

}  // namespace ds4
