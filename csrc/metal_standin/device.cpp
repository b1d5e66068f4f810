// Device, buffers, libraries and pipelines.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "metal_standin/objects.h"

namespace MTL {

using namespace ds4::standin;

namespace {

std::atomic<uint64_t> g_allocated{0};
constexpr NS::UInteger kPage = 16384;              // of Apple silicon
constexpr NS::UInteger kPoisonBytes = 64u << 20;  // of a fresh buffer; the rest of a larger one stays zero and uncommitted

void set_error(NS::Error** error, std::string text) {
  if (error != nullptr) *error = (new NS::Error(std::move(text)))->autorelease();
}

Buffer* allocate(NS::UInteger length) {
  const NS::UInteger mapped = (length + kPage - 1) / kPage * kPage + kPage;  // and a page that nobody may touch
  void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  mprotect(static_cast<char*>(p) + (mapped - kPage), kPage, PROT_NONE);
  g_allocated += length;
  return new Buffer(p, length, mapped);
}

}  // namespace

Device* CreateSystemDefaultDevice() {
  options();  // a bad environment variable shows here, on a thread of the host
  static Device* const device = new Device;  // there is one; every call returns a reference to it
  return device->retain();
}

NS::String* Device::name() const { return NS::String::string("stand-in for Metal (CPU)", NS::UTF8StringEncoding); }
bool Device::supportsFamily(GPUFamily family) { return family <= GPUFamilyApple9 || family == GPUFamilyMetal3; }
NS::UInteger Device::maxBufferLength() const { return recommendedMaxWorkingSetSize() * 3 / 4; }
uint64_t Device::recommendedMaxWorkingSetSize() const {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}
NS::UInteger Device::currentAllocatedSize() const { return g_allocated; }
NS::UInteger Device::maxThreadgroupMemoryLength() const { return kMaxThreadgroupBytes; }
Size Device::maxThreadsPerThreadgroup() const { return Size(kMaxThreads, kMaxThreads, kMaxThreads); }
CommandQueue* Device::newCommandQueue() { return newCommandQueue(64); }
CommandQueue* Device::newCommandQueue(NS::UInteger most) { return new CommandQueue(most); }

Buffer* Device::newBuffer(NS::UInteger length, ResourceOptions) {
  if (length == 0) return nullptr;
  Buffer* buffer = allocate(length);
  // Metal promises nothing that a kernel should rely on: NaN for every float type.
  if (buffer != nullptr) std::memset(buffer->contents(), 0xff, length < kPoisonBytes ? length : kPoisonBytes);
  return buffer;
}

Buffer* Device::newBuffer(const void* pointer, NS::UInteger length, ResourceOptions) {
  if (length == 0 || pointer == nullptr) return nullptr;
  Buffer* buffer = allocate(length);
  if (buffer != nullptr) std::memcpy(buffer->contents(), pointer, length);
  return buffer;
}

Buffer* Device::newBuffer(const void* pointer, NS::UInteger length, ResourceOptions, std::nullptr_t) {
  if (length == 0 || pointer == nullptr || length % kPage != 0 || reinterpret_cast<uintptr_t>(pointer) % kPage != 0)
    return nullptr;
  g_allocated += length;
  return new Buffer(const_cast<void*>(pointer), length, 0);
}

Buffer::~Buffer() {
  g_allocated -= length_;
  if (mapped_ != 0) munmap(data_, mapped_);
}

Device* Resource::device() const { return CreateSystemDefaultDevice()->autorelease(); }
void Resource::setLabel(const NS::String* label) { label_ = NS::RetainPtr(const_cast<NS::String*>(label)); }

SharedEvent* Device::newSharedEvent() { return new SharedEvent; }
ResidencySet* Device::newResidencySet(const ResidencySetDescriptor*, NS::Error**) { return new ResidencySet; }

// ---------------------------------------------------------------- libraries

Library* Device::newLibrary(const NS::String* source, const CompileOptions* options, NS::Error** error) {
  if (options == nullptr || options->mathMode() != MathModeSafe) {
    set_error(error, "[stand-in] the library must be compiled with MathModeSafe; fast math would change bits");
    return nullptr;
  }
  const std::vector<Compiled>& all = compiled();
  for (size_t i = 0; i < all.size(); ++i)
    if (std::strcmp(all[i].source, source->utf8String()) == 0) return new Library(static_cast<int>(i));
  set_error(error, "[stand-in] this source text is none of the compiled-in families (metal/*.metal)");
  return nullptr;
}

Function* Library::newFunction(const NS::String* name) { return newFunction(name, nullptr, static_cast<NS::Error**>(nullptr)); }

Function* Library::newFunction(const NS::String* name, const FunctionConstantValues* values, NS::Error** error) {
  const Compiled& family = compiled()[static_cast<size_t>(family_)];
  const auto state = std::make_shared<Function::State>();
  for (int i = 0; i < family.fast->n_kernels; ++i)
    if (std::strcmp(family.fast->kernels[i].name, name->utf8String()) == 0) {
      state->entry = {family.fast, &family.fast->kernels[i], family.checked, family.checked != nullptr ? &family.checked->kernels[i] : nullptr};
    }
  if (state->entry.kernel == nullptr) {
    set_error(error, std::string("[stand-in] family ") + family.fast->name + " has no kernel '" + name->utf8String() + "'");
    return nullptr;
  }
  for (int i = 0; i < family.fast->n_constants; ++i) {
    const FunctionConstant& c = family.fast->constants[i];
    if ((state->entry.kernel->constants >> c.index & 1u) == 0) continue;
    const FunctionConstantValues::Value* found = nullptr;
    if (values != nullptr)
      for (const auto& v : values->values())
        if (v.index == c.index) found = &v;
    static const DataType kTypes[] = {DataTypeBool, DataTypeInt, DataTypeUInt, DataTypeFloat};
    if (found == nullptr || found->type != kTypes[static_cast<int>(c.type)]) {
      set_error(error, std::string("[stand-in] kernel '") + name->utf8String() + "': function constant '" + c.name + "' (index " +
                           std::to_string(c.index) + ") " + (found == nullptr ? "has no value" : "was set with another type"));
      return nullptr;
    }
    state->constants.push_back({c.index, c.type, found->bits});
  }
  return new Function(state);
}

NS::Array* Library::functionNames() const {
  std::vector<NS::Object*> names;
  const Compiled& family = compiled()[static_cast<size_t>(family_)];
  for (int i = 0; i < family.fast->n_kernels; ++i)
    names.push_back(NS::String::alloc()->init(family.fast->kernels[i].name, NS::UTF8StringEncoding));
  return (new NS::Array(std::move(names)))->autorelease();
}

Function::Function(std::shared_ptr<const State> state)
    : name_(NS::String::alloc()->init(state->entry.kernel->name, NS::UTF8StringEncoding)), state_(std::move(state)) {}

ComputePipelineState* Device::newComputePipelineState(const Function* function, NS::Error** error) {
  if (function == nullptr) {
    set_error(error, "[stand-in] a pipeline needs a function");
    return nullptr;
  }
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    set_error(error, "[stand-in] kernels were built for a processor with AVX2 and FMA, this one lacks them");
    return nullptr;
  }
#endif
  return new ComputePipelineState(function->state());
}

}  // namespace MTL
