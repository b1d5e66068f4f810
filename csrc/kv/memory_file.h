// A file that lives in memory only and has no name: what several mappings share.
#pragma once

#include <cstddef>

namespace ds4 {

// Returns a descriptor of a sparse file of `bytes` zeros, or -1 where the system has none to give.
int memory_file(size_t bytes);
// Writes to it, which needs no mapping and takes no page fault; false when there is no memory. offset: that of a page.
bool fill(int fd, size_t offset, const void* from, size_t bytes);
// Gives the memory of a part back; the part reads as zeros afterwards. Does nothing where the system cannot.
void punch(int fd, size_t offset, size_t bytes);

}  // namespace ds4
