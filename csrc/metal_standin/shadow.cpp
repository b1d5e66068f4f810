#include "metal_standin/shadow.h"
namespace ds4::standin {
Shadow::Shadow() = default;
Shadow::~Shadow() = default;
void Shadow::begin_dispatch(const Launch& l) { launch_ = &l; }
void Shadow::begin_group(uint64_t) {}
void Shadow::access(Group&, uintptr_t, size_t, bool, bool, const void*) {}
void note_atomic(const void*, size_t, bool) {}
}
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define A(n) void __tsan_##n(void*) {}
A(read1) A(read2) A(read4) A(read8) A(read16) A(write1) A(write2) A(write4) A(write8) A(write16)
A(unaligned_read2) A(unaligned_read4) A(unaligned_read8) A(unaligned_read16) A(unaligned_write2) A(unaligned_write4) A(unaligned_write8) A(unaligned_write16)
void __tsan_read_range(void*, unsigned long) {}
void __tsan_write_range(void*, unsigned long) {}
}
