// Who touched which byte last: the checked mode's memory of all accesses, with the ordering rules of the GPU.
//
// Two accesses to one byte, at least one of them a write and not both atomic, are ordered only when
//  - one thread makes both, or
//  - they are in one threadgroup and a threadgroup_barrier that names this kind of memory lies between them, or
//  - they are in one simdgroup and such a simdgroup_barrier lies between them, or
//  - they are in dispatches of different phases (a serial encoder, or a memoryBarrier between them).
// Anything else is a race, whatever order this run happened to take.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "metal_standin/launch.h"

namespace ds4::standin {

class Group;

class Shadow {
 public:
  void begin_dispatch(const Launch& launch);
  void begin_group();
  void access(Group& group, uintptr_t address, size_t bytes, bool writes, bool atomic, const void* code);

  // Free bytes between the arguments in threadgroup memory, so that a step over the end lands nowhere.
  static constexpr size_t kGap = 1024;

 private:
  struct Access {
    uint32_t unit = 0;        // threadgroup, counted over all dispatches; 0: none
    uint32_t epoch = 0;       // threadgroup barriers passed
    uint32_t simd_epoch = 0;  // simdgroup barriers passed
    uint16_t thread = 0;
    uint8_t simd = 0;
    bool atomic = false;
  };
  static constexpr uint32_t kManyUnits = ~0u;
  static constexpr uint16_t kManyThreads = 0xffff;
  static constexpr uint8_t kManySimds = 0xff;
  struct Cell {
    Access write, read;
    uint32_t write_phase = 0, read_phase = 0;
  };
  static constexpr size_t kPage = 4096, kCached = 64;
  struct Range {
    uintptr_t begin, end;
    int index;
    const char* name;
    bool writable, watched;
    uint32_t phase;
  };
  struct Event {  // one access, with what a report needs
    Group* group;
    Access now;
    const Range* range;
    bool writes, local;  // local: threadgroup memory
    uintptr_t address;
    const void* code;
  };

  const Range* find(const std::vector<Range>& ranges, uintptr_t address, size_t bytes, bool writes) const;
  Cell& cell(uintptr_t address);
  void check(const Event& e, Cell& c);
  static bool ordered(const Access& before, uint32_t before_phase, const Access& now, uint32_t phase);
  static void merge(Access& kept, uint32_t& kept_phase, const Access& now, uint32_t phase);
  void outside(Group& group, uintptr_t address, size_t bytes, bool writes, const void* code);
  void conflict(const Event& e, const Access& before, bool before_wrote);
  std::string intro(Group& group, const void* code) const;

  std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> pages_;
  struct Cached {
    uintptr_t page = ~uintptr_t{0};
    Cell* cells = nullptr;
  };
  Cached cache_[kCached];
  std::vector<Range> buffers_, local_;
  std::vector<std::pair<uint32_t, std::string>> dispatches_;  // first unit, kernel
  std::set<std::pair<const void*, int>> told_;                // one report for each instruction and kind
  uint32_t unit_ = 0, next_unit_ = 1;
  const Launch* launch_ = nullptr;
};

}  // namespace ds4::standin
