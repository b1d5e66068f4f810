#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "cuda/graphs.h"

namespace ds4::cuda {

namespace {

using Result = int;
constexpr Result kNotReady = 600;
struct Program;
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;

struct NodeParams {  // CUDA_KERNEL_NODE_PARAMS_v2
  Function function;
  unsigned grid[3], block[3], shared_bytes;
  void** params;
  void** extra;
  void* kernel;
  Context context;
};

// The functions that are used, by their exported names and versions (CUDA driver API, NVRTC).
struct Api {
  Result (*Init)(unsigned);
  Result (*DriverGetVersion)(int*);
  Result (*DeviceGet)(int*, int);
  Result (*DeviceGetName)(char*, int, int);
  Result (*DeviceTotalMem)(size_t*, int);
  Result (*DeviceGetAttribute)(int*, int, int);
  Result (*PrimaryCtxRetain)(Context*, int);
  Result (*CtxSetCurrent)(Context);
  Result (*GetErrorString)(Result, const char**);
  Result (*MemGetInfo)(size_t*, size_t*);
  Result (*MemAlloc)(DevicePtr*, size_t);
  Result (*MemAllocManaged)(DevicePtr*, size_t, unsigned);
  Result (*MemFree)(DevicePtr);
  Result (*MemAdvise)(DevicePtr, size_t, int, int);
  Result (*MemsetD8)(DevicePtr, unsigned char, size_t);
  Result (*CtxSynchronize)();
  Result (*MemHostAlloc)(void**, size_t, unsigned);
  Result (*MemFreeHost)(void*);
  Result (*MemcpyHtoDAsync)(DevicePtr, const void*, size_t, Stream);
  Result (*StreamCreate)(Stream*, unsigned);
  Result (*StreamDestroy)(Stream);
  Result (*StreamSynchronize)(Stream);
  Result (*StreamWaitEvent)(Stream, Event, unsigned);
  Result (*StreamWaitValue64)(Stream, DevicePtr, uint64_t, unsigned);
  Result (*StreamWriteValue64)(Stream, DevicePtr, uint64_t, unsigned);
  Result (*EventCreate)(Event*, unsigned);
  Result (*EventDestroy)(Event);
  Result (*EventRecord)(Event, Stream);
  Result (*EventQuery)(Event);
  Result (*EventSynchronize)(Event);
  Result (*EventElapsedTime)(float*, Event, Event);
  Result (*ModuleLoadData)(Module*, const void*);
  Result (*ModuleGetFunction)(Function*, Module, const char*);
  Result (*FuncSetAttribute)(Function, int, int);
  Result (*LaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**);

  Result (*GraphCreate)(GraphHandle*, unsigned);
  Result (*GraphAddKernelNode)(GraphNode*, GraphHandle, const GraphNode*, size_t, const NodeParams*);
  Result (*GraphInstantiate)(GraphExec*, GraphHandle, unsigned long long);
  Result (*GraphExecKernelNodeSetParams)(GraphExec, GraphNode, const NodeParams*);
  Result (*GraphLaunch)(GraphExec, Stream);
  Result (*GraphExecDestroy)(GraphExec);
  Result (*GraphDestroy)(GraphHandle);

  Result (*CreateProgram)(Program**, const char*, const char*, int, const char* const*, const char* const*);
  Result (*CompileProgram)(Program*, int, const char* const*);
  Result (*GetProgramLogSize)(Program*, size_t*);
  Result (*GetProgramLog)(Program*, char*);
  Result (*GetCUBINSize)(Program*, size_t*);
  Result (*GetCUBIN)(Program*, char*);
  Result (*DestroyProgram)(Program**);
};

Api api;
Context context;
int device;

void* open_one(std::initializer_list<const char*> names, const char* what) {
  std::string tried;
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_GLOBAL)) return library;
    tried += std::string(tried.empty() ? "" : ", ") + name;
  }
  throw BackendError("[cuda] " + std::string(what) + " was not found (tried " + tried + "); install it, or use backend=\"cpu\"");
}

template <class F>
void bind(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) throw BackendError("[cuda] the library has no function " + std::string(name) + "; it is too old");
}

