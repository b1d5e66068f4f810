// Who touched which byte last: the checked mode's memory of all accesses, with the ordering rules of the GPU.
//
// Two accesses to one byte, at least one of them a plain write, are ordered only when
//  - they are in one threadgroup and a threadgroup_barrier that names this kind of memory lies between them, or
//  - they are in one simdgroup and a simdgroup_barrier lies between them, or
//  - they are in dispatches of different phases (an encoder that is serial, or a memoryBarrier between them), or
//  - one thread makes both. Atomic accesses do not conflict with each other.
// Anything else is a race and is reported with both places.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "metal_standin/launch.h"

namespace ds4::standin {

class Group;

class Shadow {
 public:
  Shadow();
  ~Shadow();
  void begin_dispatch(const Launch& launch);
  void begin_group(uint64_t index);
  void access(Group& group, uintptr_t address, size_t bytes, bool writes, bool atomic, const void* code);

 private:
  struct Access {
    uint32_t unit = 0;      // threadgroup, counted over all dispatches; 0: none
    uint32_t epoch = 0;     // threadgroup barriers passed
    uint32_t simd_epoch = 0;
    uint16_t thread = 0;    // kMany: several
    uint8_t simd = 0;       // kManySimds: several
    bool atomic = false;
  };
  struct Cell {
    Access write, read;
    uint32_t write_phase = 0, read_phase = 0;
  };
  static constexpr uint16_t kMany = 0xffff;
  static constexpr uint8_t kManySimds = 0xff;
  static constexpr uint32_t kManyUnits = ~0u;
  static constexpr size_t kPage = 4096;
  using Page = std::unique_ptr<Cell[]>;

  Cell& cell(uintptr_t address);
  bool ordered(const Access& before, uint32_t before_phase, const Access& now, uint32_t phase) const;
  void check(Group& group, Cell& c, const Access& now, uint32_t phase, bool writes, uintptr_t address, const void* code,
             const std::string& name);
  std::string describe(const Access& a) const;
  std::string name_of(const Launch& launch, uintptr_t address, int index) const;
  void report(Group& group, const std::string& what, const void* code);

  std::unordered_map<uintptr_t, Page> pages_;
  uintptr_t last_page_ = ~uintptr_t{0};
  Cell* last_cells_ = nullptr;
  std::unique_ptr<Cell[]> arena_;
  struct Started {
    uint32_t first_unit;
    std::string kernel;
  };
  std::vector<Started> dispatches_;
  uint32_t unit_ = 0, next_unit_ = 1;
  const Launch* launch_ = nullptr;
};

}  // namespace ds4::standin
