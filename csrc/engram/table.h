// One Engram table on disk: rows of e4m3 codes and e8m0 scales, read with pread, never mapped.
#pragma once

#include <cstdint>
#include <string>

namespace ds4 {

// A run of equal-sized rows in a file.
struct RowFile {
  std::string path;
  int64_t offset = 0;  // of row 0
  int row_bytes = 0;
};

class EngramTable {
 public:
  // codes and scales may be parts of the same rows (GGUF: scale.row_bytes is 0) or two tensors (official folder).
  EngramTable(int64_t n_rows, int dim, RowFile codes, RowFile scales);
  ~EngramTable();
  EngramTable(const EngramTable&) = delete;
  EngramTable& operator=(const EngramTable&) = delete;

  int row_bytes() const { return dim_ + dim_ / 32; }
  // out: row_bytes(): codes, then scales. Throws EngramError naming file and offset.
  void read(int64_t row, uint8_t* out) const;

 private:
  int64_t n_rows_;
  int dim_;
  RowFile codes_, scales_;
  int codes_fd_ = -1, scales_fd_ = -1;
};

}  // namespace ds4
