// The classes of Metal that the host uses, one by one: lifetimes, events across queues, handlers, refusals.
// The same text compiles against Apple's own metal-cpp (tests/check_metal_cpp.sh), so the stand-in cannot drift from it.
#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "metal_host/sources.h"

namespace {

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                         \
    }                                                                       \
  } while (false)

constexpr NS::UInteger kPage = 16384;
constexpr auto kShared = MTL::ResourceStorageModeShared;

NS::String* text(const char* s) { return NS::String::string(s, NS::UTF8StringEncoding); }
bool contains(NS::Error* error, const char* part) {
  return error != nullptr && std::strstr(error->localizedDescription()->utf8String(), part) != nullptr;
}

NS::SharedPtr<MTL::Library> library_of(MTL::Device* device, const char* family) {
  const char* source = nullptr;
  for (int i = 0; i < ds4::metal::kSourceCount; ++i)
    if (std::strcmp(ds4::metal::kSources[i].family, family) == 0) source = ds4::metal::kSources[i].text;
  CHECK(source != nullptr);
  auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  options->setMathMode(MTL::MathModeSafe);
  options->setMathFloatingPointFunctions(MTL::MathFloatingPointFunctionsPrecise);
  options->setLanguageVersion(MTL::LanguageVersion3_1);
  NS::Error* error = nullptr;
  auto library = NS::TransferPtr(device->newLibrary(text(source), options.get(), &error));
  CHECK(library && error == nullptr);
  return library;
}

NS::SharedPtr<MTL::ComputePipelineState> doubling(MTL::Device* device) {
  auto library = library_of(device, "planted");
  auto function = NS::TransferPtr(library->newFunction(text("right_double")));
  CHECK(function && std::strcmp(function->name()->utf8String(), "right_double") == 0);
  NS::Error* error = nullptr;
  auto pipeline = NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
  CHECK(pipeline && pipeline->maxTotalThreadsPerThreadgroup() == 1024 && pipeline->threadExecutionWidth() == 32);
  return pipeline;
}

void encode_double(MTL::CommandBuffer* commands, MTL::ComputePipelineState* pipeline, MTL::Buffer* from, MTL::Buffer* to) {
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder(MTL::DispatchTypeConcurrent);
  encoder->setComputePipelineState(pipeline);
  encoder->setBuffer(from, 0, 0);
  encoder->setBuffer(to, 0, 1);
  encoder->useResource(from, MTL::ResourceUsageRead);
  encoder->dispatchThreads(MTL::Size::Make(64, 1, 1), MTL::Size::Make(32, 1, 1));
  encoder->endEncoding();
}

void libraries_refuse(MTL::Device* device) {
  NS::Error* error = nullptr;
  auto fast = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  CHECK(device->newLibrary(text("kernel void k() {}"), fast.get(), &error) == nullptr && contains(error, "MathModeSafe"));
  fast->setMathMode(MTL::MathModeSafe);
  error = nullptr;
  CHECK(device->newLibrary(text("kernel void k() {}"), fast.get(), &error) == nullptr && contains(error, "none of the compiled-in"));
  auto library = library_of(device, "probe");
  CHECK(library->functionNames()->count() == 5);
  auto values = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  const uint32_t bias = 3;
  const bool negate = true;
  values->setConstantValue(&bias, MTL::DataTypeUInt, NS::UInteger(0));
  error = nullptr;
  CHECK(library->newFunction(text("nothing"), values.get(), &error) == nullptr && contains(error, "no kernel 'nothing'"));
  error = nullptr;
  CHECK(library->newFunction(text("probe_flat"), values.get(), &error) == nullptr && contains(error, "'kNegate' (index 1) has no value"));
  values->setConstantValue(&bias, MTL::DataTypeInt, NS::UInteger(1));
  error = nullptr;
  CHECK(library->newFunction(text("probe_flat"), values.get(), &error) == nullptr && contains(error, "set with another type"));
  auto right = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  right->setConstantValue(&bias, MTL::DataTypeUInt, NS::UInteger(0));
  right->setConstantValue(&negate, MTL::DataTypeBool, NS::UInteger(1));
  error = nullptr;
  auto function = NS::TransferPtr(library->newFunction(text("probe_flat"), right.get(), &error));
  CHECK(function && error == nullptr);
}

