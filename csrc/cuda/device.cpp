// Device, buffers, libraries and pipelines on an NVIDIA GPU.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

#include "base/error.h"
#include "cuda/objects.h"
#include "metal_host/sources.h"

namespace ds4::cuda {

namespace {

std::mutex g_mutex;
std::map<const MTL::Buffer*, DevicePtr>& copies() {  // of buffers over memory of the host
  static auto* all = new std::map<const MTL::Buffer*, DevicePtr>;
  return *all;
}

std::set<const MTL::Buffer*>& pinned() {  // buffers in memory of the host
  static auto* all = new std::set<const MTL::Buffer*>;
  return *all;
}

bool pinned_asked() {
  static const char* const asked = std::getenv("DS4_CUDA_PINNED");
  return asked != nullptr && std::strcmp(asked, "1") == 0;
}

// Copies [from, from + n) of this process to `to`; parts that cannot be read (behind the end of a mapped file) stay as
// they are. The system copies, so a page that is missing is an answer and no signal.
void read_self(char* to, const char* from, size_t n) {
  constexpr size_t kPage = 4096;
  while (n > 0) {
    const iovec local{to, n}, remote{const_cast<char*>(from), n};
    const ssize_t got = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    const size_t step = got > 0 ? static_cast<size_t>(got) : std::min(n, kPage - reinterpret_cast<uintptr_t>(from) % kPage);
    to += step, from += step, n -= step;
  }
}

}  // namespace

DevicePtr address(const MTL::Buffer* buffer) {
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    const auto found = copies().find(buffer);
    if (found != copies().end()) return found->second;
  }
  return reinterpret_cast<DevicePtr>(const_cast<MTL::Buffer*>(buffer)->contents());
}

namespace {

void upload(DevicePtr to, const char* from, size_t bytes) {
  constexpr size_t kStage = 64u << 20;
  const Driver& driver = Driver::get();
  const Stream stream = driver.new_stream();
  char* stage[2] = {static_cast<char*>(driver.alloc_pinned(kStage)), static_cast<char*>(driver.alloc_pinned(kStage))};
  Event free[2] = {driver.new_event(false), driver.new_event(false)};
  int which = 0;
  for (size_t at = 0; at < bytes; at += kStage, which ^= 1) {
    const size_t n = std::min(kStage, bytes - at);
    driver.synchronize(free[which]);
    read_self(stage[which], from + at, n);
    driver.upload(to + at, stage[which], n, stream);
    driver.record(free[which], stream);
  }
  driver.synchronize(stream);
  for (int i = 0; i < 2; ++i) {
    driver.free_event(free[i]);
    driver.free_pinned(stage[i]);
  }
  driver.free_stream(stream);
}

}  // namespace
}  // namespace ds4::cuda

namespace MTL {

using namespace ds4::cuda;

namespace {

constexpr NS::UInteger kPage = 16384;  // the rule of newBuffer without a copy, as on Apple silicon
std::atomic<uint64_t> g_allocated{0};

void set_error(NS::Error** error, std::string text) {
  if (error != nullptr) *error = (new NS::Error(std::move(text)))->autorelease();
}

}  // namespace

Device* CreateSystemDefaultDevice() {
  Driver::get();  // throws, with the reason, when there is none
  static Device* const device = new Device;
  return device->retain();
}

NS::String* Device::name() const { return NS::String::string(Driver::get().limits().name.c_str(), NS::UTF8StringEncoding); }
bool Device::supportsFamily(GPUFamily) { return false; }
NS::UInteger Device::maxBufferLength() const { return Driver::get().limits().memory; }
uint64_t Device::recommendedMaxWorkingSetSize() const { return Driver::get().limits().memory; }
NS::UInteger Device::currentAllocatedSize() const { return g_allocated; }
NS::UInteger Device::maxThreadgroupMemoryLength() const { return static_cast<NS::UInteger>(Driver::get().limits().shared_bytes); }
Size Device::maxThreadsPerThreadgroup() const { return Size(1024, 1024, 64); }
CommandQueue* Device::newCommandQueue() { return newCommandQueue(64); }
CommandQueue* Device::newCommandQueue(NS::UInteger most) { return new CommandQueue(most); }

// Private: on the device alone; contents() is then its address there, which the host must not look at. Managed: in memory of the
// host whose pages stay there, when that was asked for (docs/cuda.md); the device reads it over the bus. Else pages move.
Buffer* Device::newBuffer(NS::UInteger length, ResourceOptions options) {
  if (length == 0) return nullptr;
  const Driver& driver = Driver::get();
  if ((options & ResourceStorageModeManaged) != 0 && pinned_asked()) {
    void* p = driver.alloc_pinned(length);
    std::memset(p, 0, length);
    g_allocated += length;
    auto* buffer = new Buffer(p, length, length);
    const std::lock_guard<std::mutex> lock(g_mutex);
    pinned().insert(buffer);
    return buffer;
  }
  const bool own = (options & ResourceStorageModePrivate) != 0;
  void* p = own ? reinterpret_cast<void*>(driver.alloc_device(length)) : driver.alloc_managed(length);
  g_allocated += length;
  return new Buffer(p, length, length);
}

Buffer* Device::newBuffer(const void* pointer, NS::UInteger length, ResourceOptions options) {
  if (pointer == nullptr) return nullptr;
  Buffer* buffer = newBuffer(length, options);
  if (buffer != nullptr) std::memcpy(buffer->contents(), pointer, length);
  return buffer;
}

Buffer* Device::newBuffer(const void* pointer, NS::UInteger length, ResourceOptions, std::nullptr_t) {
  if (length == 0 || pointer == nullptr || length % kPage != 0 || reinterpret_cast<uintptr_t>(pointer) % kPage != 0) return nullptr;
  const DevicePtr copy = Driver::get().alloc_device(length);
  upload(copy, static_cast<const char*>(pointer), length);
  g_allocated += length;
  auto* buffer = new Buffer(const_cast<void*>(pointer), length, 0);
  const std::lock_guard<std::mutex> lock(g_mutex);
  copies()[buffer] = copy;
  return buffer;
}

Buffer::~Buffer() {
  g_allocated -= length_;
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    if (pinned().erase(this) != 0) {
      Driver::get().free_pinned(data_);
      return;
    }
  }
  if (mapped_ != 0) {
    Driver::get().free(reinterpret_cast<DevicePtr>(data_));
    return;
  }
  const std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = copies().find(this);
  if (found == copies().end()) return;
  Driver::get().free(found->second);
  copies().erase(found);
}

