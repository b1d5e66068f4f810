#include "engram/table.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace ds4 {

namespace {

constexpr int64_t kAlign = 4096;  // of offset, length and memory of direct reads

// The file at this path is not the one that was opened, or has another size: part of an error's message.
std::string changed_since(int fd, const std::string& path) {
  struct stat opened, now;
  if (::fstat(fd, &opened) != 0) return "";
  if (::stat(path.c_str(), &now) != 0) return " (the file was removed after it was opened)";
  if (opened.st_ino != now.st_ino || opened.st_dev != now.st_dev) return " (the file was replaced after it was opened)";
  return "";
}

std::string system_error() { return std::strerror(errno); }

}  // namespace

ReadBuffer::~ReadBuffer() { std::free(data_); }

uint8_t* ReadBuffer::need(size_t bytes) {
  if (bytes > bytes_) {
    std::free(data_);
    bytes_ = 0;
    bytes = (bytes + kAlign - 1) / kAlign * kAlign;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(kAlign, bytes));
    if (data_ == nullptr) throw std::bad_alloc();
    bytes_ = bytes;
  }
  return data_;
}

EngramTable::EngramTable(TableFiles files, bool direct) : files_(std::move(files)), direct_(direct) {
  try {
    open(codes_, files_.codes);
    scales_.rows_at = files_.n_rows * files_.codes.row_bytes;
    if (files_.scales.row_bytes > 0) open(scales_, files_.scales);
  } catch (...) {
    if (codes_.fd >= 0) ::close(codes_.fd);
    if (scales_.fd >= 0) ::close(scales_.fd);
    throw;
  }
}

EngramTable::~EngramTable() {
  if (codes_.fd >= 0 && files_.made < 0) ::close(codes_.fd);
  if (scales_.fd >= 0) ::close(scales_.fd);
  if (loading_ != nullptr) ::munmap(loading_, static_cast<size_t>(bytes()));
}

void EngramTable::open(Open& part, const RowFile& file) {
  part.file = file;
  if (files_.made >= 0) {
    part.fd = files_.made;
    return;
  }
  int flags = O_RDONLY | O_CLOEXEC;
#ifdef O_DIRECT
  if (direct_) flags |= O_DIRECT;
#endif
  part.fd = ::open(file.path.c_str(), flags);
  if (part.fd < 0 && direct_ && errno == EINVAL)
    throw EngramError("[engram] " + file.path + ": its file system has no direct reads; open without engram_direct");
  if (part.fd < 0) throw EngramError("[engram] cannot open " + file.path + ": " + system_error());
  struct stat info;
  if (::fstat(part.fd, &info) != 0) throw EngramError("[engram] cannot look at " + file.path + ": " + system_error());
  if (!S_ISREG(info.st_mode)) throw EngramError("[engram] " + file.path + " is not a file");
  const int64_t end = file.offset + files_.n_rows * file.row_bytes;
  if (info.st_size < end)
    throw EngramError("[engram] " + file.path + " is truncated: expected " + std::to_string(files_.n_rows) +
                      " rows of " + std::to_string(file.row_bytes) + " bytes up to offset " + std::to_string(end) +
                      ", but the file ends at " + std::to_string(info.st_size));
  // Rows lie far apart: reading ahead would only cost.
#if defined(__linux__)
  ::posix_fadvise(part.fd, 0, 0, POSIX_FADV_RANDOM);
#elif defined(F_RDAHEAD)
  ::fcntl(part.fd, F_RDAHEAD, 0);
  if (direct_) ::fcntl(part.fd, F_NOCACHE, 1);
#endif
}

void EngramTable::fail(const Open& part, int64_t at, const std::string& what) const {
  const int64_t row = (at - part.file.offset) / part.file.row_bytes;
  throw EngramError("[engram] " + part.file.path + ", offset " + std::to_string(at) + ", row " + std::to_string(row) +
                    ": " + what + (files_.made < 0 ? changed_since(part.fd, part.file.path) : std::string()));
}

void EngramTable::check_row(int64_t row) const {
  if (row < 0 || row >= files_.n_rows)
    throw EngramError("[engram] row " + std::to_string(row) + " of " + files_.codes.path + " is out of range (" +
                      std::to_string(files_.n_rows) + " rows)");
}

// One read around the page cache, into aligned memory: how many of the wanted bytes it brought, as pread.
int64_t EngramTable::read_direct(FileReader& reader, ReadBuffer& buffer, const Open& part, int64_t at, int64_t n,
                                 uint8_t* out) const {
  const int64_t from = at / kAlign * kAlign, to = (at + n + kAlign - 1) / kAlign * kAlign;
  uint8_t* staged = buffer.need(static_cast<size_t>(to - from));
  int64_t got = 0;
  // A short read may bring only what lies before the wanted bytes; that is not the end of the file.
  for (int tries = 0; tries < 100; ++tries) {
    got = reader.read(part.fd, staged, static_cast<size_t>(to - from), from);
    if (got <= 0) return got;
    if (got > at - from) break;
  }
  const int64_t brought = std::min(n, got - (at - from));
  if (brought > 0) std::memcpy(out, staged + (at - from), static_cast<size_t>(brought));
  return std::max<int64_t>(0, brought);
}