void load_api() {
  void* driver = open_one({"libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1"}, "NVIDIA's driver");
  bind(driver, "cuInit", api.Init);
  bind(driver, "cuDriverGetVersion", api.DriverGetVersion);
  bind(driver, "cuDeviceGet", api.DeviceGet);
  bind(driver, "cuDeviceGetName", api.DeviceGetName);
  bind(driver, "cuDeviceTotalMem_v2", api.DeviceTotalMem);
  bind(driver, "cuDeviceGetAttribute", api.DeviceGetAttribute);
  bind(driver, "cuDevicePrimaryCtxRetain", api.PrimaryCtxRetain);
  bind(driver, "cuCtxSetCurrent", api.CtxSetCurrent);
  bind(driver, "cuGetErrorString", api.GetErrorString);
  bind(driver, "cuMemGetInfo_v2", api.MemGetInfo);
  bind(driver, "cuMemAlloc_v2", api.MemAlloc);
  bind(driver, "cuMemAllocManaged", api.MemAllocManaged);
  bind(driver, "cuMemFree_v2", api.MemFree);
  bind(driver, "cuMemAdvise", api.MemAdvise);
  bind(driver, "cuMemsetD8_v2", api.MemsetD8);
  bind(driver, "cuCtxSynchronize", api.CtxSynchronize);
  bind(driver, "cuMemHostAlloc", api.MemHostAlloc);
  bind(driver, "cuMemFreeHost", api.MemFreeHost);
  bind(driver, "cuMemcpyHtoDAsync_v2", api.MemcpyHtoDAsync);
  bind(driver, "cuStreamCreate", api.StreamCreate);
  bind(driver, "cuStreamDestroy_v2", api.StreamDestroy);
  bind(driver, "cuStreamSynchronize", api.StreamSynchronize);
  bind(driver, "cuStreamWaitEvent", api.StreamWaitEvent);
  bind(driver, "cuStreamWaitValue64_v2", api.StreamWaitValue64);
  bind(driver, "cuStreamWriteValue64_v2", api.StreamWriteValue64);
  bind(driver, "cuEventCreate", api.EventCreate);
  bind(driver, "cuEventDestroy_v2", api.EventDestroy);
  bind(driver, "cuEventRecord", api.EventRecord);
  bind(driver, "cuEventQuery", api.EventQuery);
  bind(driver, "cuEventSynchronize", api.EventSynchronize);
  bind(driver, "cuEventElapsedTime", api.EventElapsedTime);
  bind(driver, "cuModuleLoadData", api.ModuleLoadData);
  bind(driver, "cuModuleGetFunction", api.ModuleGetFunction);
  bind(driver, "cuFuncSetAttribute", api.FuncSetAttribute);
  bind(driver, "cuLaunchKernel", api.LaunchKernel);
  if (graphs_asked()) {
    bind(driver, "cuGraphCreate", api.GraphCreate);
    bind(driver, "cuGraphAddKernelNode_v2", api.GraphAddKernelNode);
    bind(driver, "cuGraphInstantiateWithFlags", api.GraphInstantiate);
    bind(driver, "cuGraphExecKernelNodeSetParams_v2", api.GraphExecKernelNodeSetParams);
    bind(driver, "cuGraphLaunch", api.GraphLaunch);
    bind(driver, "cuGraphExecDestroy", api.GraphExecDestroy);
    bind(driver, "cuGraphDestroy", api.GraphDestroy);
  }

  void* nvrtc = open_one({"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"},
                         "NVIDIA's run-time compiler (libnvrtc, in the package nvidia-cuda-nvrtc or the CUDA toolkit)");
  bind(nvrtc, "nvrtcCreateProgram", api.CreateProgram);
  bind(nvrtc, "nvrtcCompileProgram", api.CompileProgram);
  bind(nvrtc, "nvrtcGetProgramLogSize", api.GetProgramLogSize);
  bind(nvrtc, "nvrtcGetProgramLog", api.GetProgramLog);
  bind(nvrtc, "nvrtcGetCUBINSize", api.GetCUBINSize);
  bind(nvrtc, "nvrtcGetCUBIN", api.GetCUBIN);
  bind(nvrtc, "nvrtcDestroyProgram", api.DestroyProgram);
}

void check(Result r, const char* what) {
  if (r == 0) return;
  const char* text = nullptr;
  api.GetErrorString(r, &text);
  const std::string reason = std::string("[cuda] ") + what + ": " + (text != nullptr ? text : "unknown error") + " (" + std::to_string(r) + ")";
  if (r == 2) throw MemoryPlanError(reason + "; open the model with fewer or smaller sessions");
  throw BackendError(reason);
}

int attribute(int which) {
  int value = 0;
  check(api.DeviceGetAttribute(&value, which, device), "reading the device's limits");
  return value;
}

}  // namespace

