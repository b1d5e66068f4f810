#include "engram/faults.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace ds4 {

namespace {

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

void FaultyReader::pause(uint64_t noise, size_t n) {
  using std::chrono::nanoseconds;
  const auto now = std::chrono::steady_clock::now();
  const double unit = static_cast<double>(noise >> 11) * 0x1p-53;
  const double delay = static_cast<double>(mixed(noise) >> 11) * 0x1p-53 < plan_.delay_share ? plan_.delay : 0;
  auto until = now + nanoseconds(static_cast<int64_t>(1e9 * (delay + plan_.jitter * unit)));
  if (plan_.bytes_per_second > 0) {
    const auto cost = static_cast<int64_t>(1e9 * static_cast<double>(n) / plan_.bytes_per_second);
    const int64_t start = now.time_since_epoch().count();
    int64_t before = busy_until_.load(), after;
    do after = std::max(before, start) + cost;
    while (!busy_until_.compare_exchange_weak(before, after));
    until = std::max(until, std::chrono::steady_clock::time_point(nanoseconds(after)));
  }
  if (until > now) std::this_thread::sleep_until(until);
}

ssize_t FaultyReader::read(int fd, void* out, size_t n, int64_t offset) {
  const int64_t call = calls_.fetch_add(1);
  const uint64_t noise = mixed(plan_.seed + static_cast<uint64_t>(call));
  pause(noise, n);
  if (plan_.fail_after >= 0 && call >= plan_.fail_after) {
    if (plan_.fail_errno == 0) throw std::runtime_error("injected exception");
    errno = plan_.fail_errno;
    return -1;
  }
  if (plan_.interrupt_every > 0 && call % plan_.interrupt_every == 0) {
    errno = EINTR;
    return -1;
  }
  if (plan_.short_reads) {
    const size_t unit = n % 4096 == 0 && offset % 4096 == 0 ? 4096 : 1;  // direct reads stay whole pages
    n = unit * (1 + mixed(noise) % (n / unit));
  }
  return FileReader::read(fd, out, n, offset);
}

}  // namespace ds4