void buffers(MTL::Device* device) {
  auto fresh = NS::TransferPtr(device->newBuffer(1000, kShared));
  CHECK(fresh->length() == 1000 && static_cast<unsigned char*>(fresh->contents())[999] == 0xff);
  auto copy = NS::TransferPtr(device->newBuffer("abc", 4, kShared));
  CHECK(std::strcmp(static_cast<char*>(copy->contents()), "abc") == 0);
  auto* pages = static_cast<char*>(std::aligned_alloc(kPage, 2 * kPage));
  std::memset(pages, 0, 2 * kPage);
  {
    auto wrapped = NS::TransferPtr(device->newBuffer(pages, 2 * kPage, kShared, nullptr));
    CHECK(wrapped->contents() == pages && device->currentAllocatedSize() >= 2 * kPage);
  }
  pages[0] = 1;  // still ours
  CHECK(device->newBuffer(pages + 4096, kPage, kShared, nullptr) == nullptr);
  CHECK(device->newBuffer(pages, kPage + 16, kShared, nullptr) == nullptr);
  std::free(pages);
  auto descriptor = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
  auto set = NS::TransferPtr(device->newResidencySet(descriptor.get(), nullptr));
  set->addAllocation(fresh.get());
  CHECK(!set->containsAllocation(fresh.get()));
  set->commit();
  set->requestResidency();
  CHECK(set->containsAllocation(fresh.get()) && set->allocatedSize() >= 1000 && fresh->retainCount() == 2);
  set->removeAllocation(fresh.get());
  set->commit();
}

// A command buffer that waits for an event does not hold up another queue; handlers run before the wait ends.
void events_and_handlers(MTL::Device* device) {
  auto pipeline = doubling(device);
  auto first = NS::TransferPtr(device->newCommandQueue()), second = NS::TransferPtr(device->newCommandQueue());
  uint32_t values[64];
  for (uint32_t i = 0; i < 64; ++i) values[i] = i;
  auto a = NS::TransferPtr(device->newBuffer(values, sizeof values, kShared));
  auto b = NS::TransferPtr(device->newBuffer(sizeof values, kShared));
  auto c = NS::TransferPtr(device->newBuffer(sizeof values, kShared));
  auto event = NS::TransferPtr(device->newSharedEvent());
  std::atomic<int> handled{0};

  MTL::CommandBuffer* late = first->commandBuffer();
  late->encodeWait(event.get(), 2);
  encode_double(late, pipeline.get(), b.get(), c.get());
  const std::function<void(MTL::CommandBuffer*)> handler = [&](MTL::CommandBuffer* done) {
    CHECK(done->status() == MTL::CommandBufferStatusCompleted);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ++handled;
  };
  late->addCompletedHandler(handler);
  late->commit();
  MTL::CommandBuffer* early = second->commandBufferWithUnretainedReferences();
  early->encodeWait(event.get(), 1);
  encode_double(early, pipeline.get(), a.get(), b.get());
  early->encodeSignalEvent(event.get(), 2);
  early->commit();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(early->status() < MTL::CommandBufferStatusCompleted && event->signaledValue() == 0);
  event->setSignaledValue(1);  // the host's turn: rows have been read
  CHECK(event->waitUntilSignaledValue(2, 60000));
  early->waitUntilCompleted();
  late->waitUntilCompleted();
  CHECK(handled == 1 && late->status() == MTL::CommandBufferStatusCompleted && late->error() == nullptr);
  CHECK(late->GPUEndTime() >= late->GPUStartTime());
  for (uint32_t i = 0; i < 64; ++i) CHECK(static_cast<uint32_t*>(c->contents())[i] == 4 * i);
  CHECK(!event->waitUntilSignaledValue(3, 1));
}

