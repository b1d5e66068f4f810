// Stored rows into a state, on several threads: what a restore waits for is page faults, copies and checksums.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <string>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "kv/state.h"
#include "kv/xxh64.h"

namespace ds4 {

void read_all(int fd, int64_t offset, uint8_t* to, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t got = pread(fd, to + done, bytes - done, static_cast<off_t>(offset + static_cast<int64_t>(done)));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      throw StoreError("[restore] the file cannot be read at offset " +
                       std::to_string(offset + static_cast<int64_t>(done)) + ": " + std::generic_category().message(errno));
    if (got == 0)
      throw StoreError("[restore] the file ends at offset " + std::to_string(offset + static_cast<int64_t>(done)) + ", " +
                       std::to_string(bytes - done) + " bytes early");
    done += static_cast<size_t>(got);
  }
}

namespace {

constexpr size_t kPiece = 128 << 10;        // read and summed while it is in the second-level cache
constexpr size_t kBytesAThread = 1 << 20;   // less is not worth a thread
constexpr size_t kMostThreads = 4;

void copy_page(const uint8_t* data, const std::vector<Incoming>& target) {
  for (const Incoming& in : target) {
    std::copy_n(data + in.held, in.to.bytes - in.held, in.to.data + in.held);
    data += in.to.bytes;
  }
}

// One page into its places; throws StoreError when it is not what it should be.
void read_page(const PageSource& page, const std::vector<Incoming>& target) {
  if (page.data != nullptr) return copy_page(page.data, target);
  int64_t offset = page.offset;
  std::vector<uint8_t> unused;  // rows that are there already count for the sum only
  Xxh64 sum;
  for (const Incoming& in : target)
    for (size_t done = 0; done < in.to.bytes;) {
      const bool held = done < in.held;
      const size_t n = std::min(kPiece, (held ? in.held : in.to.bytes) - done);
      if (held) unused.resize(std::max(unused.size(), n));
      uint8_t* to = held ? unused.data() : in.to.data + done;
      read_all(page.fd, offset, to, n);
      sum.add(to, n);
      offset += static_cast<int64_t>(n);
      done += n;
    }
  if (sum.value() != page.sum) throw StoreError("the payload is damaged (checksum)");
}

// Joins what was started, however the scope is left.
struct Helpers {
  ~Helpers() {
    for (std::thread& t : threads) t.join();
  }
  std::vector<std::thread> threads;
};

}  // namespace

void State::prepare_pages(const std::vector<PageSource>& pages) {
  for (const PageSource& page : pages) {
    import_target(page.begin, page.end);
    imported_ = std::max(imported_, page.end);
  }
}

std::optional<BadSource> State::read_pages(const std::vector<PageSource>& pages, const std::function<void()>& beside) {
  size_t bytes = 0;
  std::vector<std::vector<Incoming>> targets;
  for (const PageSource& page : pages) {
    targets.push_back(incoming(page.begin, page.end));
    for (const Incoming& in : targets.back()) bytes += in.to.bytes;
  }
  std::vector<std::string> why(pages.size());
  take_large_pages();  // alone: the system waits for every processor that handles pages at the time
  std::atomic<size_t> next_page{0};
  std::atomic<bool> bad{false};
  const auto work = [&] {
    for (size_t i; !bad && (i = next_page++) < pages.size();) {
      try {
        read_page(pages[i], targets[i]);
      } catch (const std::exception& error) {
        why[i] = error.what();
        bad = true;
      }
    }
  };
  {
    Helpers helpers;
    const size_t cores = std::max(1u, std::thread::hardware_concurrency());
    const size_t n = std::min({kMostThreads, cores, 1 + bytes / kBytesAThread});
    try {
      while (helpers.threads.size() + 1 < n) helpers.threads.emplace_back(work);
    } catch (const std::system_error&) {  // the system has no more threads: this one does it all
    }
    if (beside) beside();
    work();
  }
  for (size_t i = 0; i < pages.size(); ++i)
    if (!why[i].empty()) return BadSource{static_cast<int64_t>(i), why[i]};
  return std::nullopt;
}

}  // namespace ds4
