#include "kv/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

namespace ds4 {

int memory_file(size_t bytes) {
#ifdef __linux__
  const int fd = memfd_create("ds4v41-state", MFD_CLOEXEC);
#else
  static std::atomic<unsigned> counter{0};
  const std::string name = "/ds4v41-" + std::to_string(getpid()) + "-" + std::to_string(counter++);
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  if (fd >= 0) shm_unlink(name.c_str());
#endif
  if (fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

bool fill(int fd, size_t offset, const void* from, size_t bytes) {
#ifdef __linux__
  const auto* p = static_cast<const uint8_t*>(from);
  for (size_t done = 0; done < bytes;) {
    const ssize_t w = pwrite(fd, p + done, bytes - done, static_cast<off_t>(offset + done));
    if (w <= 0) return false;
    done += static_cast<size_t>(w);
  }
#else  // shared memory objects cannot be written to there, only mapped
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (p == MAP_FAILED) return false;
  std::memcpy(p, from, bytes);
  munmap(p, bytes);
#endif
  return true;
}

void punch(int fd, size_t offset, size_t bytes) {
#ifdef __linux__
  (void)!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
#else
  (void)fd, (void)offset, (void)bytes;
#endif
}

}  // namespace ds4
