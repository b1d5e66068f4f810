// One dispatch: what to run, on which memory, in which order; and what went wrong.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "metal_standin/kernel/abi.h"

namespace ds4::standin {

class Shadow;

enum class Order : uint8_t { forward, reverse, shuffled };
Order parse_order(const std::string& name);  // throws OptionError

struct Binding {  // memory behind one buffer index; bytes 0: nothing is bound
  void* data = nullptr;
  uint64_t bytes = 0;
  bool read_only = false;   // setBytes: Metal gives the kernel a copy
  uint32_t phase = 0;       // accesses of dispatches in one phase have no order between them (checked mode)
  bool watched = true;      // false: nobody writes this memory in that phase, so nothing can conflict
};

struct ConstantValue {
  uint16_t index;
  ConstantType type;
  uint32_t bits;
};

struct Launch {
  const Kernel* kernel = nullptr;          // the fast build of it
  const Kernel* checked = nullptr;         // the instrumented build, used when a shadow is given
  const Family* family = nullptr;
  const Family* checked_family = nullptr;
  Grid3 groups, group_size, grid;          // grid: threads; less than groups * group_size when edges are cut
  Binding buffers[kMaxBuffers];
  uint32_t threadgroup_bytes[kMaxBuffers] = {};
  std::vector<ConstantValue> constants;
  Order order = Order::forward;
  uint64_t serial = 0;                     // seeds the shuffle; names the dispatch in reports
};

// Problems of one or more launches, each a complete sentence. Never more than kMost; the rest is counted.
class Report {
 public:
  static constexpr size_t kMost = 8;
  void add(std::string text);
  bool empty() const { return n_ == 0; }
  std::string text() const;

 private:
  std::vector<std::string> lines_;
  size_t n_ = 0;
};

// Of launches that may overlap in time: memory that none of them writes needs no watching. Weights, above all.
template <class Launches>
void mark_watched(Launches& launches) {
  const auto each = [](Launch& l, auto&& what) {
    for (int i = 0; i < l.kernel->n_params; ++i)
      if (l.kernel->params[i].kind != ParamKind::threadgroup) what(l.kernel->params[i], l.buffers[l.kernel->params[i].index]);
  };
  struct Written {
    const char *begin, *end;
  };
  std::vector<Written> written;
  for (Launch* l : launches)
    each(*l, [&](const Param& p, Binding& b) {
      const char* begin = static_cast<const char*>(b.data);
      if (p.kind == ParamKind::device_write) written.push_back({begin, begin + b.bytes});
    });
  for (Launch* l : launches)
    each(*l, [&]([[maybe_unused]] const Param&, Binding& b) {
      const char* begin = static_cast<const char*>(b.data);
      b.watched = false;
      for (const Written& w : written) b.watched = b.watched || (w.begin < begin + b.bytes && begin < w.end);
    });
}

// Everything Metal's validation would refuse: sizes, limits, missing or short buffers. True: may run.
bool validate(const Launch& launch, Report& report);

// Runs it on the threads of the stand-in. With a shadow: one thread, every access checked.
void execute(const Launch& launch, Shadow* shadow, Report& report);

}  // namespace ds4::standin