Driver& Driver::get() {
  static Driver* driver = new Driver;  // as long as the process: the driver unloads itself in its own order
  return *driver;
}

Driver::Driver() {
  load_api();
  check(api.Init(0), "starting the driver");
  check(api.DeviceGet(&device, 0), "finding a device");
  char name[256] = {};
  check(api.DeviceGetName(name, sizeof name, device), "reading the device's name");
  limits_.name = name;
  check(api.DriverGetVersion(&limits_.driver), "reading the driver's version");
  limits_.multiprocessors = attribute(16);
  limits_.major = attribute(75);
  limits_.minor = attribute(76);
  limits_.shared_bytes = attribute(97);
  check(api.DeviceTotalMem(&limits_.memory, device), "reading the device's memory");
  // Asked for, because its tests do not pass on a GPU yet (docs/cuda.md). Drivers that do not know the question cannot do it.
  const char* asked = std::getenv("DS4_CUDA_JOIN");
  int waits = 0;
  limits_.stream_waits = asked != nullptr && std::strcmp(asked, "1") == 0 && api.DeviceGetAttribute(&waits, 122, device) == 0 && waits != 0;
  if (limits_.major < 8)
    throw BackendError("[cuda] " + limits_.name + " has compute capability " + std::to_string(limits_.major) + "." + std::to_string(limits_.minor) +
                       "; expected 8.0 or more. Use backend=\"cpu\"");
  check(api.PrimaryCtxRetain(&context, device), "taking the device");
  enter();
}

void Driver::enter() const { check(api.CtxSetCurrent(context), "using the device"); }

size_t Driver::free_memory() const {
  size_t free = 0, total = 0;
  check(api.MemGetInfo(&free, &total), "asking for free memory");
  return free;
}

void* Driver::alloc_managed(size_t bytes) const {
  enter();
  // More than the card has free would be paged to and fro by the driver: refused instead.
  const size_t free = free_memory();
  if (bytes > free)
    throw MemoryPlanError("[cuda] expected at most " + std::to_string(free) + " bytes, which the device has free, got a request for " +
                          std::to_string(bytes) + "; ask for a smaller context or chunk");
  DevicePtr p = 0;
  check(api.MemAllocManaged(&p, bytes, 1), "allocating memory");
  api.MemAdvise(p, bytes, 3, device);  // preferred location: the device; advice only
  check(api.MemsetD8(p, 0, bytes), "clearing memory");
  check(api.CtxSynchronize(), "clearing memory");
  return reinterpret_cast<void*>(p);
}

DevicePtr Driver::alloc_device(size_t bytes) const {
  enter();
  DevicePtr p = 0;
  check(api.MemAlloc(&p, bytes), "allocating memory for weights");
  return p;
}

void Driver::free(DevicePtr p) const {
  enter();
  api.MemFree(p);
}

void* Driver::alloc_pinned(size_t bytes) const {
  enter();
  void* p = nullptr;
  check(api.MemHostAlloc(&p, bytes, 3), "allocating host memory");  // portable and mapped
  return p;
}

void Driver::free_pinned(void* p) const {
  enter();
  api.MemFreeHost(p);
}

void Driver::upload(DevicePtr to, const void* pinned, size_t bytes, Stream s) const {
  check(api.MemcpyHtoDAsync(to, pinned, bytes, s), "copying weights to the device");
}

Stream Driver::new_stream() const {
  enter();
  Stream s = nullptr;
  check(api.StreamCreate(&s, 1), "making a stream");
  return s;
}
void Driver::free_stream(Stream s) const {
  enter();
  api.StreamDestroy(s);
}
void Driver::synchronize(Stream s) const { check(api.StreamSynchronize(s), "running the kernels"); }

Event Driver::new_event(bool timed) const {
  Event e = nullptr;
  check(api.EventCreate(&e, timed ? 0 : 2), "making an event");
  return e;
}
void Driver::free_event(Event e) const {
  enter();
  api.EventDestroy(e);
}
void Driver::record(Event e, Stream s) const { check(api.EventRecord(e, s), "recording an event"); }
bool Driver::done(Event e) const {
  const Result r = api.EventQuery(e);
  if (r == kNotReady) return false;
  check(r, "running the kernels");
  return true;
}
void Driver::synchronize(Event e) const { check(api.EventSynchronize(e), "running the kernels"); }
double Driver::seconds(Event begin, Event end) const {
  float ms = 0;
  check(api.EventElapsedTime(&ms, begin, end), "reading a time");
  return ms * 1e-3;
}
void Driver::wait_event(Stream s, Event e) const { check(api.StreamWaitEvent(s, e, 0), "ordering two streams"); }
void Driver::wait_value(Stream s, DevicePtr p, uint64_t at_least) const {
  check(api.StreamWaitValue64(s, p, at_least, 0), "waiting for an event");
}
void Driver::write_value(Stream s, DevicePtr p, uint64_t value) const {
  check(api.StreamWriteValue64(s, p, value, 0), "signalling an event");
}

