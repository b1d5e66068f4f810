// Where dispatches go: command buffers with one concurrent encoder each.
//
// Every dispatch says which memory it reads and writes. The stream puts a barrier in front of a dispatch that touches what
// an earlier one of the same encoder wrote (or writes what it read), and nowhere else; so independent dispatches overlap.
// Between command buffers of the queue Metal's own tracking keeps the order.
#pragma once

#include <initializer_list>
#include <memory>
#include <mutex>
#include <vector>

#include "base/threads.h"
#include "engine/backend.h"
#include "metal_host/device.h"

namespace ds4::metal {

enum class Use : uint8_t { fixed, read, write, both };  // fixed: weights, which no kernel writes

// An argument buffer of a kernel: memory of the back end or adopted weights. bytes: what the dispatch touches from p on.
struct Argument {
  const void* p;
  size_t bytes;
  Use use;
  Place place{};  // instead of p, where the caller knows it
};
inline Argument fixed(const void* p) { return {p, 0, Use::fixed}; }
inline Argument fixed(Place place) { return {nullptr, 0, Use::fixed, place}; }
inline Argument absent() { return {nullptr, 0, Use::fixed}; }  // the kernel does not look at it this time
template <class T>
Argument reads(const T* p, int64_t n) { return {p, static_cast<size_t>(n) * sizeof(T), Use::read}; }
template <class T>
Argument writes(T* p, int64_t n) { return {p, static_cast<size_t>(n) * sizeof(T), Use::write}; }
template <class T>
Argument updates(T* p, int64_t n) { return {p, static_cast<size_t>(n) * sizeof(T), Use::both}; }

struct Grid {
  int64_t x = 1, y = 1, z = 1;  // threadgroups
};

// A shared event: the command buffer that waits for its next value goes on when that is signalled. Opened by threads that
// know nothing of Metal, so its lock is all that orders them.
class EventLatch final : public Latch {
 public:
  explicit EventLatch(Ref<MTL::SharedEvent> event) : event_(std::move(event)) {}
  void open() noexcept override;
  // Closed again, once nobody waits for it any more.
  void encode_wait(MTL::CommandBuffer* buffer);

 private:
  Ref<MTL::SharedEvent> event_;
  std::mutex mutex_;
  uint64_t value_ = 0;
  bool open_ = true;
};

// Shared by the back ends of one session, whose operations are ordered with each other.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Argument struct at buffer index 0, the buffers from index 1 on; threadgroup memory at index 0.
  void dispatch(const Kernel& kernel, const void* args, size_t args_bytes, std::initializer_list<Argument> buffers, Grid grid,
                int threads, size_t threadgroup_bytes);

  // The device may start with what was issued so far.
  void submit();
  // What is issued from now on runs in command buffers behind a latch; what was is submitted. Null where the device has no
  // shared events. The latch may be used again after wait() and abandon().
  Latch* latch();
  // All that was issued is done. Throws BackendError when the device failed.
  void wait();
  // Nothing was issued since it was last done.
  bool idle() const { return !open_ && running_.empty(); }
  // Keeps at most `ahead` command buffers unfinished, and asks `poll` (may be null) meanwhile; true: stop.
  bool hold(int ahead, Poll* poll);
  // Drops what was not submitted, waits for the rest; errors are not told.
  void abandon() noexcept;
  // Of the device, in all command buffers that were waited for.
  double device_seconds() const { return device_seconds_; }

 private:
  struct Touched {
    uintptr_t begin, end;
    bool written;
  };
  bool conflicts(const Argument& a) const;
  void begin();
  void begin_encoder();
  void end();
  void check(MTL::CommandBuffer* buffer);

  Device& device_;
  Ref<MTL::CommandQueue> queue_;
  Ref<MTL::CommandBuffer> open_;
  Ref<MTL::ComputeCommandEncoder> encoder_;
  std::vector<Ref<MTL::CommandBuffer>> running_;  // oldest first
  std::vector<Touched> touched_;  // since the last barrier
  Ref<MTL::Buffer> nothing_;      // bound where an argument is absent
  std::vector<std::unique_ptr<EventLatch>> latches_;
  size_t used_latches_ = 0;       // since the last wait() or abandon()
  double device_seconds_ = 0.0;
};

}  // namespace ds4::metal
