#include "kv/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
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

void punch(int fd, size_t offset, size_t bytes) {
#ifdef __linux__
  (void)!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
#else
  (void)fd, (void)offset, (void)bytes;
#endif
}

}  // namespace ds4
