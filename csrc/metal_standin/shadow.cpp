#include "metal_standin/shadow.h"

#include <algorithm>

#include "metal_standin/group.h"
#include "metal_standin/source_line.h"

namespace ds4::standin {

void Shadow::begin_dispatch(const Launch& launch) {
  launch_ = &launch;
  dispatches_.emplace_back(next_unit_, launch.kernel->name);
  buffers_.clear();
  const Kernel& kernel = *launch.kernel;
  for (int i = 0; i < kernel.n_params; ++i) {
    const Param& p = kernel.params[i];
    if (p.kind == ParamKind::threadgroup) continue;
    const Binding& b = launch.buffers[p.index];
    const auto begin = reinterpret_cast<uintptr_t>(b.data);
    buffers_.push_back({begin, begin + b.bytes, p.index, p.name, p.kind == ParamKind::device_write, b.watched, b.phase});
  }
}

void Shadow::begin_group() {
  unit_ = next_unit_++;
  local_.clear();
}

const Shadow::Range* Shadow::find(const std::vector<Range>& ranges, uintptr_t address, size_t bytes, bool writes) const {
  const Range* found = nullptr;
  for (const Range& r : ranges)
    if (address >= r.begin && address + bytes <= r.end) {
      if (r.writable || !writes) return &r;
      found = &r;
    }
  return found;
}

Shadow::Cell& Shadow::cell(uintptr_t address) {
  const uintptr_t page = address / kPage;
  Cached& c = cache_[page % kCached];
  if (c.page != page) {
    std::unique_ptr<Cell[]>& cells = pages_[page];
    if (!cells) cells = std::make_unique<Cell[]>(kPage);
    c = {page, cells.get()};
  }
  return c.cells[address % kPage];
}

void Shadow::access(Group& group, uintptr_t address, size_t bytes, bool writes, bool atomic, const void* code) {
  if (group.on_own_stack(reinterpret_cast<const void*>(address))) return;
  const auto arena = reinterpret_cast<uintptr_t>(group.arena());
  const bool local = address - arena < Group::kArenaBytes;
  if (local && local_.empty())
    for (const Group::Local& l : group.locals()) local_.push_back({arena + l.begin, arena + l.begin + l.bytes, l.index, l.name, true, true, 0});
  const Range* range = find(local ? local_ : buffers_, address, bytes, writes);
  if (range == nullptr) {
    if (!writes && in_this_module(reinterpret_cast<const void*>(address))) return;  // a table of the program
    return outside(group, address, bytes, writes, code);
  }
  const Lane& lane = group.running();
  Event e{&group, {}, range, writes, local, address, code};
  e.now.unit = unit_;
  e.now.epoch = group.barrier_epoch(local);
  e.now.simd_epoch = lane.simd->epoch[local ? 1 : 0];
  e.now.thread = static_cast<uint16_t>(lane.place.index);
  e.now.simd = static_cast<uint8_t>(lane.place.simd);
  e.now.atomic = atomic;
  if (writes && !range->writable) {
    if (told_.insert({code, 3}).second)
      group.add_report(intro(group, code) + "writes buffer index " + std::to_string(range->index) + " ('" + range->name + "'), which it takes as const");
    return;
  }
  if (!range->watched) return;
  for (size_t i = 0; i < bytes; ++i) {
    e.address = address + i;
    check(e, cell(address + i));
  }
}

bool Shadow::ordered(const Access& before, uint32_t before_phase, const Access& now, uint32_t phase) {
  if (before.unit == 0 || before_phase != phase) return true;
  if (before.unit != now.unit) return false;
  return before.thread == now.thread || before.epoch < now.epoch || (before.simd == now.simd && before.simd_epoch < now.simd_epoch);
}

// What is kept of several reads (or atomic writes): enough to tell whether any of them conflicts with a later access.
void Shadow::merge(Access& kept, uint32_t& kept_phase, const Access& now, uint32_t phase) {
  if (ordered(kept, kept_phase, now, phase) && (kept.unit == 0 || kept_phase != phase || kept.unit == now.unit)) {
    kept = now;
    kept_phase = phase;
    return;
  }
  kept.atomic = kept.atomic && now.atomic;
  if (kept.unit != now.unit) {
    kept.unit = kManyUnits;
    return;
  }
  kept.thread = kManyThreads;
  if (kept.simd != now.simd) kept.simd = kManySimds;
}

void Shadow::check(const Event& e, Cell& c) {
  const Access& now = e.now;
  uint32_t phase = e.range->phase;
  if (e.local) {  // the memory of another threadgroup that ran here before is another memory
    phase = unit_;
    if (!e.writes && c.write_phase != phase) {
      if (told_.insert({e.code, 2}).second)
        e.group->add_report(intro(*e.group, e.code) + "reads threadgroup memory index " + std::to_string(e.range->index) + " ('" +
                            e.range->name + "') at byte " + std::to_string(e.address - e.range->begin) + ", which no thread of its threadgroup wrote");
      return;
    }
  }
  if (!ordered(c.write, c.write_phase, now, phase) && !(c.write.atomic && now.atomic)) conflict(e, c.write, true);
  if (!e.writes) return merge(c.read, c.read_phase, now, phase);
  if (!ordered(c.read, c.read_phase, now, phase) && !(c.read.atomic && now.atomic)) conflict(e, c.read, false);
  if (now.atomic && c.write.atomic) return merge(c.write, c.write_phase, now, phase);
  c.write = now;
  c.write_phase = phase;
  if (!now.atomic) c.read = Access();
}

std::string Shadow::intro(Group& group, const void* code) const {
  std::string line = source_line(code);
  return "kernel " + std::string(launch_->kernel->name) + ", " + thread_name(group.running().place) +
         (line.empty() ? "" : ", " + line) + ": ";
}

void Shadow::outside(Group& group, uintptr_t address, size_t bytes, bool writes, const void* code) {
  const auto arena = reinterpret_cast<uintptr_t>(group.arena());
  const bool local = address - arena < Group::kArenaBytes;
  const Range* nearest = nullptr;
  uint64_t distance = ~uint64_t{0};
  for (const Range& r : local ? local_ : buffers_) {
    const uint64_t d = address < r.begin ? r.begin - address : address + bytes - r.end;
    if (d < distance) nearest = &r, distance = d;
  }
  std::string text = std::string(writes ? "writes" : "reads") + " outside its arguments";
  if (nearest != nullptr) {
    const auto at = static_cast<int64_t>(address - nearest->begin);
    text += std::string(": byte ") + std::to_string(at) + " of " + (local ? "threadgroup memory" : "buffer") + " index " +
            std::to_string(nearest->index) + " ('" + nearest->name + "'), which has " + std::to_string(nearest->end - nearest->begin);
  }
  group.stop(intro(group, code) + text);
}

void Shadow::conflict(const Event& e, const Access& before, bool before_wrote) {
  const bool many = before.unit == kManyUnits;
  const bool same_group = before.unit == unit_;
  std::string who = "threads of several threadgroups";
  bool dispatch = false;
  if (same_group) {
    who = before.thread == kManyThreads ? "other threads" : "thread " + std::to_string(before.thread);
    who += " of the same threadgroup";
  } else if (!many) {
    who = "a thread of another threadgroup";
    const auto after = std::upper_bound(dispatches_.begin(), dispatches_.end(), before.unit, [](uint32_t u, const auto& d) { return u < d.first; });
    const auto& of = *(after - 1);
    dispatch = of.first != dispatches_.back().first;
    if (dispatch) who = "the dispatch of kernel " + of.second + " before";
  }
  if (!told_.insert({e.code, before_wrote ? 0 : 1}).second) return;
  e.group->add_report(intro(*e.group, e.code) + (e.writes ? "writes " : "reads ") + (e.local ? "threadgroup memory" : "buffer") + " index " +
                      std::to_string(e.range->index) + " ('" + e.range->name + "') at byte " + std::to_string(e.address - e.range->begin) + ", which " +
                      who + (before_wrote ? " wrote" : " read") + ", with no " + (dispatch ? "memoryBarrier" : "barrier") + " between them");
}

// ---------------------------------------------------------------- what the instrumented kernels call

void note_atomic(const void* address, size_t bytes, bool writes) {
  Group& group = Group::current();
  if (group.shadow() == nullptr) return;
  group.shadow()->access(group, reinterpret_cast<uintptr_t>(address), bytes, writes, true, __builtin_return_address(0));
}

namespace {
inline void plain(const void* address, size_t bytes, bool writes, const void* code) {
  Group& group = Group::current();
  if (group.shadow() != nullptr) group.shadow()->access(group, reinterpret_cast<uintptr_t>(address), bytes, writes, false, code);
}
}  // namespace

}  // namespace ds4::standin

