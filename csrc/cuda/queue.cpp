// Command queues, command buffers, encoders and events on an NVIDIA GPU.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <list>
#include <thread>

#include "base/error.h"
#include "cuda/objects.h"

namespace MTL {

using namespace ds4::cuda;

// ---------------------------------------------------------------- events

SharedEvent::State::State() : value(static_cast<uint64_t*>(Driver::get().alloc_pinned(sizeof(uint64_t)))) { *value = 0; }
SharedEvent::State::~State() { Driver::get().free_pinned(value); }
SharedEvent::SharedEvent() : state_(std::make_shared<State>()) {}
uint64_t SharedEvent::signaledValue() { return __atomic_load_n(state_->value, __ATOMIC_ACQUIRE); }
void SharedEvent::setSignaledValue(uint64_t value) { __atomic_store_n(state_->value, value, __ATOMIC_RELEASE); }
bool SharedEvent::waitUntilSignaledValue(uint64_t value, uint64_t milliseconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(std::min<uint64_t>(milliseconds, 1u << 30));
  while (signaledValue() < value) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

// ---------------------------------------------------------------- queues

CommandQueue::CommandQueue(NS::UInteger) : state_(std::make_shared<State>()) {}
CommandQueue::~CommandQueue() = default;
CommandQueue::State::State() {
  const Driver& driver = Driver::get();
  stream = driver.new_stream();
  begin = driver.new_event(false);
  for (int i = 0; i < kSides; ++i) {
    side[i] = driver.new_stream();
    done[i] = driver.new_event(false);
  }
}
CommandQueue::State::~State() {
  const Driver& driver = Driver::get();
  for (int i = 0; i < kSides; ++i) {
    driver.free_stream(side[i]);
    driver.free_event(done[i]);
  }
  driver.free_event(begin);
  driver.free_stream(stream);
}
Device* CommandQueue::device() const { return CreateSystemDefaultDevice()->autorelease(); }
void CommandQueue::addResidencySet(const ResidencySet*) {}
void CommandQueue::removeResidencySet(const ResidencySet*) {}

CommandBuffer* CommandQueue::commandBuffer() {
  auto state = std::make_unique<CommandBuffer::State>();
  state->queue = state_;
  return (new CommandBuffer(std::move(state)))->autorelease();
}
CommandBuffer* CommandQueue::commandBufferWithUnretainedReferences() { return commandBuffer(); }

// ---------------------------------------------------------------- command buffers

CommandBuffer::CommandBuffer(std::unique_ptr<State> state) : state_(std::move(state)) {}
CommandBuffer::~CommandBuffer() {
  State& s = *state_;
  s.recorded.clear();
  if (s.status == CommandBufferStatusNotEnqueued && s.launched) commit();  // dropped: its buffers are in use all the same
  if (s.status == CommandBufferStatusCommitted) waitUntilCompleted();
}
CommandBuffer::State::~State() {
  if (error != nullptr) error->release();
  for (const Timed& t : timed) {
    Driver::get().free_event(t.begin);
    Driver::get().free_event(t.end);
  }
  if (begin != nullptr) Driver::get().free_event(begin);
  if (end != nullptr) Driver::get().free_event(end);
}

void CommandBuffer::State::begin_work() {
  if (launched) return;
  const Driver& driver = Driver::get();
  driver.enter();
  begin = driver.new_event(true);
  end = driver.new_event(true);
  driver.record(begin, queue->stream);
  launched = true;
}

void CommandBuffer::State::launch_recorded() {
  if (recorded.empty()) return;
  queue->graphs.launch(recorded, queue->stream);
  recorded.clear();
}

void CommandBuffer::State::finish(std::string reason) {
  if (reason.empty()) add_times(timed);
  status = reason.empty() ? CommandBufferStatusCompleted : CommandBufferStatusError;
  if (!reason.empty()) error = new NS::Error(std::move(reason));
  buffers.clear();
}

namespace {

// begins: the device is given something now, so its time counts from here.
template <class F>
void try_or_note(CommandBuffer::State& s, F f, bool begins = true) {
  if (!s.problem.empty()) return;
  try {
    if (begins) s.begin_work();
    f();
  } catch (const ds4::Error& error) {
    s.problem = error.what();
  }
}

DevicePtr of(const Event* event) { return reinterpret_cast<DevicePtr>(static_cast<const SharedEvent*>(event)->state()->value); }

}  // namespace

void CommandBuffer::encodeWait(const Event* event, uint64_t value) {
  try_or_note(*state_, [&] { state_->launch_recorded(), Driver::get().wait_value(state_->queue->stream, of(event), value); });
}
void CommandBuffer::encodeSignalEvent(const Event* event, uint64_t value) {
  try_or_note(*state_, [&] { state_->launch_recorded(), Driver::get().write_value(state_->queue->stream, of(event), value); });
}
void CommandBuffer::useResidencySet(const ResidencySet*) {}
void CommandBuffer::addScheduledHandler(const HandlerFunction& function) { function(this); }
void CommandBuffer::addCompletedHandler(const HandlerFunction& function) { state_->completed.push_back(function); }
void CommandBuffer::enqueue() {}

void CommandBuffer::commit() {
  State& s = *state_;
  try_or_note(s, [&] { s.launch_recorded(); });
  try {
    s.begin_work();
    Driver::get().record(s.end, s.queue->stream);
    s.status = CommandBufferStatusCommitted;
  } catch (const ds4::Error& error) {
    if (s.problem.empty()) s.problem = error.what();
    s.finish(s.problem);
  }
}

void CommandBuffer::waitUntilScheduled() {}

void CommandBuffer::waitUntilCompleted() {
  State& s = *state_;
  if (s.status != CommandBufferStatusCommitted) return;
  try {
    Driver::get().synchronize(s.end);
    s.finish(s.problem);
  } catch (const ds4::Error& error) {
    s.finish(error.what());
  }
  for (const HandlerFunction& f : s.completed) f(this);
}

CommandBufferStatus CommandBuffer::status() const {
  if (state_->status != CommandBufferStatusCommitted) return state_->status;
  try {
    if (Driver::get().done(state_->end)) const_cast<CommandBuffer*>(this)->waitUntilCompleted();
  } catch (const ds4::Error&) {
    const_cast<CommandBuffer*>(this)->waitUntilCompleted();
  }
  return state_->status;
}

NS::Error* CommandBuffer::error() const { return state_->error; }
// Every command buffer has its own origin of time: an event pair gives a span as a float of milliseconds, which over hours
// would have no microseconds left. Only the difference of the two means something (docs/cuda.md).
double CommandBuffer::GPUStartTime() const { return 0; }
double CommandBuffer::GPUEndTime() const {
  return state_->status == CommandBufferStatusCompleted ? Driver::get().seconds(state_->begin, state_->end) : 0;
}
void CommandBuffer::setLabel(const NS::String* label) { state_->label = NS::RetainPtr(const_cast<NS::String*>(label)); }
NS::String* CommandBuffer::label() const { return state_->label.get(); }

// ---------------------------------------------------------------- encoders

struct ComputeCommandEncoder::State {
  NS::SharedPtr<CommandBuffer> owner;
  DispatchType type = DispatchTypeSerial;
  std::shared_ptr<const Function::State> function;
  struct Slot {
    const Buffer* buffer = nullptr;
    NS::UInteger offset = 0;
    std::vector<char> bytes;
  };
  Slot slots[31];
  unsigned threadgroup[31] = {};

  CommandBuffer::State& target() { return owner->state(); }
  void problem(const std::string& text) {
    if (target().problem.empty())
      target().problem = "[cuda] " + (function ? "kernel " + std::string(function->kernel->name) + ": " : std::string()) + text;
  }
  bool bind(Launch& l);
  // Launches since the last barrier, which nothing orders. A launch points into itself, so it stays where it is.
  std::list<Launch> waiting;
  void launch_waiting();
};

// The first goes into the queue's stream, the others beside it; what follows waits for all.
void ComputeCommandEncoder::State::launch_waiting() {
  if (waiting.empty()) return;
  if (graphs_asked() && !timing()) {
    Recorded& recorded = target().recorded;
    recorded.levels.push_back(waiting.size());
    recorded.launches.splice(recorded.launches.end(), waiting);
    return;
  }
  try_or_note(target(), [&] {
    const Driver& driver = Driver::get();
    const CommandQueue::State& q = *target().queue;
    const size_t sides = std::min<size_t>(waiting.size() - 1, CommandQueue::State::kSides);
    if (sides > 0) driver.record(q.begin, q.stream);
    for (size_t i = 0; i < sides; ++i) driver.wait_event(q.side[i], q.begin);
    size_t i = 0;
    for (Launch& l : waiting) {
      const size_t place = i++ % (sides + 1);
      driver.launch(l.function, l.grid, l.block, l.shared_bytes, place == 0 ? q.stream : q.side[place - 1], l.params);
    }
    for (i = 0; i < sides; ++i) {
      driver.record(q.done[i], q.side[i]);
      driver.wait_event(q.stream, q.done[i]);
    }
  });
  waiting.clear();
}

ComputeCommandEncoder* CommandBuffer::computeCommandEncoder() { return computeCommandEncoder(DispatchTypeSerial); }
ComputeCommandEncoder* CommandBuffer::computeCommandEncoder(DispatchType type) {
  auto state = std::make_unique<ComputeCommandEncoder::State>();
  state->owner = NS::RetainPtr(this);
  state->type = type;
  return (new ComputeCommandEncoder(std::move(state)))->autorelease();
}

ComputeCommandEncoder::ComputeCommandEncoder(std::unique_ptr<State> state) : state_(std::move(state)) {}
ComputeCommandEncoder::~ComputeCommandEncoder() = default;
DispatchType ComputeCommandEncoder::dispatchType() const { return state_->type; }
void ComputeCommandEncoder::setComputePipelineState(const ComputePipelineState* state) { state_->function = state->state(); }

void ComputeCommandEncoder::setBuffer(const Buffer* buffer, NS::UInteger offset, NS::UInteger index) {
  if (index >= 31) return state_->problem("buffer index " + std::to_string(index) + "; expected 0 to 30");
  state_->slots[index] = {buffer, offset, {}};
}
void ComputeCommandEncoder::setBufferOffset(NS::UInteger offset, NS::UInteger index) { state_->slots[index].offset = offset; }
void ComputeCommandEncoder::setBytes(const void* bytes, NS::UInteger length, NS::UInteger index) {
  if (index >= 31 || length > 4096) return state_->problem("setBytes of " + std::to_string(length) + " bytes; expected at most 4,096");
  const char* p = static_cast<const char*>(bytes);
  state_->slots[index] = {nullptr, 0, std::vector<char>(p, p + length)};
}
void ComputeCommandEncoder::setThreadgroupMemoryLength(NS::UInteger length, NS::UInteger index) {
  if (index < 31) state_->threadgroup[index] = static_cast<unsigned>(length);
}

bool ComputeCommandEncoder::State::bind(Launch& l) {
  for (const Param& p : function->kernel->params) {
    const Slot& s = slots[p.index];
    if (p.kind == Param::value) {
      if (s.bytes.empty()) return problem("the struct at buffer index " + std::to_string(p.index) + " is missing"), false;
      if (!l.add(s.bytes.data(), s.bytes.size())) return problem("too many arguments"), false;
    } else if (p.kind == Param::buffer) {
      if (s.buffer == nullptr || s.offset >= s.buffer->length())
        return problem("buffer index " + std::to_string(p.index) + " is missing or its offset is too large"), false;
      const DevicePtr at = address(s.buffer) + s.offset;
      if (!l.add(&at, sizeof at)) return problem("too many arguments"), false;
      target().buffers.push_back(NS::RetainPtr(const_cast<Buffer*>(s.buffer)));
    } else {
      const unsigned at = l.shared_bytes;
      l.shared_bytes += (threadgroup[p.index] + 15u) / 16u * 16u;
      if (!l.add(&at, sizeof at)) return problem("too many arguments"), false;
    }
  }
  return true;
}

namespace {

constexpr unsigned kPlainShared = 48u << 10;  // a kernel may have more threadgroup memory when it is asked for

void begin_timing(CommandBuffer::State& buffer, const Function::State& function, const Launch& l) {
  const Driver& driver = Driver::get();
  std::string name = std::string(function.kernel->name) + " [" + function.values + "]";
  for (int i = 0; i < 3; ++i) name += (i == 0 ? " " : "x") + std::to_string(l.grid[i]);
  buffer.timed.push_back({std::move(name), driver.new_event(true), driver.new_event(true)});
  driver.record(buffer.timed.back().begin, buffer.queue->stream);
}

}  // namespace

void ComputeCommandEncoder::dispatchThreadgroups(Size groups, Size threads) {
  State& s = *state_;
  if (!s.function) return s.problem("dispatch without a pipeline state");
  const NS::UInteger n = threads.width * threads.height * threads.depth;
  if (n == 0 || n > 1024) return s.problem(std::to_string(n) + " threads in a threadgroup; expected 1 to 1,024");
  if (groups.width > 0x7fffffff || groups.height > 65535 || groups.depth > 65535)
    return s.problem("a grid of " + std::to_string(groups.width) + " x " + std::to_string(groups.height) + " x " + std::to_string(groups.depth) +
                     " threadgroups; expected at most 2^31 - 1 x 65,535 x 65,535");
  try_or_note(s.target(), [&] {
    Driver::get().enter();
    Launch& l = s.waiting.emplace_back();
    l.grid[0] = static_cast<unsigned>(groups.width), l.grid[1] = static_cast<unsigned>(groups.height), l.grid[2] = static_cast<unsigned>(groups.depth);
    l.block[0] = static_cast<unsigned>(threads.width), l.block[1] = static_cast<unsigned>(threads.height), l.block[2] = static_cast<unsigned>(threads.depth);
    l.function = s.function->compiled(static_cast<unsigned>(n));
    if (!s.bind(l)) return s.waiting.pop_back();
    if (l.shared_bytes > kPlainShared) Driver::get().allow_shared(l.function, static_cast<int>(l.shared_bytes));
    if (timing()) begin_timing(s.target(), *s.function, l);
    if (timing() || s.type == DispatchTypeSerial) s.launch_waiting();
    if (timing()) Driver::get().record(s.target().timed.back().end, s.target().queue->stream);
  }, timing());
}

void ComputeCommandEncoder::dispatchThreadgroups(const Buffer*, NS::UInteger, Size) { state_->problem("indirect dispatches are not offered"); }

void ComputeCommandEncoder::dispatchThreads(Size grid, Size threads) {
  if (threads.width == 0 || threads.height == 0 || threads.depth == 0 || grid.width % threads.width != 0 || grid.height % threads.height != 0 ||
      grid.depth % threads.depth != 0)
    return state_->problem("dispatchThreads with a grid that is no multiple of the threadgroup is not offered");
  dispatchThreadgroups(Size(grid.width / threads.width, grid.height / threads.height, grid.depth / threads.depth), threads);
}

void ComputeCommandEncoder::memoryBarrier(BarrierScope) { state_->launch_waiting(); }
void ComputeCommandEncoder::memoryBarrier(const Resource* const[], NS::UInteger) { state_->launch_waiting(); }
void ComputeCommandEncoder::useResource(const Resource*, ResourceUsage) {}
void ComputeCommandEncoder::endEncoding() { state_->launch_waiting(); }

}  // namespace MTL
