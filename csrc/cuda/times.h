// How long the device worked on every kernel: an event in front of each launch and one behind it, with DS4_CUDA_TIMES=1.
// Launches are told apart by kernel, function constants and grid. Measuring costs a few microseconds a launch.
#pragma once

#include <string>
#include <vector>

#include "cuda/driver.h"
#include "cuda/graphs.h"

namespace ds4::cuda {

// Asked for by the environment, when the process first launches something.
bool timing();

struct Timed {
  std::string launch;
  Event begin = nullptr, end = nullptr;
};
// Adds what is finished to the sums and frees its events.
void add_times(std::vector<Timed>& finished);

struct KernelTime {
  std::string launch;
  int64_t dispatches = 0;
  double seconds = 0;
};
// The sums since they were last asked for, longest first.
std::vector<KernelTime> take_times();

}  // namespace ds4::cuda
