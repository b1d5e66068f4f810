// Helpers of the CPU files that must not be compiled per instruction set (they use the standard library).
#pragma once

#include <cstddef>

namespace ds4::cpu {

// Anonymous zeroed pages, committed when touched. Throws MemoryPlanError with the size when the system refuses.
void* map_zeroed(size_t bytes);
void unmap(void* p, size_t bytes);
// Gives zeroed pages to this part of a mapping that nobody has written yet.
void populate(void* p, size_t bytes);

[[noreturn]] void raise_cancelled();

}  // namespace ds4::cpu