void EngramTable::read_bytes(FileReader& reader, ReadBuffer& buffer, const Open& part, int64_t at, int64_t n,
                             uint8_t* out) const {
  for (int64_t done = 0; done < n;) {
#ifdef O_DIRECT
    const int64_t got = direct_ ? read_direct(reader, buffer, part, at + done, n - done, out + done)
                                : reader.read(part.fd, out + done, static_cast<size_t>(n - done), at + done);
#else
    const int64_t got = reader.read(part.fd, out + done, static_cast<size_t>(n - done), at + done);
#endif
    if (got > 0) {
      done += got;
    } else if (got == 0) {
      fail(part, at + done, "the file ends inside this row: it is truncated");
    } else if (errno != EINTR) {
      fail(part, at + done, "read failed: " + system_error());
    }
  }
}

// The n rows of one file as they lie there. Returns the bytes read from disk.
int64_t EngramTable::rows_of(FileReader& reader, ReadBuffer& buffer, const Open& part, int64_t first, int n,
                             uint8_t* out) const {
  const int64_t size = part.file.row_bytes;
  if (memory_ != nullptr) {
    std::memcpy(out, memory_ + part.rows_at + first * size, static_cast<size_t>(n * size));
    return 0;
  }
  read_bytes(reader, buffer, part, part.file.offset + first * size, n * size, out);
  return n * size;
}

int64_t EngramTable::read(FileReader& reader, ReadBuffer& buffer, int64_t first, int n, uint8_t* out) const {
  check_row(first);
  check_row(first + n - 1);
  if (scales_.fd < 0) return rows_of(reader, buffer, codes_, first, n, out);
  thread_local ReadBuffer staging;
  uint8_t* halves = staging.need(static_cast<size_t>(n) * row_bytes());
  const int64_t bytes = read_half(reader, buffer, 0, first, n, halves) + read_half(reader, buffer, 1, first, n, halves);
  join_halves(n, halves, out);
  return bytes;
}

int64_t EngramTable::read_half(FileReader& reader, ReadBuffer& buffer, int which, int64_t first, int n,
                               uint8_t* halves) const {
  if (which == 0) return rows_of(reader, buffer, codes_, first, n, halves);
  return rows_of(reader, buffer, scales_, first, n, halves + static_cast<int64_t>(n) * codes_.file.row_bytes);
}

void EngramTable::join_halves(int n, const uint8_t* halves, uint8_t* out) const {
  const int64_t code_bytes = codes_.file.row_bytes, scale_bytes = scales_.file.row_bytes;
  const uint8_t* scales = halves + n * code_bytes;
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(out + i * row_bytes(), halves + i * code_bytes, static_cast<size_t>(code_bytes));
    std::memcpy(out + i * row_bytes() + code_bytes, scales + i * scale_bytes, static_cast<size_t>(scale_bytes));
  }
}

// Codes and scales that are not numbers: damage that would otherwise spread through everything that follows.
void EngramTable::check_values(int64_t row, const uint8_t* bytes) const {
  const int dim = files_.dim, n = row_bytes();
  unsigned bad = 0;
  for (int i = 0; i < dim; ++i) bad |= (bytes[i] & 0x7f) == 0x7f;
  for (int i = dim; i < n; ++i) bad |= bytes[i] == 0xff;
  if (bad == 0) return;
  int i = 0;
  while (i < dim ? (bytes[i] & 0x7f) != 0x7f : bytes[i] != 0xff) ++i;
  const bool code = i < dim;
  const Open& part = code || scales_.fd < 0 ? codes_ : scales_;
  const int within = &part == &scales_ ? i - dim : i;
  fail(part, part.file.offset + row * part.file.row_bytes + within,
       code ? "a code is not a number" : "a scale is not a number");
}

void EngramTable::reserve() {
  void* p = ::mmap(nullptr, static_cast<size_t>(bytes()), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    throw MemoryPlanError("[engram] cannot reserve " + std::to_string(bytes()) + " bytes for the table of " + path());
  loading_ = static_cast<uint8_t*>(p);
}

int64_t EngramTable::n_parts() const { return (bytes() + kPart - 1) / kPart; }

void EngramTable::load_part(FileReader& reader, ReadBuffer& buffer, int64_t part) {
  const int64_t from = part * kPart, to = std::min(bytes(), from + kPart);
  const int64_t border = scales_.fd < 0 ? bytes() : scales_.rows_at;
  if (from < border)
    read_bytes(reader, buffer, codes_, codes_.file.offset + from, std::min(to, border) - from, loading_ + from);
  if (to > border) {
    const int64_t start = std::max(from, border);
    read_bytes(reader, buffer, scales_, scales_.file.offset + (start - border), to - start, loading_ + start);
  }
}

}  // namespace ds4