std::vector<char> Driver::compile(const std::string& source, const std::string& name, const std::vector<std::string>& options) const {
  Program* program = nullptr;
  const auto fail = [&](const std::string& text) {
    if (program != nullptr) api.DestroyProgram(&program);
    throw BackendError("[cuda] kernel " + name + " does not compile: " + text);
  };
  if (api.CreateProgram(&program, source.c_str(), name.c_str(), 0, nullptr, nullptr) != 0) fail("no program could be made");
  std::vector<const char*> list;
  for (const std::string& o : options) list.push_back(o.c_str());
  if (api.CompileProgram(program, static_cast<int>(list.size()), list.data()) != 0) {
    size_t n = 0;
    api.GetProgramLogSize(program, &n);
    std::string log(n, ' ');
    if (n > 0) api.GetProgramLog(program, log.data());
    fail(log.substr(0, 4000));
  }
  size_t n = 0;
  if (api.GetCUBINSize(program, &n) != 0 || n == 0) fail("the compiler gave no machine code for this device");
  std::vector<char> image(n);
  if (api.GetCUBIN(program, image.data()) != 0) fail("the compiler gave no machine code");
  api.DestroyProgram(&program);
  return image;
}

Function Driver::load(const std::vector<char>& image, const char* kernel) const {
  enter();
  Module module = nullptr;
  Function f = nullptr;
  check(api.ModuleLoadData(&module, image.data()), "loading a kernel");
  check(api.ModuleGetFunction(&f, module, kernel), "finding a kernel");
  return f;
}

void Driver::allow_shared(Function f, int bytes) const {
  check(api.FuncSetAttribute(f, 8, bytes), "asking for threadgroup memory");
}

namespace {

NodeParams node_params(Function f, const unsigned (&grid)[3], const unsigned (&block)[3], unsigned shared_bytes, void** params) {
  return {f, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes, params, nullptr, nullptr, nullptr};
}

}  // namespace

GraphHandle Driver::new_graph() const {
  GraphHandle graph = nullptr;
  check(api.GraphCreate(&graph, 0), "making a graph");
  return graph;
}
GraphNode Driver::add_launch(GraphHandle graph, const std::vector<GraphNode>& behind, Function f, const unsigned (&grid)[3],
                             const unsigned (&block)[3], unsigned shared_bytes, void** params) const {
  GraphNode node = nullptr;
  const NodeParams p = node_params(f, grid, block, shared_bytes, params);
  check(api.GraphAddKernelNode(&node, graph, behind.data(), behind.size(), &p), "adding a kernel to a graph");
  return node;
}
GraphExec Driver::instantiate(GraphHandle graph) const {
  GraphExec exec = nullptr;
  check(api.GraphInstantiate(&exec, graph, 0), "instantiating a graph");
  return exec;
}
void Driver::set_launch(GraphExec exec, GraphNode node, Function f, const unsigned (&grid)[3], const unsigned (&block)[3], unsigned shared_bytes,
                        void** params) const {
  const NodeParams p = node_params(f, grid, block, shared_bytes, params);
  check(api.GraphExecKernelNodeSetParams(exec, node, &p), "setting a kernel of a graph");
}
void Driver::launch_graph(GraphExec exec, Stream s) const { check(api.GraphLaunch(exec, s), "launching a graph"); }
void Driver::free_graph_exec(GraphExec exec) const {
  enter();
  api.GraphExecDestroy(exec);
}
void Driver::free_graph(GraphHandle graph) const {
  enter();
  api.GraphDestroy(graph);
}

void Driver::launch(Function f, const unsigned (&grid)[3], const unsigned (&block)[3], unsigned shared_bytes, Stream s, void** params) const {
  check(api.LaunchKernel(f, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared_bytes, s, params, nullptr), "launching a kernel");
}

}  // namespace ds4::cuda
