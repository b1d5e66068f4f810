#include "cuda/times.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace ds4::cuda {

namespace {

std::mutex g_mutex;
std::map<std::string, KernelTime>& sums() {
  static auto* all = new std::map<std::string, KernelTime>;
  return *all;
}

}  // namespace

bool timing() {
  static const char* const asked = std::getenv("DS4_CUDA_TIMES");
  return asked != nullptr && std::strcmp(asked, "1") == 0;
}

void add_times(std::vector<Timed>& finished) {
  const Driver& driver = Driver::get();
  const std::lock_guard<std::mutex> lock(g_mutex);
  for (const Timed& t : finished) {
    KernelTime& sum = sums()[t.launch];
    sum.launch = t.launch;
    ++sum.dispatches;
    sum.seconds += driver.seconds(t.begin, t.end);
    driver.free_event(t.begin);
    driver.free_event(t.end);
  }
  finished.clear();
}

std::vector<KernelTime> take_times() {
  std::vector<KernelTime> all;
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    for (const auto& [name, sum] : sums()) all.push_back(sum);
    sums().clear();
  }
  std::sort(all.begin(), all.end(), [](const KernelTime& a, const KernelTime& b) { return a.seconds > b.seconds; });
  return all;
}

}  // namespace ds4::cuda