Device* Resource::device() const { return CreateSystemDefaultDevice()->autorelease(); }
void Resource::setLabel(const NS::String* label) { label_ = NS::RetainPtr(const_cast<NS::String*>(label)); }

// Null where a stream cannot wait for memory that the host writes: the engine waits for it then.
SharedEvent* Device::newSharedEvent() { return ds4::cuda::Driver::get().limits().stream_waits ? new SharedEvent : nullptr; }

// All memory is resident here.
ResidencySet* Device::newResidencySet(const ResidencySetDescriptor*, NS::Error**) { return new ResidencySet; }

// ---------------------------------------------------------------- libraries

Library* Device::newLibrary(const NS::String* source, const CompileOptions* options, NS::Error** error) {
  if (options == nullptr || options->mathMode() != MathModeSafe) {
    set_error(error, "[cuda] the library must be compiled with safe math; fast math would change bits");
    return nullptr;
  }
  for (int i = 0; i < ds4::metal::kSourceCount; ++i)
    if (std::strcmp(ds4::metal::kSources[i].text, source->utf8String()) == 0) return new Library(i);
  set_error(error, "[cuda] this source text is none of the families that were built in (metal/*.metal)");
  return nullptr;
}

Function* Library::newFunction(const NS::String* name) { return newFunction(name, nullptr, static_cast<NS::Error**>(nullptr)); }

Function* Library::newFunction(const NS::String* name, const FunctionConstantValues* values, NS::Error** error) {
  for (const ds4::cuda::Kernel& k : kernels()) {
    if (k.text != family_ || std::strcmp(k.name, name->utf8String()) != 0) continue;
    const auto state = std::make_shared<Function::State>();
    state->kernel = &k;
    if (values != nullptr)
      for (const auto& v : values->values()) {
        std::string text = v.type == DataTypeUInt ? std::to_string(v.bits) + "u" : std::to_string(static_cast<int32_t>(v.bits));
        if (v.type == DataTypeFloat) text = "__uint_as_float(" + std::to_string(v.bits) + "u)";
        state->definitions.push_back("-DDS4_CONSTANT_" + std::to_string(v.index) + "=" + text);
        state->values += (state->values.empty() ? "" : ",") + text;
      }
    return new Function(state);
  }
  set_error(error, std::string("[cuda] this family has no kernel '") + name->utf8String() + "'");
  return nullptr;
}

NS::Array* Library::functionNames() const {
  std::vector<NS::Object*> names;
  for (const ds4::cuda::Kernel& k : kernels())
    if (k.text == family_) names.push_back(NS::String::alloc()->init(k.name, NS::UTF8StringEncoding));
  return (new NS::Array(std::move(names)))->autorelease();
}

Function::Function(std::shared_ptr<const State> state)
    : name_(NS::String::alloc()->init(state->kernel->name, NS::UTF8StringEncoding)), state_(std::move(state)) {}

ds4::cuda::Function Function::State::compiled(unsigned threads) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  ds4::cuda::Function& f = compiled_[threads];
  if (f != nullptr) return f;
  const Driver& driver = Driver::get();
  const Limits& limits = driver.limits();
  // Every operation rounded as IEEE 754 says, subnormals flushed: docs/numerics.md.
  std::vector<std::string> options = {
      "--gpu-architecture=sm_" + std::to_string(limits.major) + std::to_string(limits.minor),
      "-std=c++17", "-default-device", "--fmad=false", "--ftz=true", "--prec-div=true", "--prec-sqrt=true",
      std::string("-DDS4_ONLY_") + kernel->name, "-DDS4_THREADS=" + std::to_string(threads)};
  options.insert(options.end(), definitions.begin(), definitions.end());
  const Text& text = texts().at(static_cast<size_t>(kernel->text));
  const std::string name = std::string("ds4_") + kernel->name;
  f = driver.load(driver.compile(text.source, std::string(text.family) + ".cu", options), name.c_str());
  return f;
}

ComputePipelineState* Device::newComputePipelineState(const Function* function, NS::Error** error) {
  if (function == nullptr) {
    set_error(error, "[cuda] a pipeline needs a function");
    return nullptr;
  }
  return new ComputePipelineState(function->state());
}

}  // namespace MTL
