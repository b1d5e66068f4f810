#include "metal_standin/fiber.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstring>

#include "base/error.h"

#if defined(__x86_64__) && !defined(DS4_STANDIN_UCONTEXT)
#define DS4_ASM_SWITCH 1
// void ds4_standin_switch(void** from, void* to): what the calling convention lets a callee keep is saved; the
// floating-point modes are the same on both sides.
asm(R"(
.text
.p2align 4
.globl ds4_standin_switch
.hidden ds4_standin_switch
.type ds4_standin_switch, @function
ds4_standin_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ds4_standin_switch, .-ds4_standin_switch
)");
extern "C" void ds4_standin_switch(void** from, void* to);
#endif

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1  // gcc defines it, clang asks
#endif
#endif
// The address sanitizer wants to know which stack is in use; without it these do nothing.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace ds4::standin {

namespace {
#if defined(__SANITIZE_ADDRESS__)
thread_local Context* t_left = nullptr;
void leave(Context& from, Context& to) {
  t_left = &from;
  __sanitizer_start_switch_fiber(&from.shadow, to.stack, to.stack_bytes);
}
void arrive(void* shadow) {
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(shadow, &stack, &bytes);
  if (t_left->stack == nullptr) t_left->stack = stack, t_left->stack_bytes = bytes;  // of a system thread
}
void forget_frames(const void* stack, size_t bytes) { __asan_unpoison_memory_region(stack, bytes); }
#else
void leave(Context&, Context&) {}
void arrive(void*) {}
void forget_frames(const void*, size_t) {}
#endif
}  // namespace

void arrived() { arrive(nullptr); }

Stacks::~Stacks() {
  for (char* p : stacks_) {
    if (p == nullptr) continue;
    forget_frames(p, kBytes);  // or the marks would stay with the address, for whoever is given it next
    munmap(p, kBytes);
  }
}

bool Stacks::holds(int i, const void* address) const {
  const char* base = stacks_[static_cast<size_t>(i)];
  return address >= base && address < base + kBytes;
}

namespace {
char* map_stack(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw MemoryPlanError("[stand-in] no memory for the stack of a kernel thread");
  mprotect(p, static_cast<size_t>(getpagesize()), PROT_NONE);
  return static_cast<char*>(p);
}
}  // namespace

void Stacks::start(Context& context, int i, Entry entry) {
  const auto n = static_cast<size_t>(i);
  if (stacks_.size() <= n) stacks_.resize(n + 1, nullptr);
  if (stacks_[n] == nullptr) stacks_[n] = map_stack(kBytes);
  forget_frames(stacks_[n], kBytes);  // what was abandoned there
  context.stack = stacks_[n];
  context.stack_bytes = kBytes;
  // Stacks start at different distances from a page boundary, or all of them would fight for the same cache lines.
  char* top = stacks_[n] + kBytes - (n * 5 % 60) * 64;
#if defined(DS4_ASM_SWITCH)
  auto** frame = reinterpret_cast<void**>(top) - 8;  // six registers, the entry, a return address that is never used
  std::memset(frame, 0, 8 * sizeof(void*));
  frame[6] = reinterpret_cast<void*>(entry);
  context.stack_pointer = frame;
#else
  auto* u = static_cast<ucontext_t*>(context.other);
  if (u == nullptr) context.other = u = new ucontext_t;  // kept for the life of its runner
  getcontext(u);
  u->uc_stack.ss_sp = stacks_[n];
  u->uc_stack.ss_size = static_cast<size_t>(top - stacks_[n]);
  u->uc_link = nullptr;
  makecontext(u, entry, 0);
#endif
}

void switch_context(Context& from, Context& to) {
  leave(from, to);
#if defined(DS4_ASM_SWITCH)
  ds4_standin_switch(&from.stack_pointer, to.stack_pointer);
#else
  if (from.other == nullptr) from.other = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from.other), static_cast<ucontext_t*>(to.other));
#endif
  arrive(from.shadow);
}

}  // namespace ds4::standin
