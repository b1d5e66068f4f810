// The names of Metal that our host code uses, as metal-cpp spells them, executed on the CPU by csrc/metal_standin.
// What is not here is not used; a method that the host comes to need is added with Apple's rules, not as a stub.
#pragma once

#include <Foundation/Foundation.hpp>
#include <functional>
#include <memory>

namespace MTL {

enum ResourceOptions : NS::UInteger {
  ResourceStorageModeShared = 0,
  ResourceStorageModeManaged = 16,
  ResourceStorageModePrivate = 32,
  ResourceHazardTrackingModeDefault = 0,
  ResourceHazardTrackingModeUntracked = 256,
  ResourceHazardTrackingModeTracked = 512,
  ResourceCPUCacheModeDefaultCache = 0,
  ResourceCPUCacheModeWriteCombined = 1,
};
inline ResourceOptions operator|(ResourceOptions a, ResourceOptions b) {
  return static_cast<ResourceOptions>(static_cast<NS::UInteger>(a) | static_cast<NS::UInteger>(b));
}
enum DispatchType : NS::UInteger { DispatchTypeSerial = 0, DispatchTypeConcurrent = 1 };
enum BarrierScope : NS::UInteger { BarrierScopeBuffers = 1, BarrierScopeTextures = 2, BarrierScopeRenderTargets = 4 };
enum ResourceUsage : NS::UInteger { ResourceUsageRead = 1, ResourceUsageWrite = 2 };
enum CommandBufferStatus : NS::UInteger {
  CommandBufferStatusNotEnqueued = 0,
  CommandBufferStatusEnqueued = 1,
  CommandBufferStatusCommitted = 2,
  CommandBufferStatusScheduled = 3,
  CommandBufferStatusCompleted = 4,
  CommandBufferStatusError = 5,
};
enum DataType : NS::UInteger { DataTypeFloat = 3, DataTypeInt = 29, DataTypeUInt = 33, DataTypeBool = 53 };
enum MathMode : NS::Integer { MathModeSafe = 0, MathModeRelaxed = 1, MathModeFast = 2 };
enum MathFloatingPointFunctions : NS::Integer { MathFloatingPointFunctionsFast = 0, MathFloatingPointFunctionsPrecise = 1 };
enum LanguageVersion : NS::UInteger { LanguageVersion3_0 = 196608, LanguageVersion3_1 = 196609, LanguageVersion3_2 = 196610 };
enum GPUFamily : NS::Integer { GPUFamilyApple7 = 1007, GPUFamilyApple8 = 1008, GPUFamilyApple9 = 1009, GPUFamilyMetal3 = 5001 };

struct Size {
  Size() = default;
  Size(NS::UInteger w, NS::UInteger h, NS::UInteger d) : width(w), height(h), depth(d) {}
  static Size Make(NS::UInteger w, NS::UInteger h, NS::UInteger d) { return Size(w, h, d); }
  NS::UInteger width = 0, height = 0, depth = 0;
};

class Buffer;
class CommandBuffer;
class CommandQueue;
class CompileOptions;
class ComputeCommandEncoder;
class ComputePipelineState;
class Device;
class Function;
class FunctionConstantValues;
class Library;
class ResidencySet;
class ResidencySetDescriptor;
class SharedEvent;

Device* CreateSystemDefaultDevice();

class Device : public NS::Referencing<Device> {
 public:
  NS::String* name() const;
  bool supportsFamily(GPUFamily family);
  bool hasUnifiedMemory() const { return true; }
  NS::UInteger maxBufferLength() const;
  uint64_t recommendedMaxWorkingSetSize() const;
  NS::UInteger currentAllocatedSize() const;
  NS::UInteger maxThreadgroupMemoryLength() const;
  Size maxThreadsPerThreadgroup() const;
  CommandQueue* newCommandQueue();
  CommandQueue* newCommandQueue(NS::UInteger maxCommandBufferCount);
  Buffer* newBuffer(NS::UInteger length, ResourceOptions options);
  Buffer* newBuffer(const void* pointer, NS::UInteger length, ResourceOptions options);  // copies
  // No copy: pointer and length must be multiples of 16 KiB, or there is no buffer. Apple's last parameter is a block.
  Buffer* newBuffer(const void* pointer, NS::UInteger length, ResourceOptions options, std::nullptr_t deallocator);
  Library* newLibrary(const NS::String* source, const CompileOptions* options, NS::Error** error);
  ComputePipelineState* newComputePipelineState(const Function* computeFunction, NS::Error** error);
  // Apple has overloads with completion handlers, so a plain nullptr in place of the error is ambiguous there.
  Library* newLibrary(const NS::String* source, const CompileOptions* options, std::nullptr_t) = delete;
  ComputePipelineState* newComputePipelineState(const Function* computeFunction, std::nullptr_t) = delete;
  SharedEvent* newSharedEvent();
  ResidencySet* newResidencySet(const ResidencySetDescriptor* desc, NS::Error** error);
};

class Allocation : public NS::Object {
 public:
  virtual NS::UInteger allocatedSize() const = 0;