void failures(MTL::Device* device) {
  auto pipeline = doubling(device);
  auto queue = NS::TransferPtr(device->newCommandQueue());
  auto a = NS::TransferPtr(device->newBuffer(256, kShared)), b = NS::TransferPtr(device->newBuffer(256, kShared));

  MTL::CommandBuffer* open = queue->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = open->computeCommandEncoder();
  encoder->dispatchThreadgroups(MTL::Size(1, 1, 1), MTL::Size(32, 1, 1));
  open->commit();
  open->waitUntilCompleted();
  CHECK(open->status() == MTL::CommandBufferStatusError && contains(open->error(), "dispatch without a pipeline state"));
  CHECK(contains(open->error(), "commit before endEncoding"));

  MTL::CommandBuffer* released = queue->commandBufferWithUnretainedReferences();
  auto event = NS::TransferPtr(device->newSharedEvent());
  released->encodeWait(event.get(), 1);
  encode_double(released, pipeline.get(), a.get(), b.get());
  released->commit();
  b.reset();  // too early
  event->setSignaledValue(1);
  released->waitUntilCompleted();
  CHECK(released->status() == MTL::CommandBufferStatusError && contains(released->error(), "released before it completed"));
}

void indirect_counts(MTL::Device* device) {
  auto pipeline = doubling(device);
  auto queue = NS::TransferPtr(device->newCommandQueue());
  uint32_t values[64] = {1, 1, 1};
  for (uint32_t i = 3; i < 64; ++i) values[i] = i;
  auto a = NS::TransferPtr(device->newBuffer(values, sizeof values, kShared));
  auto b = NS::TransferPtr(device->newBuffer(sizeof values, kShared));
  MTL::CommandBuffer* commands = queue->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(pipeline.get());
  encoder->setBuffer(a.get(), 0, 0);
  encoder->setBuffer(b.get(), 0, 1);
  encoder->dispatchThreadgroups(a.get(), NS::UInteger(0), MTL::Size(32, 1, 1));
  encoder->memoryBarrier(MTL::BarrierScopeBuffers);
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  CHECK(commands->status() == MTL::CommandBufferStatusCompleted);
  const auto* out = static_cast<const uint32_t*>(b->contents());
  CHECK(out[31] == 62 && out[32] == 0xffffffffu);  // one threadgroup ran
}

// Threads that wait for each other, a fault half-way, and the same stacks again.
void synchronised(MTL::Device* device) {
  auto queue = NS::TransferPtr(device->newCommandQueue());
  uint32_t values[128];
  for (uint32_t i = 0; i < 128; ++i) values[i] = i;
  auto a = NS::TransferPtr(device->newBuffer(values, sizeof values, kShared));
  auto b = NS::TransferPtr(device->newBuffer(sizeof values, kShared));
  const auto run = [&](const char* family, const char* kernel, MTL::Buffer* first) {
    auto library = library_of(device, family);
    auto function = NS::TransferPtr(library->newFunction(text(kernel)));
    NS::Error* error = nullptr;
    auto pipeline = NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
    CHECK(pipeline.get() != nullptr);
    MTL::CommandBuffer* commands = queue->commandBuffer();
    MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
    encoder->setComputePipelineState(pipeline.get());
    encoder->setBuffer(first, 0, 0);
    encoder->setBuffer(b.get(), 0, 1);
    encoder->setThreadgroupMemoryLength(256, 0);
    encoder->dispatchThreadgroups(MTL::Size(2, 1, 1), MTL::Size(64, 1, 1));
    encoder->endEncoding();
    commands->commit();
    commands->waitUntilCompleted();
    return commands;
  };
  for (int round = 0; round < 3; ++round) {
    CHECK(run("probe", "probe_reverse", a.get())->status() == MTL::CommandBufferStatusCompleted);
    for (uint32_t i = 0; i < 128; ++i) CHECK(static_cast<uint32_t*>(b->contents())[i] == (i / 64) * 64 + 63 - i % 64);
    MTL::CommandBuffer* failed = run("planted", "planted_early_return", b.get());
    CHECK(failed->status() == MTL::CommandBufferStatusError && contains(failed->error(), "thread 63 returned"));
  }
}

}  // namespace

int main() {
  auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  {
    auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
    CHECK(device->hasUnifiedMemory() && device->maxThreadgroupMemoryLength() == 32768 && device->name()->length() > 0);
    libraries_refuse(device.get());
    buffers(device.get());
    events_and_handlers(device.get());
    failures(device.get());
    indirect_counts(device.get());
    synchronised(device.get());
  }
  CHECK(device->currentAllocatedSize() == 0);  // everything was given back
  std::puts("ok");
}
