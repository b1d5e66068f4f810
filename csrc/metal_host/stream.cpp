#include "metal_host/stream.h"

#include <string>
#include <thread>

#include "base/error.h"

namespace ds4::metal {

void EventLatch::open() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!open_) event_->setSignaledValue(value_);
  open_ = true;
}

void EventLatch::encode_wait(MTL::CommandBuffer* buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_ = false;
  buffer->encodeWait(event_.get(), ++value_);
}

// A queue of its own: a session that waits for rows holds up no other.
Stream::Stream() : device_(Device::get()), queue_(device_.new_queue()), nothing_(device_.new_buffer(1)) {}

Stream::~Stream() {
  abandon();
  device_.forget_queue(queue_.get());
}

void Stream::begin() {
  if (open_) return;
  open_ = Ref<MTL::CommandBuffer>(queue_->commandBuffer()->retain());
  ++device_.counters.command_buffers;
}

void Stream::begin_encoder() {
  begin();
  encoder_ = Ref<MTL::ComputeCommandEncoder>(open_->computeCommandEncoder(MTL::DispatchTypeConcurrent)->retain());
  touched_.clear();
  ++device_.counters.levels;
}

void Stream::end() {
  if (encoder_) encoder_->endEncoding();
  encoder_ = {};
  touched_.clear();
}

bool Stream::conflicts(const Argument& a) const {
  if (a.use == Use::fixed || a.bytes == 0 || a.p == nullptr) return false;
  const auto begin = reinterpret_cast<uintptr_t>(a.p), end = begin + a.bytes;
  for (const Touched& t : touched_)
    if (begin < t.end && t.begin < end && (t.written || a.use != Use::read)) return true;
  return false;
}

void Stream::dispatch(const Kernel& kernel, const void* args, size_t args_bytes, std::initializer_list<Argument> buffers, Grid grid,
                      int threads, size_t threadgroup_bytes) {
  if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0) return;
  const Pool pool;
  const bool first = !encoder_;
  if (first) begin_encoder();
  bool barrier = false;
  for (const Argument& a : buffers) barrier = barrier || conflicts(a);
  if (barrier) {
    encoder_->memoryBarrier(MTL::BarrierScopeBuffers);
    touched_.clear();
    ++device_.counters.levels;
  }
  encoder_->setComputePipelineState(kernel.pipeline);
  encoder_->setBytes(args, args_bytes, 0);
  NS::UInteger index = 1;
  for (const Argument& a : buffers) {
    Place place = a.place;
    if (place.buffer == nullptr && a.p == nullptr) place = {nothing_.get(), 0};
    if (place.buffer == nullptr && !device_.find(a.p, &place))
      throw BackendError("[metal] kernel " + std::string(kernel.name) + ", buffer " + std::to_string(index) +
                         ": this memory was neither made by the back end nor adopted as weights");
    encoder_->setBuffer(place.buffer, place.offset, index++);
    if (a.use != Use::fixed && a.p != nullptr && a.bytes > 0)
      touched_.push_back({reinterpret_cast<uintptr_t>(a.p), reinterpret_cast<uintptr_t>(a.p) + a.bytes, a.use != Use::read});
  }
  if (threadgroup_bytes > 0) encoder_->setThreadgroupMemoryLength((threadgroup_bytes + 15) / 16 * 16, 0);
  encoder_->dispatchThreadgroups(MTL::Size(static_cast<NS::UInteger>(grid.x), static_cast<NS::UInteger>(grid.y), static_cast<NS::UInteger>(grid.z)),
                                 MTL::Size(static_cast<NS::UInteger>(threads), 1, 1));
  ++device_.counters.dispatches;
  ++kernel.counts->dispatches;
  if (barrier || first) ++kernel.counts->levels;
}

void Stream::submit() {
  if (!open_) return;
  const Pool pool;
  end();
  open_->commit();
  running_.push_back(std::move(open_));
  open_ = {};
}

Latch* Stream::latch() {
  const Pool pool;
  if (used_latches_ == latches_.size()) {
    Ref<MTL::SharedEvent> event(device_.device()->newSharedEvent());
    if (!event) return nullptr;
    latches_.push_back(std::make_unique<EventLatch>(std::move(event)));
  }
  submit();
  begin();
  EventLatch* latch = latches_[used_latches_++].get();
  latch->encode_wait(open_.get());
  ++device_.counters.latches;
  return latch;
}

void Stream::check(MTL::CommandBuffer* buffer) {
  if (buffer->status() != MTL::CommandBufferStatusError) {
    device_seconds_ += buffer->GPUEndTime() - buffer->GPUStartTime();
    return;
  }
  const std::string reason = text(buffer->error());
  running_.clear();
  throw BackendError("[metal] the device stopped: " + reason);
}

void Stream::wait() {
  submit();
  if (running_.empty()) return;
  const Pool pool;
  ++device_.counters.waits;
  running_.back()->waitUntilCompleted();  // a queue finishes its command buffers in order
  used_latches_ = 0;
  for (size_t i = 0; i < running_.size(); ++i) check(running_[i].get());
  running_.clear();
}

bool Stream::hold(int ahead, Poll* poll) {
  submit();
  while (running_.size() > static_cast<size_t>(ahead)) {
    if (poll != nullptr && poll->stop()) return true;
    const auto status = running_.front()->status();
    if (status == MTL::CommandBufferStatusCompleted || status == MTL::CommandBufferStatusError) {
      check(running_.front().get());
      running_.erase(running_.begin());
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return false;
}

void Stream::abandon() noexcept {
  try {
    const Pool pool;
    if (open_) end();
    open_ = {};
    if (!running_.empty()) running_.back()->waitUntilCompleted();
    running_.clear();
    used_latches_ = 0;
  } catch (...) {  // nothing to tell: the caller is telling why it gave up
    running_.clear();
  }
}

}  // namespace ds4::metal
