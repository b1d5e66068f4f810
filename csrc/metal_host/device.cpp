#include "metal_host/device.h"

#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "metal_host/sources.h"

namespace ds4::metal {

namespace {

constexpr size_t kPage = 16384;
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

NS::String* string(const std::string& s) { return NS::String::string(s.c_str(), NS::UTF8StringEncoding); }

std::string describe(const Constants& c) {
  return "type " + std::to_string(c.type) + ", rows " + std::to_string(c.rows) + ", type2 " + std::to_string(c.type2) + ", flags " +
         std::to_string(c.flags) + ", round " + std::to_string(c.round) + ", quant " + std::to_string(c.quant);
}

}  // namespace

std::string text(const NS::String* s) { return s == nullptr ? std::string() : std::string(s->utf8String()); }

std::string text(const NS::Error* error) {
  return error == nullptr ? std::string("no reason given") : text(error->localizedDescription());
}

std::string Device::why_not() {
  static const std::string reason = [] {
    try {
      get();
      return std::string();
    } catch (const BackendError& error) {
      return std::string(error.what());
    }
  }();
  return reason;
}

Device& Device::get() {
  static Device* device = new Device;  // lives as long as the process: back ends of static objects may outlast main
  return *device;
}

Device::Device() : device_(MTL::CreateSystemDefaultDevice()) {
  const Pool pool;
  if (!device_) throw BackendError("[metal] this machine has no Metal device; use backend=\"cpu\"");
  compile();
}

Ref<MTL::CommandQueue> Device::new_queue() {
  const Pool pool;
  Ref<MTL::CommandQueue> queue(device_->newCommandQueue());
  if (!queue) throw BackendError("[metal] the device gave no command queue");
  const std::lock_guard<std::mutex> lock(queues_mutex_);
  for (const MTL::ResidencySet* set : resident_) queue->addResidencySet(set);
  queues_.push_back(queue.get());
  return queue;
}

void Device::forget_queue(MTL::CommandQueue* queue) {
  const std::lock_guard<std::mutex> lock(queues_mutex_);
  std::erase(queues_, queue);
}

void Device::add_resident(MTL::ResidencySet* set) {
  const std::lock_guard<std::mutex> lock(queues_mutex_);
  for (MTL::CommandQueue* queue : queues_) queue->addResidencySet(set);
  resident_.push_back(set);
}

void Device::remove_resident(MTL::ResidencySet* set) {
  const std::lock_guard<std::mutex> lock(queues_mutex_);
  for (MTL::CommandQueue* queue : queues_) queue->removeResidencySet(set);
  std::erase(resident_, set);
}

// Safe math: the canonical order and correctly rounded operations are the promise.
void Device::compile() {
  const Pool pool;
  Ref<MTL::CompileOptions> options(MTL::CompileOptions::alloc()->init());
  options->setMathMode(MTL::MathModeSafe);
  options->setMathFloatingPointFunctions(MTL::MathFloatingPointFunctionsPrecise);
  options->setLanguageVersion(MTL::LanguageVersion3_2);
  for (int i = 0; i < kSourceCount; ++i) {
    NS::Error* error = nullptr;
    Ref<MTL::Library> library(device_->newLibrary(string(kSources[i].text), options.get(), &error));
    if (!library)
      throw BackendError("[metal] the kernels of " + std::string(kSources[i].family) + ".metal do not compile: " + text(error));
    const NS::Array* names = library->functionNames();
    for (NS::UInteger k = 0; k < names->count(); ++k) home_[text(names->object<NS::String>(k))] = library.get();
    libraries_.push_back(std::move(library));
  }
}

Kernel Device::kernel(const char* name, const Constants& constants) {
  const Key key = std::tuple_cat(std::tuple<std::string>(name), constants.key());
  const std::lock_guard<std::mutex> lock(kernels_mutex_);
  const auto found = kernels_.find(key);
  if (found != kernels_.end()) return found->second.second;
  const Kernel kernel = build(name, constants);
  kernels_.emplace(key, std::make_pair(Ref<MTL::ComputePipelineState>(kernel.pipeline), kernel));
  return kernel;
}

Kernel Device::build(const char* name, const Constants& constants) {
  const Pool pool;
  Ref<MTL::FunctionConstantValues> values(MTL::FunctionConstantValues::alloc()->init());
  const int32_t list[] = {constants.type, constants.rows, constants.type2, constants.flags, constants.round, constants.quant};
  for (NS::UInteger i = 0; i < sizeof list / sizeof list[0]; ++i) values->setConstantValue(&list[i], MTL::DataTypeInt, i);
  NS::Error* error = nullptr;
  const auto home = home_.find(name);
  if (home == home_.end()) throw BackendError("[metal] there is no kernel named " + std::string(name));
  const Ref<MTL::Function> function(home->second->newFunction(string(name), values.get(), &error));
  if (!function) throw BackendError("[metal] kernel " + std::string(name) + " (" + describe(constants) + ") cannot be made: " + text(error));
  Kernel kernel;
  kernel.pipeline = device_->newComputePipelineState(function.get(), &error);
  if (kernel.pipeline == nullptr)
    throw BackendError("[metal] kernel " + std::string(name) + " (" + describe(constants) + ") has no pipeline: " + text(error));
  const std::lock_guard<std::mutex> lock(counts_mutex_);
  const auto count = counts_.emplace(name, KernelCounts{}).first;
  kernel.name = count->first.c_str();
  kernel.counts = &count->second;
  return kernel;
}

Ref<MTL::Buffer> Device::allocate(size_t bytes, MTL::ResourceOptions mode, const char* advice) {
  const Pool pool;
  bytes = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  Ref<MTL::Buffer> buffer(device_->newBuffer(bytes, mode));
  if (!buffer) throw MemoryPlanError("[metal] the device refused " + std::to_string(bytes) + " bytes; " + advice);
  return buffer;
}

Ref<MTL::Buffer> Device::new_buffer(size_t bytes) {
  return allocate(bytes, MTL::ResourceStorageModeShared, "ask for a smaller context or chunk");
}

Ref<MTL::Buffer> Device::new_weights(size_t bytes) {
#ifdef DS4_CUDA
  constexpr auto kMode = MTL::ResourceStorageModePrivate;
#else
  constexpr auto kMode = MTL::ResourceStorageModeShared;  // one memory; and private buffers have no address there
#endif
  if (bytes > device_->maxBufferLength())
    throw MemoryPlanError("[metal] " + std::to_string(bytes) + " bytes of weights in one piece; the device's largest buffer has " +
                          std::to_string(device_->maxBufferLength()));
  return allocate(bytes, kMode, "make a smaller model");
}

Ref<MTL::Buffer> Device::wrap(const void* page, size_t bytes) {
  const Pool pool;
  Ref<MTL::Buffer> buffer(device_->newBuffer(page, bytes, MTL::ResourceStorageModeShared, nullptr));
  if (!buffer) throw MemoryPlanError("[metal] the device refused to use " + std::to_string(bytes) + " bytes of mapped weights in place");
  return buffer;
}

void Device::remember(const void* p, size_t bytes, MTL::Buffer* buffer, size_t offset) {
  const std::unique_lock<std::shared_mutex> lock(ranges_mutex_);
  ranges_[reinterpret_cast<uintptr_t>(p)] = Range{bytes, buffer, offset};
}

void Device::forget(const void* p) {
  const std::unique_lock<std::shared_mutex> lock(ranges_mutex_);
  ranges_.erase(reinterpret_cast<uintptr_t>(p));
}

bool Device::find(const void* p, Place* place) const {
  const auto at = reinterpret_cast<uintptr_t>(p);
  const std::shared_lock<std::shared_mutex> lock(ranges_mutex_);
  auto next = ranges_.upper_bound(at);
  if (next == ranges_.begin()) return false;
  --next;
  if (at - next->first >= next->second.bytes) return false;
  *place = {next->second.buffer, next->second.offset + (at - next->first)};
  return true;
}

// Pages of our own under a buffer: the system hands them out zeroed and when they are first touched; Metal promises neither.
void* Device::alloc(size_t bytes, [[maybe_unused]] bool for_host) {
#ifdef DS4_CUDA  // pages of the host are no memory of the device; its own allocator gives what both see, zeroed
  // "Managed" of Metal, memory of the host that the device sees: what it is here, csrc/cuda/device.cpp says.
  const auto mode = for_host ? MTL::ResourceStorageModeManaged : MTL::ResourceStorageModeShared;
  Allocation given{allocate(bytes, mode, "ask for a smaller context or chunk"), nullptr, 0};
  void* both = given.buffer->contents();
  remember(both, std::max<size_t>(bytes, 1), given.buffer.get(), 0);
  const std::unique_lock<std::shared_mutex> locked(ranges_mutex_);
  allocated_.emplace(reinterpret_cast<uintptr_t>(both), std::move(given));
  return both;
#else
  const size_t length = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  void* pages = mmap(nullptr, length + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED)
    throw MemoryPlanError("[metal] the system refused " + std::to_string(bytes) + " bytes; ask for a smaller context or chunk");
  auto* p = static_cast<uint8_t*>(pages);
  p += -reinterpret_cast<uintptr_t>(p) & (kPage - 1);
  try {
    Allocation allocation{wrap(p, length), pages, length + kPage};
    remember(p, std::max<size_t>(bytes, 1), allocation.buffer.get(), 0);
    const std::unique_lock<std::shared_mutex> lock(ranges_mutex_);
    allocated_.emplace(reinterpret_cast<uintptr_t>(p), std::move(allocation));
  } catch (...) {
    munmap(pages, length + kPage);
    throw;
  }
  return p;
#endif
}

void Device::free(void* p) {
  if (p == nullptr) return;
  const std::unique_lock<std::shared_mutex> lock(ranges_mutex_);
  ranges_.erase(reinterpret_cast<uintptr_t>(p));
  const auto found = allocated_.find(reinterpret_cast<uintptr_t>(p));
  if (found == allocated_.end()) return;
  Allocation gone = std::move(found->second);
  allocated_.erase(found);
  gone.buffer = {};  // before its pages go
  if (gone.pages != nullptr) munmap(gone.pages, gone.bytes);
}

std::vector<std::pair<std::string, KernelCounts>> Device::counters_by_kernel() const {
  const std::lock_guard<std::mutex> lock(counts_mutex_);
  return {counts_.begin(), counts_.end()};
}

bool available() { return Device::why_not().empty(); }
std::string why_not() { return Device::why_not(); }
Counters counters() { return Device::get().counters; }
std::vector<std::pair<std::string, KernelCounts>> counters_by_kernel() { return Device::get().counters_by_kernel(); }

}  // namespace ds4::metal