// The compiler calls these ahead of every access (-fsanitize=thread); the sanitizer's own runtime is not linked.
#define DS4_HOOK(name, bytes, writes) \
  extern "C" void name(void* p) { ds4::standin::plain(p, bytes, writes, __builtin_return_address(0)); }
#define DS4_HOOKS(bytes)                                        \
  DS4_HOOK(__tsan_read##bytes, bytes, false)                    \
  DS4_HOOK(__tsan_write##bytes, bytes, true)                    \
  DS4_HOOK(__tsan_unaligned_read##bytes, bytes, false)          \
  DS4_HOOK(__tsan_unaligned_write##bytes, bytes, true)          \
  DS4_HOOK(__tsan_volatile_read##bytes, bytes, false)           \
  DS4_HOOK(__tsan_volatile_write##bytes, bytes, true)
#if DS4_STANDIN_HAS_CHECKED
DS4_HOOKS(1)
DS4_HOOKS(2)
DS4_HOOKS(4)
DS4_HOOKS(8)
DS4_HOOKS(16)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* p, unsigned long n) { ds4::standin::plain(p, n, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, unsigned long n) { ds4::standin::plain(p, n, true, __builtin_return_address(0)); }
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  ds4::standin::plain(from, n, false, __builtin_return_address(0));
  ds4::standin::plain(to, n, true, __builtin_return_address(0));
  return __builtin_memmove(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) { return __tsan_memcpy(to, from, n); }
void* __tsan_memset(void* to, int value, unsigned long n) {
  ds4::standin::plain(to, n, true, __builtin_return_address(0));
  return __builtin_memset(to, value, n);
}
}
#endif
