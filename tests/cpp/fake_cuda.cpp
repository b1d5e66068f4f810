// A CUDA driver and compiler that are none, for tests of the host's side (csrc/cuda) on machines without an NVIDIA GPU: memory is
// the host's, a launch runs at once, and the only kernel is copy_words. A graph runs its kernels as late as their dependencies
// allow, last made first, so that a dependency that is missing shows in what was copied.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

struct Copy {
  uint64_t n = 0, from = 0, to = 0;
  void run() const { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), 16 * n); }
};
Copy copy_of(void* const* params) {
  Copy c;
  std::memcpy(&c.n, params[0], 8), std::memcpy(&c.from, params[1], 8), std::memcpy(&c.to, params[2], 8);
  return c;
}
struct Node {
  Copy copy;
  std::vector<size_t> behind;
};
struct Graph {
  std::vector<Node> nodes;
  std::vector<size_t*> handles;
};
struct NodeParams {
  const char* function;
  unsigned grid[3], block[3], shared_bytes;
  void** params;
  void** extra;
  void *kernel, *context;
};
struct Program {
  std::string name;
};
int64_t g_counts[4];  // launches, graph launches, arguments set anew, graphs destroyed

bool known(const char* function) { return std::strcmp(function, "ds4_copy_words") == 0; }

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) int

FAKE fake_count(int which) { return static_cast<int>(g_counts[which]); }
FAKE cuInit(unsigned) { return 0; }
FAKE cuDriverGetVersion(int* v) { return *v = 13000, 0; }
FAKE cuDeviceGet(int* d, int) { return *d = 0, 0; }
FAKE cuDeviceGetName(char* name, int n, int) { return std::strncpy(name, "a GPU that is none", static_cast<size_t>(n)), 0; }
FAKE cuDeviceTotalMem_v2(size_t* n, int) { return *n = size_t{1} << 30, 0; }
FAKE cuDeviceGetAttribute(int* value, int which, int) { return *value = which == 75 ? 9 : which == 97 ? 232448 : which == 16 ? 132 : 0, 0; }
FAKE cuDevicePrimaryCtxRetain(void** c, int) { return *c = &g_counts, 0; }
FAKE cuCtxSetCurrent(void*) { return 0; }
FAKE cuGetErrorString(int, const char** text) { return *text = "no such thing in the fake driver", 0; }
FAKE cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = *total = size_t{1} << 30, 0; }
FAKE cuMemAlloc_v2(uint64_t* p, size_t n) { return *p = reinterpret_cast<uint64_t>(std::malloc(n)), 0; }
FAKE cuMemAllocManaged(uint64_t* p, size_t n, unsigned) { return *p = reinterpret_cast<uint64_t>(std::malloc(n)), 0; }
FAKE cuMemFree_v2(uint64_t p) { return std::free(reinterpret_cast<void*>(p)), 0; }
FAKE cuMemAdvise(uint64_t, size_t, int, int) { return 0; }
FAKE cuMemsetD8_v2(uint64_t p, unsigned char v, size_t n) { return std::memset(reinterpret_cast<void*>(p), v, n), 0; }
FAKE cuCtxSynchronize() { return 0; }
FAKE cuMemHostAlloc(void** p, size_t n, unsigned) { return *p = std::malloc(n), 0; }
FAKE cuMemFreeHost(void* p) { return std::free(p), 0; }
FAKE cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, void*) { return std::memcpy(reinterpret_cast<void*>(to), from, n), 0; }
FAKE cuStreamCreate(void** s, unsigned) { return *s = &g_counts, 0; }
FAKE cuStreamDestroy_v2(void*) { return 0; }
FAKE cuStreamSynchronize(void*) { return 0; }
FAKE cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
FAKE cuStreamWaitValue64_v2(void*, uint64_t, uint64_t, unsigned) { return 801; }
FAKE cuStreamWriteValue64_v2(void*, uint64_t, uint64_t, unsigned) { return 801; }
FAKE cuEventCreate(void** e, unsigned) { return *e = &g_counts, 0; }
FAKE cuEventDestroy_v2(void*) { return 0; }
FAKE cuEventRecord(void*, void*) { return 0; }
FAKE cuEventQuery(void*) { return 0; }
FAKE cuEventSynchronize(void*) { return 0; }
FAKE cuEventElapsedTime(float* ms, void*, void*) { return *ms = 1.0f, 0; }
FAKE cuModuleLoadData(void** m, const void*) { return *m = &g_counts, 0; }
FAKE cuModuleGetFunction(const char** f, void*, const char* name) { return *f = strdup(name), 0; }
FAKE cuFuncSetAttribute(void*, int, int) { return 0; }
FAKE cuLaunchKernel(const char* f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void** params, void**) {
  if (!known(f)) return 500;
  ++g_counts[0];
  return copy_of(params).run(), 0;
}

FAKE cuGraphCreate(Graph** g, unsigned) { return *g = new Graph, 0; }
FAKE cuGraphAddKernelNode_v2(size_t** node, Graph* g, size_t* const* behind, size_t n, const NodeParams* p) {
  if (!known(p->function)) return 500;
  Node made{copy_of(p->params), {}};
  for (size_t i = 0; i < n; ++i) made.behind.push_back(*behind[i]);
  *node = new size_t(g->nodes.size());
  g->handles.push_back(*node);
  return g->nodes.push_back(std::move(made)), 0;
}
FAKE cuGraphInstantiateWithFlags(Graph** exec, Graph* g, unsigned long long) { return *exec = new Graph{g->nodes, {}}, 0; }
FAKE cuGraphExecKernelNodeSetParams_v2(Graph* exec, size_t* node, const NodeParams* p) {
  ++g_counts[2];
  return exec->nodes[*node].copy = copy_of(p->params), 0;
}
FAKE cuGraphLaunch(Graph* exec, void*) {
  ++g_counts[1];
  std::vector<bool> done(exec->nodes.size());
  for (size_t left = done.size(); left > 0;) {
    for (size_t i = done.size(); i-- > 0;) {
      bool ready = !done[i];
      for (const size_t b : exec->nodes[i].behind) ready = ready && done[b];
      if (!ready) continue;
      exec->nodes[i].copy.run();
      done[i] = true, --left;
      break;
    }
  }
  return 0;
}
FAKE cuGraphExecDestroy(Graph* exec) {
  ++g_counts[3];
  return delete exec, 0;
}
FAKE cuGraphDestroy(Graph* g) {
  for (size_t* h : g->handles) delete h;
  return delete g, 0;
}

FAKE nvrtcCreateProgram(Program** p, const char*, const char* name, int, const char* const*, const char* const*) { return *p = new Program{name}, 0; }
FAKE nvrtcCompileProgram(Program*, int, const char* const*) { return 0; }
FAKE nvrtcGetProgramLogSize(Program*, size_t* n) { return *n = 0, 0; }
FAKE nvrtcGetProgramLog(Program*, char*) { return 0; }
FAKE nvrtcGetCUBINSize(Program*, size_t* n) { return *n = 1, 0; }
FAKE nvrtcGetCUBIN(Program*, char* out) { return *out = 0, 0; }
FAKE nvrtcDestroyProgram(Program** p) { return delete *p, *p = nullptr, 0; }
