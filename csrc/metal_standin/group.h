// Runs the threads of one threadgroup after another, as fibers on the calling thread.
#pragma once

#include <array>
#include <memory>

#include "metal_standin/fiber.h"
#include "metal_standin/launch.h"

namespace ds4::standin {

struct Simd;

struct Lane {
  enum class State : uint8_t { ready, at_simd, at_barrier, done };
  Context context;
  Place place;
  Simd* simd;
  uint8_t bit;  // its place in the order of its simdgroup
  State state;
  Site site;    // where it waits
};

struct Simd {
  uint32_t ready = 0;  // by place in the order
  uint8_t lane_at[kSimdWidth];
  int first = 0, n = 0, arrived = 0, phase = 0;
  uint32_t epoch[2] = {0, 0};  // rise with every simdgroup barrier that names device, threadgroup memory
  Site site;           // of the first lane that arrived
  Slot slots[2][kSimdWidth];
};

class Group {
 public:
  static constexpr size_t kArenaBytes = 2 * kMaxThreadgroupBytes;  // with room for gaps in checked mode
  struct Local {  // one argument in threadgroup memory
    size_t begin, bytes;
    int index;
    const char* name;
  };

  Group();
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Runs threadgroup number `index` of the launch. False: it failed and the report says why.
  bool run(const Launch& launch, uint64_t index, Shadow* shadow, Report& report);

  // The calls of a running kernel.
  static Group& current();
  const Slot* meet(const void* operand, size_t bytes, const Site& site);
  void simd_barrier(unsigned flags, const Site& site);
  void wait(unsigned flags, const Site& site);
  [[noreturn]] void fault(const std::string& what, const Site& site);
  [[noreturn]] void stop(std::string text);  // ends the launch with a report
  const Lane& running() const { return *running_; }
  const Launch& launch() const { return *launch_; }
  Shadow* shadow() const { return shadow_; }
  uint32_t barrier_epoch(bool threadgroup_memory) const { return threadgroup_memory ? group_epoch_ : device_epoch_; }
  const char* arena() const { return arena_; }
  const std::vector<Local>& locals() const { return locals_; }
  bool on_own_stack(const void* p) const;
  void add_report(std::string text) { report_->add(std::move(text)); }

 private:
  void place_threads(uint64_t index);
  void place_memory();
  void run_flat();
  void flat_loop();
  void run_fibers();
  void next();                 // the running lane cannot go on: another one does
  Lane* pick();                // null: nobody can
  void release_barrier();
  std::string who_waits() const;
  static void fiber_main();
  static void flat_main();

  std::unique_ptr<Lane[]> lanes_;
  std::unique_ptr<Simd[]> simds_;
  Stacks stacks_;
  char* arena_;
  Pointers pointers_;
  std::vector<Local> locals_;
  const Launch* launch_ = nullptr;
  const Kernel* kernel_ = nullptr;
  Shadow* shadow_ = nullptr;
  Report* report_ = nullptr;
  Context main_, flat_context_;
  Lane* running_ = nullptr;
  int n_ = 0, n_simds_ = 0, n_started_ = 0, n_at_barrier_ = 0, n_done_ = 0, simd_turn_ = 0;
  int simd_order_[kSimdWidth];
  Site barrier_site_;
  unsigned barrier_flags_ = 0;
  uint32_t device_epoch_ = 0, group_epoch_ = 0;
  bool failed_ = false, flat_ = false, flat_started_ = false;
};

std::string where(const Site& site);
std::string thread_name(const Place& place);

}  // namespace ds4::standin
