// What is behind the classes of Metal.hpp when they run on an NVIDIA GPU.
//
// The host code of the Metal back end (csrc/metal_host) is used as it is: a queue is a stream, a command buffer a list of
// launches that is handed over at commit, shared buffers are managed memory, and buffers over mapped weights are copies on
// the device, made when the model is opened.
#pragma once

#include <Metal/Metal.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "cuda/kernels.h"

namespace MTL {

struct Function::State {
  const ds4::cuda::Kernel* kernel = nullptr;
  std::vector<std::string> definitions;  // of the function constants
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
  ds4::cuda::Stream stream = nullptr;
  std::mutex mutex;  // one command buffer is handed over at a time
  ~State();
};

struct Launch {
  enum class Kind : uint8_t { kernel, wait, signal } kind = Kind::kernel;
  ds4::cuda::Function function = nullptr;
  unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, shared_bytes = 0;
  std::vector<uint64_t> words;     // the arguments, each from a multiple of 16 bytes on
  std::vector<uint32_t> offsets;   // in words, one an argument
  std::shared_ptr<SharedEvent::State> event;
  uint64_t value = 0;
};

struct CommandBuffer::State {
  std::shared_ptr<CommandQueue::State> queue;
  std::vector<Launch> launches;
  std::vector<NS::SharedPtr<Buffer>> buffers;  // kept until the end
  std::vector<HandlerFunction> completed;
  std::string problem;
  CommandBufferStatus status = CommandBufferStatusNotEnqueued;
  ds4::cuda::Event begin = nullptr, end = nullptr;
  NS::Error* error = nullptr;
  NS::SharedPtr<NS::String> label;
  void finish(std::string reason);
  ~State();
};

}  // namespace MTL

namespace ds4::cuda {
// Where the device has what a buffer holds.
DevicePtr address(const MTL::Buffer* buffer);
}  // namespace ds4::cuda
