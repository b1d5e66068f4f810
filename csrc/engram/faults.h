// A reader that misbehaves on purpose, for tests and for what-if measurements.
#pragma once

#include <atomic>
#include <cstdint>

#include "engram/reader.h"

namespace ds4 {

struct FaultPlan {
  double delay = 0;             // seconds every read takes
  double delay_share = 1;       // or only this share of the reads, as if the system's cache had the others
  double jitter = 0;            // and up to this much more, so that reads finish out of order
  double bytes_per_second = 0;  // all reads together; 0: no limit
  bool short_reads = false;     // random lengths
  int interrupt_every = 0;      // every n-th read fails with EINTR; 0: never
  int64_t fail_after = -1;      // reads after this many fail; -1: never
  int fail_errno = 5;           // with this errno (EIO); 0: with a C++ exception instead
  uint64_t seed = 0;
};

class FaultyReader final : public FileReader {
 public:
  explicit FaultyReader(const FaultPlan& plan) : plan_(plan) {}
  ssize_t read(int fd, void* out, size_t n, int64_t offset) override;

 private:
  void pause(uint64_t noise, size_t n);

  const FaultPlan plan_;
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> busy_until_{0};  // nanoseconds of the steady clock, for the bandwidth limit
};

}  // namespace ds4