 protected:
  friend class ResidencySet;
};

class Resource : public NS::Referencing<Resource, Allocation> {
 public:
  void setLabel(const NS::String* label);
  NS::String* label() const { return label_.get(); }
  Device* device() const;

 private:
  NS::SharedPtr<NS::String> label_;
};

class Buffer : public NS::Referencing<Buffer, Resource> {
 public:
  void* contents() { return data_; }
  NS::UInteger length() const { return length_; }
  NS::UInteger allocatedSize() const override { return length_; }
  uint64_t gpuAddress() const { return reinterpret_cast<uint64_t>(data_); }

  Buffer(void* data, NS::UInteger length, NS::UInteger mapped) : data_(data), length_(length), mapped_(mapped) {}

 protected:
  ~Buffer() override;

 private:
  void* data_;
  NS::UInteger length_, mapped_;  // mapped_: bytes to unmap, 0 when the memory belongs to somebody else
};

class CompileOptions : public NS::Referencing<CompileOptions> {
 public:
  static CompileOptions* alloc() { return new CompileOptions; }
  CompileOptions* init() { return this; }
  void setFastMathEnabled(bool enabled) { mode_ = enabled ? MathModeFast : MathModeSafe; }
  void setMathMode(MathMode mode) { mode_ = mode; }
  MathMode mathMode() const { return mode_; }
  void setMathFloatingPointFunctions(MathFloatingPointFunctions functions) { functions_ = functions; }
  MathFloatingPointFunctions mathFloatingPointFunctions() const { return functions_; }
  void setLanguageVersion(LanguageVersion version) { version_ = version; }
  LanguageVersion languageVersion() const { return version_; }

 private:
  MathMode mode_ = MathModeFast;  // Metal's own default
  MathFloatingPointFunctions functions_ = MathFloatingPointFunctionsFast;
  LanguageVersion version_ = LanguageVersion3_2;
};

class Library : public NS::Referencing<Library> {
 public:
  Function* newFunction(const NS::String* functionName);
  Function* newFunction(const NS::String* name, const FunctionConstantValues* constantValues, NS::Error** error);
  Function* newFunction(const NS::String* name, const FunctionConstantValues* constantValues, std::nullptr_t) = delete;
  NS::Array* functionNames() const;

  explicit Library(int family) : family_(family) {}

 private:
  int family_;
};

class FunctionConstantValues : public NS::Referencing<FunctionConstantValues> {
 public:
  struct Value {
    NS::UInteger index;
    DataType type;
    uint32_t bits;
  };
  static FunctionConstantValues* alloc() { return new FunctionConstantValues; }
  FunctionConstantValues* init() { return this; }
  void setConstantValue(const void* value, DataType type, NS::UInteger index);
  void reset() { values_.clear(); }
  const std::vector<Value>& values() const { return values_; }  // not Apple's

 private:
  std::vector<Value> values_;
};

class Function : public NS::Referencing<Function> {
 public:
  NS::String* name() const { return name_; }

  struct State;
  explicit Function(std::shared_ptr<const State> state);
  const std::shared_ptr<const State>& state() const { return state_; }

 protected:
  ~Function() override { name_->release(); }

 private:
  NS::String* name_;
  std::shared_ptr<const State> state_;
};

class ComputePipelineState : public NS::Referencing<ComputePipelineState> {
 public:
  NS::UInteger maxTotalThreadsPerThreadgroup() const { return 1024; }
  NS::UInteger threadExecutionWidth() const { return 32; }
  NS::UInteger staticThreadgroupMemoryLength() const { return 0; }

  explicit ComputePipelineState(std::shared_ptr<const Function::State> state) : state_(std::move(state)) {}
  const std::shared_ptr<const Function::State>& state() const { return state_; }

