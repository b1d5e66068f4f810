// What is behind the classes of Metal.hpp when they run on an NVIDIA GPU.
//
// The host code of the Metal back end (csrc/metal_host) is used as it is: a queue is a stream, shared buffers are managed
// memory, and buffers over mapped weights are copies on the device, made when the model is opened. Dispatches are launched
// at the barrier that follows them, not at commit, so that the device works while the host encodes; a command buffer that is
// dropped without commit waits for what it launched. Dispatches between two barriers of a concurrent encoder run beside each other.
// With graphs (graphs.h) they are launched at commit instead, as one.
#pragma once

#include <Metal/Metal.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "cuda/graphs.h"
#include "cuda/kernels.h"
#include "cuda/times.h"

namespace MTL {

struct Function::State {
  const ds4::cuda::Kernel* kernel = nullptr;
  std::vector<std::string> definitions;  // of the function constants
  std::string values;                    // of the same, for who reads times
  // Compiled for a number of threads when first launched with it.
  ds4::cuda::Function compiled(unsigned threads) const;

 private:
  mutable std::mutex mutex_;
  mutable std::map<unsigned, ds4::cuda::Function> compiled_;
};

struct SharedEvent::State {
  uint64_t* value = nullptr;  // pinned, seen by the device
  State();
  ~State();
};

struct CommandQueue::State {
  static constexpr int kSides = 3;
  ds4::cuda::Stream stream = nullptr;
  // For dispatches that may run beside others: streams that start behind `begin` and end with their `done`.
  ds4::cuda::Stream side[kSides] = {};
  ds4::cuda::Event begin = nullptr, done[kSides] = {};
  ds4::cuda::Graphs graphs;  // where they are asked for
  State();
  ~State();
};

struct CommandBuffer::State {
  std::shared_ptr<CommandQueue::State> queue;
  bool launched = false;
  ds4::cuda::Recorded recorded;  // where graphs are asked for: launched at commit, or ahead of what an event orders
  std::vector<NS::SharedPtr<Buffer>> buffers;  // kept until the end
  std::vector<HandlerFunction> completed;
  std::string problem;  // told at commit
  CommandBufferStatus status = CommandBufferStatusNotEnqueued;
  ds4::cuda::Event begin = nullptr, end = nullptr;
  std::vector<ds4::cuda::Timed> timed;  // its launches, where they are timed (times.h)
  NS::Error* error = nullptr;
  NS::SharedPtr<NS::String> label;
  void begin_work();
  void launch_recorded();
  void finish(std::string reason);
  ~State();
};

}  // namespace MTL

namespace ds4::cuda {
// Where the device has what a buffer holds.
DevicePtr address(const MTL::Buffer* buffer);
}  // namespace ds4::cuda
