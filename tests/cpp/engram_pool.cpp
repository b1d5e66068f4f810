// The reading threads, the cache and requests under load: a program of its own, so that sanitizers see all of it.
// Built and run by tests/sanitize_engram.sh. Prints "ok", or says what was wrong and returns 1.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "base/error.h"
#include "engram/engram.h"
#include "engram/faults.h"

using namespace ds4;

namespace {

constexpr int kDim = 64, kRowBytes = 66, kRows = 4000;
std::string path;

void check(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

uint8_t value(int64_t row, int i) { return static_cast<uint8_t>((row * 7 + i * 13) % 0x7f); }

void write_table() {
  char name[] = "/tmp/ds4v41-engram-XXXXXX";
  const int fd = ::mkstemp(name);
  path = name;
  std::vector<uint8_t> data(static_cast<size_t>(kRows) * kRowBytes);
  for (int64_t r = 0; r < kRows; ++r)
    for (int i = 0; i < kRowBytes; ++i) data[static_cast<size_t>(r * kRowBytes + i)] = value(r, i);
  check(::write(fd, data.data(), data.size()) == static_cast<ssize_t>(data.size()), "write the table");
  ::close(fd);
}

std::shared_ptr<Engram> open(const FaultPlan& faults, int threads, int64_t cache, bool ram = false) {
  std::vector<TableFiles> tables{{kRows, kDim, {path, 0, kRowBytes}, {}}, {kRows / 2, kDim, {path, kRowBytes, kRowBytes}, {}}};
  std::shared_ptr<Engram> engram(new Engram(std::move(tables), {ram, false, threads, cache},
                                            std::make_unique<FaultyReader>(faults)), LeakInFork<Engram>());
  engram->load(nullptr);
  return engram;
}

bool right(int table, const std::vector<int64_t>& rows, const std::vector<uint8_t>& got) {
  for (size_t k = 0; k < rows.size(); ++k)
    for (int i = 0; i < kRowBytes; ++i)
      if (got[k * kRowBytes + static_cast<size_t>(i)] != value(rows[k] + table, i)) return false;
  return true;
}

// Requests of all kinds from one thread: some are waited for, some abandoned, some promoted.
void ask(Engram& engram, uint64_t seed, int n_requests, std::atomic<int>& failures) {
  std::mt19937_64 random(seed);
  for (int k = 0; k < n_requests; ++k) {
    const int table = static_cast<int>(random() % 2);
    const size_t n = random() % 8 == 0 ? 700 : random() % 40;
    std::vector<int64_t> rows(n);
    for (auto& row : rows) row = static_cast<int64_t>(random() % (random() % 2 ? 50 : kRows / 2));
    std::vector<uint8_t> out(n * kRowBytes);
    const auto ticket = engram.request(table, rows, out.data(), static_cast<Urgency>(random() % 3));
    if (random() % 4 == 0) {
      engram.abandon(ticket);
      std::fill(out.begin(), out.end(), 0);  // ours again
      continue;
    }
    if (random() % 3 == 0) engram.promote(ticket, Urgency::step);
    try {
      ticket->wait(nullptr);
      check(right(table, rows, out), "rows are right");
    } catch (const EngramError&) {
      ++failures;
      engram.abandon(ticket);
    }
  }
}

void load(const char* name, const FaultPlan& faults, int threads, int64_t cache, bool ram, bool fails) {
  std::atomic<int> failures{0};
  {
    const auto engram = open(faults, threads, cache, ram);
    std::vector<std::thread> askers;
    for (uint64_t i = 0; i < 4; ++i) askers.emplace_back([&, i] { ask(*engram, 100 + i, 60, failures); });
    for (auto& t : askers) t.join();
    engram->counters();
  }
  check(fails == (failures > 0), name);
}

void end_with_reads_in_flight() {
  std::vector<uint8_t> out(40 * kRowBytes);
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < 40; ++i) rows.push_back(i * 90);
  FaultPlan slow;
  slow.delay = 0.02;
  const auto engram = open(slow, 8, 1 << 16);
  const auto ticket = engram->request(0, rows, out.data(), Urgency::step);
  engram->abandon(ticket);  // what is read now belongs to nobody
}

void fork_with_reads_in_flight() {
  FaultPlan slow;
  slow.jitter = 0.002;
  auto engram = open(slow, 6, 1 << 16);
  std::vector<uint8_t> out(1000 * kRowBytes);
  std::vector<int64_t> rows(1000);
  for (int64_t i = 0; i < 1000; ++i) rows[static_cast<size_t>(i)] = i * 2;
  const auto ticket = engram->request(0, rows, out.data(), Urgency::chunk);
  const pid_t child = ::fork();
  if (child == 0) {
    std::vector<uint8_t> own(5 * kRowBytes);
    const std::vector<int64_t> few{3, 1, 4, 1, 5};
    engram->request(0, few, own.data(), Urgency::step)->wait(nullptr);
    const bool ok = right(0, few, own);
    engram->abandon(ticket);
    engram.reset();
    ::_exit(ok ? 0 : 1);
  }
  int status = 1;
  ::waitpid(child, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the forked child reads by itself");
  ticket->wait(nullptr);
  check(right(0, rows, out), "rows of the parent");
}

}  // namespace

int main(int argc, char**) {
  write_table();
  FaultPlan good, slow, rough, bad, thrown;
  slow.jitter = 0.0005;
  rough.short_reads = true;
  rough.interrupt_every = 3;
  rough.jitter = 0.0002;
  bad.fail_after = 500;
  thrown.fail_after = 500;
  thrown.fail_errno = 0;
  load("plain", good, 8, 0, false, false);
  load("cache", good, 8, 1 << 16, false, false);
  load("slow", slow, 16, 1 << 15, false, false);
  load("rough", rough, 16, 1 << 18, false, false);
  load("memory", good, 4, 0, true, false);
  load("disk error", bad, 8, 1 << 14, false, true);
  load("exception", thrown, 8, 0, false, true);
  end_with_reads_in_flight();
  if (argc == 1) fork_with_reads_in_flight();  // the thread sanitizer does not follow forks of programs with threads
  ::unlink(path.c_str());
  std::puts("ok");
}
