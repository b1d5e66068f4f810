// One Engram table: rows of e4m3 codes and e8m0 scales. In a file it is read row by row, never mapped; or in memory.
#pragma once

#include <cstdint>
#include <string>

#include "engram/reader.h"

namespace ds4 {

// A run of equal-sized rows in a file.
struct RowFile {
  std::string path;
  int64_t offset = 0;  // of row 0
  int row_bytes = 0;
};

// codes and scales may be parts of the same rows (GGUF: scales.row_bytes is 0) or two tensors (official folder).
struct TableFiles {
  int64_t n_rows = 0;
  int dim = 0;  // codes of a row; a multiple of 32
  RowFile codes, scales;
  // Not negative: there is no file, the reader makes the bytes of this table up and knows it by this number instead of a
  // file's (benchmarks). codes.path is then what errors call it.
  int made = -1;
};

// Memory that grows, aligned for reads that go around the page cache. One for each thread that reads.
class ReadBuffer {
 public:
  ReadBuffer() = default;
  ~ReadBuffer();
  ReadBuffer(const ReadBuffer&) = delete;
  ReadBuffer& operator=(const ReadBuffer&) = delete;
  uint8_t* need(size_t bytes);  // valid until the next call

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

class EngramTable {
 public:
  static constexpr int64_t kPart = int64_t{8} << 20;  // bytes of one load_part()

  // Opens the files, tells the system that access is random and checks that all rows are there. direct: around the
  // page cache (O_DIRECT, F_NOCACHE). Throws EngramError naming the file.
  EngramTable(TableFiles files, bool direct);
  ~EngramTable();
  EngramTable(const EngramTable&) = delete;
  EngramTable& operator=(const EngramTable&) = delete;

  int64_t n_rows() const { return files_.n_rows; }
  int row_bytes() const { return files_.dim + files_.dim / 32; }
  int64_t bytes() const { return files_.n_rows * row_bytes(); }
  const std::string& path() const { return files_.codes.path; }
  bool in_memory() const { return memory_ != nullptr; }
  bool made() const { return files_.made >= 0; }

  // Rows first .. first + n - 1: out [n][row bytes], codes then scales. Returns the bytes read from disk. Throws
  // EngramError naming file and offset. Any thread.
  int64_t read(FileReader& reader, ReadBuffer& buffer, int64_t first, int n, uint8_t* out) const;
  // The same in two steps, for codes and scales in different files: 0 codes, 1 scales, each to its place in `halves`
  // (n rows of codes, then n rows of scales), in any order; then both together.
  bool split() const { return scales_.fd >= 0 && memory_ == nullptr; }
  int64_t read_half(FileReader& reader, ReadBuffer& buffer, int which, int64_t first, int n, uint8_t* halves) const;
  void join_halves(int n, const uint8_t* halves, uint8_t* out) const;
  // Throw EngramError when there is no such row, or when its bytes hold what is not a number.
  void check_row(int64_t row) const;
  void check_values(int64_t row, const uint8_t* bytes) const;

  // Takes the table into memory: reserve(), then every part, from any threads, then loaded().
  void reserve();
  int64_t n_parts() const;
  void load_part(FileReader& reader, ReadBuffer& buffer, int64_t part);
  void loaded() { memory_ = loading_; }

 private:
  struct Open {
    RowFile file;
    int fd = -1;
    int64_t rows_at = 0;  // of row 0 in memory
  };
  void open(Open& part, const RowFile& file);
  [[noreturn]] void fail(const Open& part, int64_t at, const std::string& what) const;
  void read_bytes(FileReader& reader, ReadBuffer& buffer, const Open& part, int64_t at, int64_t n, uint8_t* out) const;
  int64_t read_direct(FileReader& reader, ReadBuffer& buffer, const Open& part, int64_t at, int64_t n, uint8_t* out) const;
  int64_t rows_of(FileReader& reader, ReadBuffer& buffer, const Open& part, int64_t first, int n, uint8_t* out) const;

  TableFiles files_;
  bool direct_;
  Open codes_, scales_;
  uint8_t* loading_ = nullptr;
  uint8_t* memory_ = nullptr;
};

}  // namespace ds4
