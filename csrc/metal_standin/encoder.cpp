// Encoding: arguments are checked when they are set, dispatches are recorded with everything they need.
#include <cstring>

#include "metal_standin/objects.h"

namespace MTL {

using namespace ds4::standin;

namespace {
struct Slot {  // what is bound at one index
  const Buffer* buffer = nullptr;
  uint64_t offset = 0;
  std::shared_ptr<std::vector<char>> bytes;
};
}  // namespace

struct ComputeCommandEncoder::State {
  CommandBuffer* owner = nullptr;
  DispatchType type = DispatchTypeSerial;
  bool ended = false;
  std::shared_ptr<const Function::State> pipeline;
  Slot slots[kMaxBuffers];
  uint32_t threadgroup[kMaxBuffers] = {};
  uint32_t phase = 0;                                     // of dispatches encoded now
  bool fixed = false;                                     // a barrier for single resources: order no longer free
  std::vector<std::pair<const Resource*, uint32_t>> own;  // phases of resources that had barriers of their own

  CommandBuffer::State& target() { return owner->state(); }
  void problem(std::string text) {
    target().report.add("command encoder" + (pipeline ? std::string(" (kernel ") + pipeline->entry.kernel->name + ")" : "") + ": " + std::move(text));
  }
  bool index_ok(NS::UInteger index, const char* what) {
    if (ended) problem(std::string(what) + " after endEncoding");
    else if (index >= kMaxBuffers) problem(std::string(what) + " index " + std::to_string(index) + ", possible are 0 to 30");
    return !ended && index < kMaxBuffers;
  }
  uint32_t phase_of(const Resource* resource) const {
    for (auto it = own.rbegin(); it != own.rend(); ++it)
      if (it->first == resource) return it->second;
    return phase;
  }
  bool bind(Command& c);
  void record(Size groups, Size threads, Size grid, const Buffer* indirect, uint64_t offset);
};

ComputeCommandEncoder::ComputeCommandEncoder(std::unique_ptr<State> state) : state_(std::move(state)) {}
ComputeCommandEncoder::~ComputeCommandEncoder() {
  if (!state_->ended) state_->target().encoding = false;
  state_->owner->release();
}

ComputeCommandEncoder* CommandBuffer::computeCommandEncoder() { return computeCommandEncoder(DispatchTypeSerial); }
ComputeCommandEncoder* CommandBuffer::computeCommandEncoder(DispatchType type) {
  State& s = *state_;
  if (s.encoding) s.report.add("command buffer: a new encoder before endEncoding of the one before");
  if (s.status >= CommandBufferStatusCommitted) s.report.add("command buffer: a new encoder after commit");
  s.encoding = true;
  auto state = std::make_unique<ComputeCommandEncoder::State>();
  state->owner = retain();
  state->type = type;
  state->phase = ++s.phases;  // encoders of one command buffer are ordered: buffers are tracked
  count(&Counters::encoders);
  return (new ComputeCommandEncoder(std::move(state)))->autorelease();
}

DispatchType ComputeCommandEncoder::dispatchType() const { return state_->type; }

void ComputeCommandEncoder::endEncoding() {
  if (state_->ended) state_->problem("endEncoding twice");
  state_->ended = true;
  state_->target().encoding = false;
}

void ComputeCommandEncoder::setComputePipelineState(const ComputePipelineState* pipeline) {
  if (pipeline == nullptr) return state_->problem("no pipeline state");
  state_->pipeline = pipeline->state();
}

void ComputeCommandEncoder::setBuffer(const Buffer* buffer, NS::UInteger offset, NS::UInteger index) {
  if (!state_->index_ok(index, "setBuffer")) return;
  if (buffer != nullptr && offset >= buffer->length())
    return state_->problem("setBuffer index " + std::to_string(index) + ": offset " + std::to_string(offset) + " of a buffer of " +
                           std::to_string(buffer->length()) + " bytes");
  state_->slots[index] = {buffer, offset, nullptr};
}

void ComputeCommandEncoder::setBufferOffset(NS::UInteger offset, NS::UInteger index) {
  if (!state_->index_ok(index, "setBufferOffset")) return;
  if (state_->slots[index].buffer == nullptr) return state_->problem("setBufferOffset index " + std::to_string(index) + ": no buffer is bound there");
  setBuffer(state_->slots[index].buffer, offset, index);
}

void ComputeCommandEncoder::setBytes(const void* bytes, NS::UInteger length, NS::UInteger index) {
  if (!state_->index_ok(index, "setBytes")) return;
  if (length == 0 || length > 4096)
    return state_->problem("setBytes index " + std::to_string(index) + ": " + std::to_string(length) + " bytes, possible are 1 to 4096");
  const char* p = static_cast<const char*>(bytes);
  state_->slots[index] = {nullptr, 0, std::make_shared<std::vector<char>>(p, p + length)};
}

void ComputeCommandEncoder::setThreadgroupMemoryLength(NS::UInteger length, NS::UInteger index) {
  if (state_->index_ok(index, "setThreadgroupMemoryLength")) state_->threadgroup[index] = static_cast<uint32_t>(length);
}

void ComputeCommandEncoder::memoryBarrier(BarrierScope scope) {
  if ((scope & BarrierScopeBuffers) == 0) return state_->problem("memoryBarrier without BarrierScopeBuffers orders nothing here");
  count(&Counters::barriers);
  if (state_->type == DispatchTypeSerial) return;
  state_->phase = ++state_->target().phases;
  state_->fixed = false;
  state_->own.clear();
}

void ComputeCommandEncoder::memoryBarrier(const Resource* const resources[], NS::UInteger n) {
  count(&Counters::barriers);
  if (state_->type == DispatchTypeSerial) return;
  const uint32_t phase = ++state_->target().phases;
  state_->fixed = true;
  for (NS::UInteger i = 0; i < n; ++i) state_->own.emplace_back(resources[i], phase);
}

void ComputeCommandEncoder::useResource(const Resource*, ResourceUsage) {}

bool ComputeCommandEncoder::State::bind(Command& c) {
  Launch& l = c.launch;
  const Entry& entry = pipeline->entry;
  l.kernel = entry.kernel;
  l.family = entry.family;
  l.checked = entry.checked;
  l.checked_family = entry.checked_family;
  l.constants = pipeline->constants;
  for (int i = 0; i < kMaxBuffers; ++i) {
    const Slot& s = slots[i];
    if (s.buffer != nullptr) {
      auto* b = const_cast<Buffer*>(s.buffer);
      l.buffers[i] = {static_cast<char*>(b->contents()) + s.offset, b->length() - s.offset, false, phase_of(b)};
    } else if (s.bytes) {
      l.buffers[i] = {s.bytes->data(), s.bytes->size(), true, phase};
    }
    l.threadgroup_bytes[i] = threadgroup[i];
  }
  // Only what the kernel takes is kept; the rest may stay bound from the dispatch before.
  Binding used[kMaxBuffers] = {};
  uint32_t memory[kMaxBuffers] = {};
  for (int i = 0; i < l.kernel->n_params; ++i) {
    const Param& p = l.kernel->params[i];
    if (p.kind == ParamKind::threadgroup) {
      memory[p.index] = l.threadgroup_bytes[p.index];
      continue;
    }
    used[p.index] = l.buffers[p.index];
    if (slots[p.index].bytes) c.bytes.push_back(slots[p.index].bytes);
    else if (slots[p.index].buffer != nullptr) target().buffers.push_back(NS::RetainPtr(const_cast<Buffer*>(slots[p.index].buffer)));
  }
  std::memcpy(l.buffers, used, sizeof used);
  std::memcpy(l.threadgroup_bytes, memory, sizeof memory);
  return validate(l, target().report);
}

void ComputeCommandEncoder::State::record(Size groups, Size threads, Size grid, const Buffer* indirect, uint64_t offset) {
  if (ended) return problem("dispatch after endEncoding");
  if (!pipeline) return problem("dispatch without a pipeline state");
  if (type == DispatchTypeSerial) phase = ++target().phases;
  Command c;
  c.kind = Command::Kind::dispatch;
  c.phase = phase;
  c.movable = type == DispatchTypeConcurrent && !fixed;
  const auto small = [](Size s) {
    return Grid3{static_cast<uint32_t>(s.width), static_cast<uint32_t>(s.height), static_cast<uint32_t>(s.depth)};
  };
  c.launch.groups = small(groups);
  c.launch.group_size = small(threads);
  c.launch.grid = small(grid);
  if (indirect != nullptr) {
    if (offset % 4 != 0 || offset + 12 > indirect->length()) return problem("dispatchThreadgroups: the indirect arguments are outside their buffer or not aligned to 4 bytes");
    c.indirect = indirect;
    c.indirect_offset = offset;
    target().buffers.push_back(NS::RetainPtr(const_cast<Buffer*>(indirect)));
  }
  count(&Counters::dispatches);
  if (bind(c)) target().commands.push_back(std::move(c));
}

void ComputeCommandEncoder::dispatchThreadgroups(Size groups, Size threads) {
  state_->record(groups, threads, Size(groups.width * threads.width, groups.height * threads.height, groups.depth * threads.depth), nullptr, 0);
}

void ComputeCommandEncoder::dispatchThreadgroups(const Buffer* indirect, NS::UInteger offset, Size threads) {
  state_->record(Size(1, 1, 1), threads, threads, indirect, offset);
}

void ComputeCommandEncoder::dispatchThreads(Size grid, Size threads) {
  if (threads.width == 0 || threads.height == 0 || threads.depth == 0) return state_->problem("dispatchThreads with an empty threadgroup");
  const auto up = [](NS::UInteger a, NS::UInteger b) { return (a + b - 1) / b; };
  state_->record(Size(up(grid.width, threads.width), up(grid.height, threads.height), up(grid.depth, threads.depth)), threads, grid, nullptr, 0);
}

}  // namespace MTL
