#include "cpu/memory.h"

#include <sys/mman.h>

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

void raise_cancelled() { throw Cancelled("[cancel] stopped before the step was complete; the session is unchanged"); }

}  // namespace ds4::cpu