 private:
  std::shared_ptr<const Function::State> state_;
};

class ResidencySetDescriptor : public NS::Referencing<ResidencySetDescriptor> {
 public:
  static ResidencySetDescriptor* alloc() { return new ResidencySetDescriptor; }
  ResidencySetDescriptor* init() { return this; }
  void setLabel(const NS::String*) {}
  void setInitialCapacity(NS::UInteger) {}
};

class ResidencySet : public NS::Referencing<ResidencySet> {
 public:
  void addAllocation(const Allocation* allocation);
  void removeAllocation(const Allocation* allocation);
  bool containsAllocation(const Allocation* anAllocation);
  void commit();
  void requestResidency() {}
  void endResidency() {}
  NS::UInteger allocationCount() const { return committed_.size(); }
  uint64_t allocatedSize() const;

 protected:
  ~ResidencySet() override;

 private:
  std::vector<Allocation*> pending_, committed_;
};

class Event : public NS::Referencing<Event> {};

class SharedEvent : public NS::Referencing<SharedEvent, Event> {
 public:
  uint64_t signaledValue();
  void setSignaledValue(uint64_t signaledValue);
  bool waitUntilSignaledValue(uint64_t value, uint64_t milliseconds);

  SharedEvent();
  struct State;
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

class CommandQueue : public NS::Referencing<CommandQueue> {
 public:
  CommandBuffer* commandBuffer();
  CommandBuffer* commandBufferWithUnretainedReferences();
  void addResidencySet(const ResidencySet* residencySet);
  void removeResidencySet(const ResidencySet* residencySet);
  void setLabel(const NS::String*) {}
  Device* device() const;

  struct State;
  explicit CommandQueue(NS::UInteger most);

 protected:
  ~CommandQueue() override;

 private:
  std::shared_ptr<State> state_;
};

using HandlerFunction = std::function<void(CommandBuffer*)>;

class CommandBuffer : public NS::Referencing<CommandBuffer> {
 public:
  ComputeCommandEncoder* computeCommandEncoder();
  ComputeCommandEncoder* computeCommandEncoder(DispatchType dispatchType);
  void encodeWait(const Event* event, uint64_t value);
  void encodeSignalEvent(const Event* event, uint64_t value);
  void useResidencySet(const ResidencySet* residencySet);
  void addScheduledHandler(const HandlerFunction& function);
  void addCompletedHandler(const HandlerFunction& function);
  void enqueue();
  void commit();
  void waitUntilScheduled();
  void waitUntilCompleted();
  CommandBufferStatus status() const;
  NS::Error* error() const;
  double GPUStartTime() const;
  double GPUEndTime() const;
  void setLabel(const NS::String* label);
  NS::String* label() const;

  struct State;
  explicit CommandBuffer(std::unique_ptr<State> state);
  State& state() { return *state_; }

 protected:
  ~CommandBuffer() override;

 private:
  std::unique_ptr<State> state_;
};

class CommandEncoder : public NS::Referencing<CommandEncoder> {
 public:
  virtual void endEncoding() = 0;
  void setLabel(const NS::String*) {}
  void pushDebugGroup(const NS::String*) {}
  void popDebugGroup() {}
};

class ComputeCommandEncoder : public NS::Referencing<ComputeCommandEncoder, CommandEncoder> {
 public:
  DispatchType dispatchType() const;
  void setComputePipelineState(const ComputePipelineState* state);
  void setBuffer(const Buffer* buffer, NS::UInteger offset, NS::UInteger index);
  void setBufferOffset(NS::UInteger offset, NS::UInteger index);
  void setBytes(const void* bytes, NS::UInteger length, NS::UInteger index);
  void setThreadgroupMemoryLength(NS::UInteger length, NS::UInteger index);
  void dispatchThreadgroups(Size threadgroupsPerGrid, Size threadsPerThreadgroup);
  void dispatchThreadgroups(const Buffer* indirectBuffer, NS::UInteger indirectBufferOffset, Size threadsPerThreadgroup);
  void dispatchThreads(Size threadsPerGrid, Size threadsPerThreadgroup);
  void memoryBarrier(BarrierScope scope);
  void memoryBarrier(const Resource* const resources[], NS::UInteger count);
  void useResource(const Resource* resource, ResourceUsage usage);
  void endEncoding() override;

  struct State;
  explicit ComputeCommandEncoder(std::unique_ptr<State> state);

 protected:
  ~ComputeCommandEncoder() override;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace MTL
