#include "engram/table.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace ds4 {

namespace {

int open_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw EngramError("[engram] cannot open " + path + ": " + std::strerror(errno));
  return fd;
}

void read_exactly(int fd, const RowFile& file, int64_t row, uint8_t* out) {
  const int64_t at = file.offset + row * file.row_bytes;
  int64_t done = 0;
  while (done < file.row_bytes) {
    const ssize_t got = ::pread(fd, out + done, static_cast<size_t>(file.row_bytes - done), at + done);
    if (got > 0) {
      done += got;
    } else if (got == 0) {
      throw EngramError("[engram] " + file.path + " ends at offset " + std::to_string(at + done) + " inside row " +
                        std::to_string(row) + " (expected " + std::to_string(file.row_bytes) +
                        " bytes): the file is truncated");
    } else if (errno != EINTR) {
      throw EngramError("[engram] reading " + file.path + " at offset " + std::to_string(at + done) + ": " +
                        std::strerror(errno));
    }
  }
}

}  // namespace

EngramTable::EngramTable(int64_t n_rows, int dim, RowFile codes, RowFile scales)
    : n_rows_(n_rows), dim_(dim), codes_(std::move(codes)), scales_(std::move(scales)) {
  codes_fd_ = open_file(codes_.path);
  if (scales_.row_bytes > 0) scales_fd_ = open_file(scales_.path);
}

EngramTable::~EngramTable() {
  if (codes_fd_ >= 0) ::close(codes_fd_);
  if (scales_fd_ >= 0) ::close(scales_fd_);
}

void EngramTable::read(int64_t row, uint8_t* out) const {
  if (row < 0 || row >= n_rows_)
    throw EngramError("[engram] row " + std::to_string(row) + " of " + codes_.path + " is out of range (" +
                      std::to_string(n_rows_) + " rows)");
  read_exactly(codes_fd_, codes_, row, out);
  if (scales_fd_ >= 0) read_exactly(scales_fd_, scales_, row, out + codes_.row_bytes);
  for (int i = 0; i < dim_; ++i)
    if ((out[i] & 0x7f) == 0x7f)
      throw EngramError("[engram] row " + std::to_string(row) + " of " + codes_.path + " (offset " +
                        std::to_string(codes_.offset + row * codes_.row_bytes + i) + ") holds a code that is not a number");
  for (int i = dim_; i < row_bytes(); ++i)
    if (out[i] == 0xff)
      throw EngramError("[engram] row " + std::to_string(row) + " of " + codes_.path +
                        " has a scale that is not a number");
}

}  // namespace ds4
