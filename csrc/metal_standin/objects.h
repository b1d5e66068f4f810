// What is behind the classes of Metal.hpp.
#pragma once

#include <Metal/Metal.hpp>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "metal_standin/launch.h"
#include "metal_standin/options.h"
#include "metal_standin/registry.h"

namespace MTL {

struct Function::State {
  ds4::standin::Entry entry{};
  std::vector<ds4::standin::ConstantValue> constants;
};

struct SharedEvent::State {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t value = 0;
};

// One thing that a command buffer does, in order.
struct Command {
  enum class Kind : uint8_t { dispatch, wait, signal } kind;
  ds4::standin::Launch launch;                       // dispatch; phases of its buffers count from the buffer's first
  uint32_t phase = 0;                                // dispatches of one phase may run in any order
  bool movable = false;
  std::vector<std::shared_ptr<std::vector<char>>> bytes;  // what setBytes copied
  std::shared_ptr<SharedEvent::State> event;
  uint64_t value = 0;
  const Buffer* indirect = nullptr;                  // threadgroup counts are read from here when it runs
  uint64_t indirect_offset = 0;
};

struct CommandBuffer::State {
  std::shared_ptr<CommandQueue::State> queue;
  bool retains = true, encoding = false, seen = false;
  std::vector<Command> commands;
  std::vector<NS::SharedPtr<Buffer>> buffers;        // kept for the run, also when the host asked not to
  uint32_t phases = 0;
  std::vector<HandlerFunction> scheduled, completed;
  ds4::standin::Report report;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::atomic<CommandBufferStatus> status{CommandBufferStatusNotEnqueued};
  NS::Error* error = nullptr;
  double start = 0, end = 0;
  NS::SharedPtr<NS::String> label;

  bool done = false;  // handlers have run

  void set_status(CommandBufferStatus s);
  void set_done();
};

// Command buffers run in the order in which they were committed (or enqueued), on the queue's own thread.
struct CommandQueue::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<CommandBuffer*> waiting;  // each with a reference
  bool quit = false;
  std::thread thread;
  int owner = 0;  // process that has the thread

  void work();
  void run(CommandBuffer* buffer);
};

}  // namespace MTL
