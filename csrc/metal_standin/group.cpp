#include "metal_standin/group.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "metal_standin/shadow.h"

namespace ds4::standin {

namespace {

// Read at every operation of every lane, so it must not cost a call (this much room is kept for libraries loaded late).
__attribute__((tls_model("initial-exec"))) thread_local Group* t_group = nullptr;

// One place in the text: names are almost always the same object, and comparing them is not free.
bool same_text(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }
bool same_place(const Site& a, const Site& b) { return a.line == b.line && same_text(a.what, b.what) && same_text(a.file, b.file); }

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

template <class T>
void arrange(T* order, int n, Order kind, uint64_t seed) {
  for (int i = 0; i < n; ++i) order[i] = static_cast<T>(kind == Order::reverse ? n - 1 - i : i);
  if (kind != Order::shuffled) return;
  for (int i = n - 1; i > 0; --i) {
    seed = mix(seed);
    const int j = static_cast<int>(seed % static_cast<uint64_t>(i + 1));
    const T t = order[i];
    order[i] = order[j];
    order[j] = t;
  }
}

Grid3 unflatten(uint64_t index, const Grid3& size) {
  Grid3 g;
  g.x = static_cast<uint32_t>(index % size.x);
  g.y = static_cast<uint32_t>(index / size.x % size.y);
  g.z = static_cast<uint32_t>(index / size.x / size.y);
  return g;
}

uint32_t cut(uint32_t size, uint32_t start, uint32_t end) { return start + size <= end ? size : end - start; }

}  // namespace

std::string where(const Site& site) { return std::string(site.what) + " at " + site.file + ":" + std::to_string(site.line); }

std::string thread_name(const Place& p) {
  const auto three = [](const Grid3& g) {
    return "(" + std::to_string(g.x) + ", " + std::to_string(g.y) + ", " + std::to_string(g.z) + ")";
  };
  return "thread " + three(p.in_group) + " of threadgroup " + three(p.group);
}

Group::Group() : lanes_(new Lane[kMaxThreads]), simds_(new Simd[kSimdWidth]) {
  arena_ = static_cast<char*>(std::aligned_alloc(4096, kArenaBytes));
  if (arena_ == nullptr) throw std::bad_alloc();
}
Group::~Group() { std::free(arena_); }

Group& Group::current() { return *t_group; }

bool Group::on_own_stack(const void* p) const {
  return !flat_ && stacks_.holds(static_cast<int>(running_ - lanes_.get()), p);
}

void Group::place_threads(uint64_t index) {
  const Launch& l = *launch_;
  const Grid3 group = unflatten(index, l.groups);
  const Grid3 full = l.group_size;
  Grid3 size;
  size.x = cut(full.x, group.x * full.x, l.grid.x);
  size.y = cut(full.y, group.y * full.y, l.grid.y);
  size.z = cut(full.z, group.z * full.z, l.grid.z);
  n_ = static_cast<int>(size.count());
  n_simds_ = (n_ + kSimdWidth - 1) / kSimdWidth;
  const uint64_t seed = mix(l.serial) ^ index;
  arrange(simd_order_, n_simds_, l.order, seed);
  for (int s = 0; s < n_simds_; ++s) {
    Simd& simd = simds_[s];
    simd.first = s * kSimdWidth;
    simd.n = n_ - simd.first < kSimdWidth ? n_ - simd.first : kSimdWidth;
    simd.arrived = simd.phase = 0;
    simd.ready = simd.n == kSimdWidth ? ~0u : (1u << simd.n) - 1u;
    arrange(simd.lane_at, simd.n, l.order, seed + 1 + static_cast<uint64_t>(s));
    for (int b = 0; b < simd.n; ++b) {
      Lane& lane = lanes_[simd.first + simd.lane_at[b]];
      lane.simd = &simd;
      lane.bit = static_cast<uint8_t>(b);
      lane.state = Lane::State::ready;
    }
  }
  for (int i = 0; i < n_; ++i) {
    Place& p = lanes_[i].place;
    p.in_group = unflatten(static_cast<uint64_t>(i), size);
    p.group = group;
    p.in_grid = {group.x * full.x + p.in_group.x, group.y * full.y + p.in_group.y, group.z * full.z + p.in_group.z};
    p.group_size = size;
    p.groups = l.groups;
    p.grid = l.grid;
    p.index = static_cast<uint32_t>(i);
    p.lane = static_cast<uint32_t>(i % kSimdWidth);
    p.simd = static_cast<uint32_t>(i / kSimdWidth);
    p.n_simd = static_cast<uint32_t>(n_simds_);
  }
}

void Group::place_memory() {
  const size_t gap = shadow_ != nullptr ? Shadow::kGap : 0;
  for (int i = 0; i < kMaxBuffers; ++i) pointers_.buffer[i] = launch_->buffers[i].data;
  size_t used = 0;
  locals_.clear();
  for (int i = 0; i < kernel_->n_params; ++i) {
    const Param& p = kernel_->params[i];
    if (p.kind != ParamKind::threadgroup) continue;
    const size_t bytes = launch_->threadgroup_bytes[p.index];
    pointers_.threadgroup[p.index] = arena_ + used;
    locals_.push_back({used, bytes, p.index, p.name});
    used += bytes + gap;
  }
  std::memset(arena_, 0xff, used);  // NaN: nothing may rely on what a threadgroup finds
}

bool Group::run(const Launch& launch, uint64_t index, Shadow* shadow, Report& report) {
  launch_ = &launch;
  kernel_ = shadow != nullptr ? launch.checked : launch.kernel;
  shadow_ = shadow;
  report_ = &report;
  failed_ = false;
  t_group = this;
  place_memory();
  place_threads(index);
  ++device_epoch_, ++group_epoch_;
  if (shadow_ != nullptr) shadow_->begin_group();
  // Checked kernels always get fibers: their stacks tell private memory from foreign memory.
  flat_ = !kernel_->synchronises && shadow_ == nullptr;
  if (flat_) run_flat();
  else run_fibers();
  t_group = nullptr;
  return !failed_;
}

// One fiber runs all threads, so that a fault can leave it half-way like any other.
void Group::run_flat() {
  if (!flat_started_) stacks_.start(flat_context_, kMaxThreads, flat_main);
  flat_started_ = true;
  switch_context(main_, flat_context_);
  if (failed_) flat_started_ = false;
}

void Group::flat_main() {
  arrived();
  for (;;) {
    Group& g = current();
    g.flat_loop();
    switch_context(g.flat_context_, g.main_);
  }
}

void Group::flat_loop() {
  for (int s = 0; s < n_simds_; ++s) {
    Simd& simd = simds_[simd_order_[s]];
    for (int b = 0; b < simd.n; ++b) {
      running_ = &lanes_[simd.first + simd.lane_at[b]];
      kernel_->thunk(pointers_, running_->place);
    }
  }
}

void Group::fiber_main() {
  arrived();
  for (;;) {
    Group& g = current();
    Lane* me = g.running_;
    g.kernel_->thunk(g.pointers_, me->place);
    me->state = Lane::State::done;
    me->simd->ready &= ~(1u << me->bit);
    ++g.n_done_;
    g.next();  // back for the next threadgroup
  }
}

void Group::run_fibers() {
  for (; n_started_ < n_; ++n_started_) stacks_.start(lanes_[n_started_].context, n_started_, fiber_main);
  n_at_barrier_ = n_done_ = simd_turn_ = 0;
  running_ = pick();
  switch_context(main_, running_->context);
  if (failed_) n_started_ = 0;  // what lies on the stacks is abandoned; kernels own nothing
}

Lane* Group::pick() {
  for (int k = 0; k < n_simds_; ++k, simd_turn_ = simd_turn_ + 1 == n_simds_ ? 0 : simd_turn_ + 1) {
    Simd& s = simds_[simd_order_[simd_turn_]];
    if (s.ready != 0) return &lanes_[s.first + s.lane_at[__builtin_ctz(s.ready)]];
  }
  return nullptr;
}

void Group::next() {
  Lane* me = running_;
  Lane* to = pick();
  if (to == nullptr && n_done_ < n_) {
    if (n_at_barrier_ == n_) {
      release_barrier();
      to = pick();
    } else {
      failed_ = true;
      report_->add("kernel " + std::string(kernel_->name) + ": threads of threadgroup " +
                   std::to_string(me->place.group.x) + " wait for ever: " + who_waits());
    }
  }
  if (to == me) return;
  running_ = to;
  switch_context(me->context, to != nullptr ? to->context : main_);
}

void Group::release_barrier() {
  n_at_barrier_ = 0;
  simd_turn_ = 0;
  if ((barrier_flags_ & 1u) != 0) ++device_epoch_;
  if ((barrier_flags_ & 2u) != 0) ++group_epoch_;
  for (int s = 0; s < n_simds_; ++s) simds_[s].ready = simds_[s].n == kSimdWidth ? ~0u : (1u << simds_[s].n) - 1u;
  for (int i = 0; i < n_; ++i) lanes_[i].state = Lane::State::ready;
}

const Slot* Group::meet(const void* operand, size_t bytes, const Site& site) {
  Lane* me = running_;
  if (flat_) fault("this kernel was taken for one without synchronisation; the generator missed", site);
  Simd& s = *me->simd;
  if (s.n != kSimdWidth) fault("a simdgroup operation in a simdgroup of " + std::to_string(s.n) + " threads (32 are needed)", site);
  const int phase = s.phase;
  if (s.arrived == 0) s.site = site;
  else if (!same_place(s.site, site))
    fault("lanes of one simdgroup are at different operations: others at " + where(s.site), site);
  if (bytes != 0) std::memcpy(&s.slots[phase][me->place.lane], operand, bytes);
  if (++s.arrived == kSimdWidth) {
    s.arrived = 0;
    s.phase ^= 1;
    s.ready = ~0u;
    for (int i = 0; i < kSimdWidth; ++i) lanes_[s.first + i].state = Lane::State::ready;
  } else {
    s.ready &= ~(1u << me->bit);
    me->state = Lane::State::at_simd;
    me->site = site;
  }
  next();
  return s.slots[phase];
}

void Group::simd_barrier(unsigned flags, const Site& site) {
  Simd& s = *running_->simd;
  const bool last = s.arrived == kSimdWidth - 1;
  if (last && (flags & 1u) != 0) ++s.epoch[0];
  if (last && (flags & 2u) != 0) ++s.epoch[1];
  meet(nullptr, 0, site);
}

void Group::wait(unsigned flags, const Site& site) {
  Lane* me = running_;
  if (flat_) fault("this kernel was taken for one without synchronisation; the generator missed", site);
  if (n_at_barrier_ == 0) {
    barrier_site_ = site;
    barrier_flags_ = flags;
  } else if (barrier_flags_ != flags || !same_place(barrier_site_, site)) {
    fault("threads of one threadgroup are at different barriers: others at " + where(barrier_site_), site);
  }
  ++n_at_barrier_;
  me->simd->ready &= ~(1u << me->bit);
  me->state = Lane::State::at_barrier;
  me->site = site;
  next();
}

void Group::fault(const std::string& what, const Site& site) {
  stop("kernel " + std::string(kernel_->name) + ", " + thread_name(running_->place) + ", " + where(site) + ": " + what);
}

void Group::stop(std::string text) {
  report_->add(std::move(text));
  failed_ = true;
  switch_context(flat_ ? flat_context_ : running_->context, main_);
  __builtin_unreachable();
}

std::string Group::who_waits() const {
  std::string text;
  for (int i = 0; i < n_;) {  // runs of threads in the same state
    const Lane& a = lanes_[i];
    int j = i + 1;
    while (j < n_ && lanes_[j].state == a.state && (a.state == Lane::State::done || lanes_[j].site.line == a.site.line)) ++j;
    if (!text.empty()) text += "; ";
    text += (j - i == 1 ? "thread " + std::to_string(i) : "threads " + std::to_string(i) + " to " + std::to_string(j - 1));
    text += a.state == Lane::State::done ? " returned" : " at " + where(a.site);
    i = j;
    if (text.size() > 600) return text + "; ...";
  }
  return text;
}

// ---------------------------------------------------------------- the kernel's side

const Slot* simd_meet(const void* operand, size_t bytes, const Site& site) { return Group::current().meet(operand, bytes, site); }
void simd_wait(unsigned flags, const Site& site) { Group::current().simd_barrier(flags, site); }
void threadgroup_wait(unsigned flags, const Site& site) { Group::current().wait(flags, site); }
int lane_of_caller() { return static_cast<int>(Group::current().running().place.lane); }
int lane_count() { return Group::current().running().simd->n; }
void kernel_fault(const char* what, const Site& site) { Group::current().fault(what, site); }

}  // namespace ds4::standin
