// The classes of Metal on an NVIDIA GPU, over the driver of fake_cuda.cpp: what is copied, with and without graphs, and when graphs
// are made, used again and dropped. Prints counts; the test (tests/standin/test_cuda_host.py) knows what they must be.
#include <dlfcn.h>

#include <Metal/Metal.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/graphs.h"
#include "metal_host/sources.h"

namespace {

constexpr NS::UInteger kBytes = 1 << 16;

void need(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

struct Pair {
  MTL::Buffer *from, *to;
};

struct Test {
  MTL::Device* device = MTL::CreateSystemDefaultDevice();
  MTL::CommandQueue* queue = device->newCommandQueue();
  MTL::ComputePipelineState* copy = nullptr;

  Test() {
    MTL::CompileOptions* options = MTL::CompileOptions::alloc()->init();
    options->setMathMode(MTL::MathModeSafe);
    NS::Error* error = nullptr;
    MTL::Library* library = device->newLibrary(NS::String::string(ds4::metal::kSources[0].text, NS::UTF8StringEncoding), options, &error);
    need(library != nullptr, "no library");
    MTL::Function* function = library->newFunction(NS::String::string("copy_words", NS::UTF8StringEncoding));
    need(function != nullptr, "no function");
    copy = device->newComputePipelineState(function, &error);
  }

  MTL::Buffer* buffer(uint8_t first, MTL::ResourceOptions options = MTL::ResourceStorageModeShared) const {
    MTL::Buffer* b = device->newBuffer(kBytes, options);
    for (NS::UInteger i = 0; i < kBytes; ++i) static_cast<uint8_t*>(b->contents())[i] = static_cast<uint8_t>(first + i * 7);
    return b;
  }

  // Levels of copies, one command buffer; n words each.
  void run(const std::vector<std::vector<Pair>>& levels, uint64_t n = kBytes / 16, bool commit = true) const {
    NS::AutoreleasePool* pool = NS::AutoreleasePool::alloc()->init();
    MTL::CommandBuffer* buffer = queue->commandBuffer();
    MTL::ComputeCommandEncoder* encoder = buffer->computeCommandEncoder(MTL::DispatchTypeConcurrent);
    for (size_t l = 0; l < levels.size(); ++l) {
      if (l > 0) encoder->memoryBarrier(MTL::BarrierScopeBuffers);
      for (const Pair& p : levels[l]) {
        encoder->setComputePipelineState(copy);
        encoder->setBytes(&n, sizeof n, 0);
        encoder->setBuffer(p.from, 0, 1);
        encoder->setBuffer(p.to, 0, 2);
        encoder->dispatchThreadgroups(MTL::Size(2, 1, 1), MTL::Size(256, 1, 1));
      }
    }
    encoder->endEncoding();
    if (commit) {
      buffer->commit();
      buffer->waitUntilCompleted();
      need(buffer->status() == MTL::CommandBufferStatusCompleted, "not completed");
      need(buffer->GPUEndTime() > buffer->GPUStartTime(), "no time of the device");
    }
    pool->release();
  }
};

bool same(MTL::Buffer* a, MTL::Buffer* b, size_t n = kBytes) { return std::memcmp(a->contents(), b->contents(), n) == 0; }

void print(const char* what) {
  const ds4::cuda::GraphCounts c = ds4::cuda::graph_counts();
  std::printf("%s %lld %lld %lld %lld\n", what, static_cast<long long>(c.made), static_cast<long long>(c.launched), static_cast<long long>(c.nodes),
              static_cast<long long>(c.updated));
}

}  // namespace

int main() {
  NS::AutoreleasePool* pool = NS::AutoreleasePool::alloc()->init();
  {
    const Test t;
    MTL::Buffer *a = t.buffer(1), *b = t.buffer(2), *c = t.buffer(3), *d = t.buffer(4), *e = t.buffer(5), *f = t.buffer(6);
    // a to c and then d, beside b to e and then f: a level that came too early would bring what was there before
    t.run({{{a, c}, {b, e}}, {{c, d}, {e, f}}});
    need(same(a, d) && same(b, f), "wrong copies");
    print("first");
    t.run({{{a, c}, {b, e}}, {{c, d}, {e, f}}});
    print("again");
    MTL::Buffer *g = t.buffer(7), *h = t.buffer(8);
    t.run({{{g, c}, {b, e}}, {{c, h}, {e, f}}});
    need(same(g, h) && same(b, f) && same(a, d), "wrong copies with other arguments");
    print("other arguments");
    MTL::Buffer *half = t.buffer(9), *old = t.buffer(9);
    t.run({{{a, half}}}, kBytes / 32);
    need(same(a, half, kBytes / 2) && std::memcmp(static_cast<char*>(half->contents()) + kBytes / 2, static_cast<char*>(old->contents()) + kBytes / 2, kBytes / 2) == 0,
         "a copy of half");
    print("other form");
    MTL::Buffer *own = t.device->newBuffer(kBytes, MTL::ResourceStorageModePrivate), *host = t.buffer(11, MTL::ResourceStorageModeManaged);
    MTL::Buffer* back = t.buffer(12);
    t.run({{{host, own}}, {{own, back}}});
    need(same(host, back), "through memory of the device alone");
    print("memory");
    for (size_t n = 1; n <= 40; ++n) t.run({std::vector<Pair>(n, Pair{a, c})});  // more forms than are kept
    print("many forms");
    t.run({{{a, c}, {b, e}}, {{c, d}, {e, f}}});
    need(same(a, d) && same(b, f), "wrong copies by a form that was dropped");
    print("dropped form");
    MTL::Buffer* untouched = t.buffer(13);
    MTL::Buffer* before = t.buffer(13);
    t.run({{{a, untouched}}}, kBytes / 16, false);
    std::printf("without commit: %s\n", same(untouched, before) ? "nothing" : "copied");
    for (MTL::Buffer* x : {a, b, c, d, e, f, g, h, half, old, own, host, back, untouched, before}) x->release();
    t.queue->release();
  }
  pool->release();
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  const auto count = reinterpret_cast<int (*)(int)>(dlsym(driver, "fake_count"));
  std::printf("driver: %d launches, %d graphs, %d set anew, %d destroyed\n", count(0), count(1), count(2), count(3));
}
