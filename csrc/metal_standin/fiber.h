// Switching between the threads of a threadgroup: each has a stack of its own, all run on one thread of the system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ds4::standin {

struct Context {  // a suspended fiber
  void* stack_pointer = nullptr;
  void* other = nullptr;   // ucontext_t on machines without an assembler switch
  void* shadow = nullptr;  // the address sanitizer's stack of it
  const void* stack = nullptr;  // null: the stack of the system thread
  size_t stack_bytes = 0;
};

// Suspends the caller into `from` and goes on in `to`.
void switch_context(Context& from, Context& to);
void arrived();  // the first call of a new fiber

// Stacks with a guard page below each; made when first needed, kept for ever after.
class Stacks {
 public:
  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  using Entry = void (*)();
  // Makes `context` start in `entry` on stack number i when it is switched to. `entry` must not return.
  void start(Context& context, int i, Entry entry);
  bool holds(int i, const void* address) const;

 private:
  static constexpr size_t kBytes = 128 << 10;
  std::vector<char*> stacks_;
};

}  // namespace ds4::standin
