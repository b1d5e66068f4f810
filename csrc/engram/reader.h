// How bytes come from a file. Tests put slow, short and failing reads in between (faults.h).
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace ds4 {

class FileReader {
 public:
  virtual ~FileReader() = default;
  // As pread(2): may return less, and may fail with errno set. Called by several threads at once.
  virtual ssize_t read(int fd, void* out, size_t n, int64_t offset) {
    return ::pread(fd, out, n, static_cast<off_t>(offset));
  }
};

}  // namespace ds4
