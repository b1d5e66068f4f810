#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/threads.h"
#include "metal_standin/group.h"
#include "metal_standin/shadow.h"

namespace ds4::standin {

Order parse_order(const std::string& name) {
  if (name == "forward") return Order::forward;
  if (name == "reverse") return Order::reverse;
  if (name == "shuffled") return Order::shuffled;
  throw OptionError("[stand-in] order of threads: expected 'forward', 'reverse' or 'shuffled', found '" + name + "'");
}

void Report::add(std::string text) {
  if (n_++ < kMost) lines_.push_back(std::move(text));
}

std::string Report::text() const {
  std::string all;
  for (const std::string& line : lines_) all += (all.empty() ? "" : "\n") + line;
  if (n_ > lines_.size()) all += "\nand " + std::to_string(n_ - lines_.size()) + " more";
  return all;
}

// ---------------------------------------------------------------- what Metal refuses

namespace {

void validate_param(const Launch& l, const Param& p, Report& report) {
  const std::string at = "kernel " + std::string(l.kernel->name) + ": argument '" + p.name + "' ";
  if (p.kind == ParamKind::threadgroup) {
    if (l.threadgroup_bytes[p.index] == 0) report.add(at + "needs threadgroup memory at index " + std::to_string(p.index) + ", none was set");
    return;
  }
  const Binding& b = l.buffers[p.index];
  const std::string index = "buffer index " + std::to_string(p.index);
  if (b.data == nullptr) return report.add(at + "needs " + index + ", nothing is bound there");
  if (reinterpret_cast<uintptr_t>(b.data) % p.alignment != 0)
    report.add(at + "(" + index + ") must be aligned to " + std::to_string(p.alignment) + " bytes: wrong offset");
  if (p.reference && b.bytes < p.size)
    report.add(at + "(" + index + ") reads a struct of " + std::to_string(p.size) + " bytes, bound are " + std::to_string(b.bytes));
  if (p.kind == ParamKind::device_write && b.read_only)
    report.add(at + "(" + index + ") is written by the kernel, but its bytes were set with setBytes");
}

void validate_sizes(const Launch& l, Report& report) {
  const std::string at = "kernel " + std::string(l.kernel->name) + ": ";
  const uint64_t threads = l.group_size.count();
  if (threads == 0 || threads > kMaxThreads)
    report.add(at + std::to_string(threads) + " threads in a threadgroup, 1 to " + std::to_string(kMaxThreads) + " are possible");
  if (l.kernel->synchronises && threads % kSimdWidth != 0)
    report.add(at + std::to_string(threads) + " threads in a threadgroup; kernels that synchronise need a multiple of 32");
  if (l.groups.count() == 0) report.add(at + "an empty grid");
  uint64_t memory = 0;
  for (uint32_t bytes : l.threadgroup_bytes) {
    memory += bytes;
    if (bytes % 16 != 0) report.add(at + std::to_string(bytes) + " bytes of threadgroup memory, must be a multiple of 16");
  }
  if (memory > kMaxThreadgroupBytes)
    report.add(at + std::to_string(memory) + " bytes of threadgroup memory, at most " + std::to_string(kMaxThreadgroupBytes) + " are possible");
}

}  // namespace

bool validate(const Launch& l, Report& report) {
  const bool before = report.empty();
  validate_sizes(l, report);
  for (int i = 0; i < l.kernel->n_params; ++i) validate_param(l, l.kernel->params[i], report);
  for (int i = 0; i < l.family->n_constants; ++i) {
    const FunctionConstant& c = l.family->constants[i];
    const auto set = std::find_if(l.constants.begin(), l.constants.end(), [&](const ConstantValue& v) { return v.index == c.index; });
    if ((l.kernel->constants >> c.index & 1u) != 0 && set == l.constants.end())
      report.add("kernel " + std::string(l.kernel->name) + ": function constant '" + c.name + "' (index " + std::to_string(c.index) + ") has no value");
  }
  return before && report.empty();
}

// ---------------------------------------------------------------- running

namespace {

int n_threads() {
  const char* wish = std::getenv("DS4_STANDIN_THREADS");
  if (wish == nullptr) return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 4u));
  char* end = nullptr;
  const long n = std::strtol(wish, &end, 10);
  if (*wish == 0 || *end != 0 || n < 1 || n > 64)
    throw OptionError("DS4_STANDIN_THREADS: expected 1 to 64, found '" + std::string(wish) + "'");
  return static_cast<int>(n);
}

ThreadPool& pool() {
  // Never deleted: its threads may be inside a kernel when the process ends.
  static ThreadPool* const threads = new ThreadPool(n_threads());
  return *threads;
}

Group& own_group() {
  thread_local Group group;
  return group;
}

void set_constants(const Launch& l, const Family& family) {
  for (const ConstantValue& v : l.constants)
    for (int i = 0; i < family.n_constants; ++i)
      if (family.constants[i].index == v.index) {
        if (v.type == ConstantType::boolean) *static_cast<bool*>(family.constants[i].value) = v.bits != 0;
        else *static_cast<uint32_t*>(family.constants[i].value) = v.bits;
      }
}

constexpr uint64_t kFewThreads = 256;

uint64_t turn(const Launch& l, uint64_t i, uint64_t n) {
  if (l.order == Order::reverse) return n - 1 - i;
  if (l.order == Order::shuffled) return (i * 0x9e3779b1ull + l.serial) % n;  // a permutation: the factor is a prime above n
  return i;
}

}  // namespace

namespace {
void execute_in(const Family& family, const Launch& l, Shadow* shadow, Report& report) {
  static std::mutex one_at_a_time;  // function constants are variables of the family
  std::lock_guard<std::mutex> lock(one_at_a_time);
  set_constants(l, family);
  const uint64_t n = l.groups.count();
  if (shadow != nullptr) {
    FlushSubnormals flush;
    shadow->begin_dispatch(l);
    for (uint64_t i = 0; i < n; ++i)
      if (!own_group().run(l, turn(l, i, n), shadow, report)) return;
    return;
  }
  std::mutex report_mutex;
  std::atomic<bool> failed{false};
  const uint64_t piece = std::max<uint64_t>(1, n / 64);  // few enough that taking one costs nothing
  auto body = [&](int64_t p, int) {
    Report mine;
    const uint64_t begin = static_cast<uint64_t>(p) * piece;
    for (uint64_t i = begin; i < std::min(n, begin + piece) && !failed; ++i)
      if (!own_group().run(l, turn(l, i, n), nullptr, mine)) failed = true;
    if (mine.empty()) return;
    std::lock_guard<std::mutex> guard(report_mutex);
    report.add(mine.text());
  };
  const auto pieces = static_cast<int64_t>((n + piece - 1) / piece);
  if (l.grid.count() < kFewThreads) {  // waking the others would take longer
    FlushSubnormals flush;
    for (int64_t p = 0; p < pieces; ++p) body(p, 0);
  } else {
    parallel_for(pool(), nullptr, pieces, body);
  }
}
}  // namespace

void execute(const Launch& l, Shadow* shadow, Report& report) {
  if (shadow != nullptr && l.checked == nullptr)
    return report.add("kernel " + std::string(l.kernel->name) + ": this build has no checked kernels");
  execute_in(shadow != nullptr ? *l.checked_family : *l.family, l, shadow, report);
}

}  // namespace ds4::standin
