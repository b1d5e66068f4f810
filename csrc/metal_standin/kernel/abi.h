// What a compiled kernel and the runtime know of each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ds4::standin {

constexpr int kMaxBuffers = 31;            // Apple's limits
constexpr int kMaxThreadgroupBytes = 32768;
constexpr int kMaxThreads = 1024;
constexpr int kSimdWidth = 32;

struct Grid3 {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return static_cast<uint64_t>(x) * y * z; }
};

// What one thread of the grid can ask about itself.
struct Place {
  Grid3 in_grid, in_group, group, group_size, groups, grid;
  uint32_t index, lane, simd, n_simd;
};

struct Pointers {  // the arguments of a launch, as the kernel sees them
  void* buffer[kMaxBuffers];
  void* threadgroup[kMaxBuffers];
};

using Thunk = void (*)(const Pointers&, const Place&);

enum class ParamKind : uint8_t { device_read, device_write, constant, threadgroup };
struct Param {
  const char* name;
  ParamKind kind;
  uint8_t index;
  bool reference;      // one struct, not an array
  uint32_t size;       // of what it points to
  uint32_t alignment;
};
enum class ConstantType : uint8_t { boolean, i32, u32, f32 };
struct FunctionConstant {
  const char* name;
  uint16_t index;
  ConstantType type;
  void* value;
};
struct Kernel {
  const char* name;
  const Param* params;
  int n_params;
  bool synchronises;  // has barriers or simdgroup operations: its threads need stacks of their own
  uint32_t constants; // bit i: uses the function constant of index i
  Thunk thunk;
};
struct Family {  // one compiled .metal file
  const char* name;
  const Kernel* kernels;
  int n_kernels;
  const FunctionConstant* constants;
  int n_constants;
};

// A thread at a rendezvous. The operand lies in a slot of its simdgroup; every lane reads what it needs from the others.
struct Site {
  const char* file;
  int line;
  const char* what;
};
struct Slot {
  uint64_t word[2];
};

// Waits until all lanes of the simdgroup have brought their operands to the same operation. The answer holds the 32
// operands by lane and stays valid until the lane's next operation.
const Slot* simd_meet(const void* operand, size_t bytes, const Site& site);
void simd_wait(unsigned flags, const Site& site);
void threadgroup_wait(unsigned flags, const Site& site);
int lane_count();      // lanes of the running simdgroup
int lane_of_caller();
void kernel_fault(const char* what, const Site& site);  // ends the launch with a report

// Told of accesses that bypass the instrumentation of the checked build (atomics).
void note_atomic(const void* address, size_t bytes, bool writes);

}  // namespace ds4::standin
