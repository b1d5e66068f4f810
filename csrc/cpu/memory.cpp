#include "cpu/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <string>

#include "base/error.h"

namespace ds4::cpu {

void* map_zeroed(size_t bytes) {
  if (bytes == 0) bytes = 1;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
  flags |= MAP_NORESERVE;
#endif
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (p == MAP_FAILED)
    throw MemoryPlanError("[memory] the system refused " + std::to_string(bytes) +
                          " bytes of address space; ask for a smaller context or chunk");
  return p;
}

void unmap(void* p, size_t bytes) {
  if (p != nullptr) munmap(p, bytes == 0 ? 1 : bytes);
}

void populate(void* p, size_t bytes) {
#ifdef __linux__
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, of Linux 5.14; older headers and kernels do not know it
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = reinterpret_cast<uintptr_t>(p) & ~(kPage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + bytes + kPage - 1) & ~(kPage - 1);
  // Where it fails, pages come as they are written.
  (void)madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
  (void)madvise(reinterpret_cast<void*>(first), end - first, kPopulateWrite);
#else
  (void)p, (void)bytes;
#endif
}

void raise_cancelled() { throw Cancelled("[cancel] stopped before the step was complete; the session is unchanged"); }

}  // namespace ds4::cpu
