// The memory of one state: one contiguous range, made of segments that forks share until one of them writes.
//
// A segment lives in a memory file ("layer") at the same offset as in the range, so a run of segments of one layer is
// one mapping. A fork maps the segments of its parent; the count of users of each segment says who may write in place.
// When the process itself forks, parent and child treat all segments as shared from then on.
// Where the back end does not allow its pages to be replaced, a fork copies instead (shares() tells).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/backend.h"

namespace ds4 {

class Arena {
 public:
  static constexpr size_t kSegment = 64 * 1024;
  static constexpr size_t kMaxLayers = 32;  // of a parent that a fork maps

  Arena(Backend& backend, size_t bytes);
  // A fork: equal content. Nobody may write to `parent` meanwhile.
  Arena(Backend& backend, const Arena& parent);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint8_t* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  bool shares() const { return shares_; }

  // Must be called before bytes from p on are written: gives this arena its own copy of segments that others use.
  void own(const void* p, size_t n);

  // Before much is written at once: large pages for the untouched part of a range, where the system has them. First
  // what there is to take, in ascending order and before own(); then take().
  struct LargePages {
    size_t at, bytes;
  };
  void plan_large_pages(const void* p, size_t n, std::vector<LargePages>* out) const;
  void take(const LargePages& pages);

  // Puts what is written of a range into large pages, where the system has them: 2 MiB at a time, which must be in use as
  // a whole. Content, sharing and the memory that is taken stay as they are; what was done before costs nothing. Small
  // pages cost a reader of millions of rows more time in page tables than the rows themselves.
  void join(const void* p, size_t n);

  // memcpy(to, from, n) to memory that is this arena's own, or to any other: without a fault for each fresh page.
  void put(uint8_t* to, const uint8_t* from, size_t n);

  struct Usage {
    size_t own = 0;     // bytes of segments that only this arena uses
    size_t shared = 0;  // bytes of segments that forks use as well
  };
  Usage usage() const;

 private:
  struct Layer;

  friend struct ArenaList;
  void reserve();
  void before_process_fork();
  void in_child_process();
  std::vector<uint16_t> adopt_layers(const Arena& parent);
  void share(const Arena& parent);
  void own_segment(size_t k);
  void copy_segment(size_t k);
  size_t length(size_t k) const;
  size_t free_layer(size_t k);
  void release(size_t k);
  bool joinable(size_t block) const;

  Backend& backend_;
  size_t bytes_ = 0;
  bool shares_ = false;
  bool first_is_mine_ = true;  // false in a child process: its parent fills the first layer
  uint8_t* allocated_ = nullptr;
  size_t allocated_bytes_ = 0;
  uint8_t* base_ = nullptr;  // at a large page's boundary
  std::vector<uint16_t> owner_;  // per segment: 1 + index into layers_, 0 while untouched
  std::vector<char> joined_;     // per large page: it is one, or the system was asked for it
  std::vector<std::shared_ptr<Layer>> layers_;
  std::vector<uint16_t> own_;  // the layers that this arena made; only these give it new segments
};

}  // namespace ds4
