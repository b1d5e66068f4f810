// The device, its queues, and the kernels: compiled from the embedded source when first used.
#pragma once

#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <vector>

#include "metal_host/metal.h"

namespace ds4::metal {

// Owns one reference of a metal-cpp object.
template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* object) : object_(object) {}
  Ref(Ref&& other) noexcept : object_(other.object_) { other.object_ = nullptr; }
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() {
    if (object_ != nullptr) object_->release();
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T* object_ = nullptr;
};

// Metal's factories may autorelease: every call from a thread of ours that makes objects holds one of these.
class Pool {
 public:
  Pool() : pool_(NS::AutoreleasePool::alloc()->init()) {}
  ~Pool() { pool_->release(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

 private:
  NS::AutoreleasePool* pool_;
};

std::string text(const NS::String* s);
std::string text(const NS::Error* error);

// The function constants that a kernel is compiled for (metal/constants.h has the same list).
struct Constants {
  int32_t type = 0;    // RowType of the matrix
  int32_t rows = 1;    // activation rows of a tile, 1 .. 8
  int32_t type2 = 0;   // RowType of a second matrix
  int32_t flags = 0;   // bits with a meaning of the kernel's own
  int32_t round = 0;   // set by the back end: results are rounded to bf16
  int32_t quant = 0;   // set by the back end: activations are quantised (mode fp8)
  auto key() const { return std::tie(type, rows, type2, flags, round, quant); }
};

struct Kernel {
  MTL::ComputePipelineState* pipeline = nullptr;
  const char* name = "";
  KernelCounts* counts = nullptr;
};

// Where memory that the engine knows by its address lies for the device.
struct Place {
  MTL::Buffer* buffer = nullptr;
  size_t offset = 0;
};

// One for the process. Thread-safe.
class Device {
 public:
  // Throws BackendError when there is none.
  static Device& get();
  static std::string why_not();

  MTL::Device* device() const { return device_.get(); }

  // Every queue sees the weights of all residency sets that are here.
  Ref<MTL::CommandQueue> new_queue();
  void forget_queue(MTL::CommandQueue* queue);
  void add_resident(MTL::ResidencySet* set);
  void remove_resident(MTL::ResidencySet* set);

  // A kernel by its host name. Throws BackendError with the compiler's text when it cannot be had.
  Kernel kernel(const char* name, const Constants& constants);

  // New memory with anything in it, or pages that exist (no copy; the owner keeps them mapped).
  Ref<MTL::Buffer> new_buffer(size_t bytes);
  Ref<MTL::Buffer> wrap(const void* page, size_t bytes);
  // New memory for weights, with anything in it. Its contents() are for the device alone: an address, and no more, where the
  // device has memory of its own.
  Ref<MTL::Buffer> new_weights(size_t bytes);

  // Memory by address. forget() takes what remember() was given.
  void remember(const void* p, size_t bytes, MTL::Buffer* buffer, size_t offset);
  void forget(const void* p);
  // False when [p, p + 1) is not known.
  bool find(const void* p, Place* place) const;

  // for_host: the host writes or reads it in every run.
  void* alloc(size_t bytes, bool for_host = false);
  void free(void* p);

  Counters counters;  // under no lock: back ends of one session at a time are counted
  std::vector<std::pair<std::string, KernelCounts>> counters_by_kernel() const;

 private:
  Device();
  void compile();
  // Whole pages. Throws MemoryPlanError with the advice when the device refuses.
  Ref<MTL::Buffer> allocate(size_t bytes, MTL::ResourceOptions mode, const char* advice);
  Kernel build(const char* name, const Constants& constants);

  struct Range {
    size_t bytes;
    MTL::Buffer* buffer;
    size_t offset;
  };
  using Key = std::tuple<std::string, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t>;

  Ref<MTL::Device> device_;
  std::mutex queues_mutex_;
  std::vector<MTL::CommandQueue*> queues_;
  std::vector<MTL::ResidencySet*> resident_;
  std::vector<Ref<MTL::Library>> libraries_;
  std::map<std::string, MTL::Library*> home_;  // of each kernel
  std::mutex kernels_mutex_;
  std::map<Key, std::pair<Ref<MTL::ComputePipelineState>, Kernel>> kernels_;
  mutable std::mutex counts_mutex_;
  std::map<std::string, KernelCounts> counts_;
  mutable std::shared_mutex ranges_mutex_;
  std::map<uintptr_t, Range> ranges_;
  struct Allocation {
    Ref<MTL::Buffer> buffer;
    void* pages;
    size_t bytes;
  };
  std::map<uintptr_t, Allocation> allocated_;
};

}  // namespace ds4::metal
