// The CUDA driver and its run-time compiler, found when first asked for: neither is needed to build or to import.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ds4::cuda {

using DevicePtr = uint64_t;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using Function = struct FunctionHandle*;
using GraphHandle = struct CudaGraph*;
using GraphExec = struct CudaGraphExec*;
using GraphNode = struct CudaGraphNode*;

struct Limits {
  std::string name;
  int major = 0, minor = 0;
  int multiprocessors = 0;
  int shared_bytes = 0;  // of one threadgroup, at most
  size_t memory = 0;
  int driver = 0;        // e.g. 13000
  bool stream_waits = false;  // may a stream wait for 64-bit values in memory?
};

// One device, one context. Every function throws BackendError with the driver's own text. Thread-safe.
class Driver {
 public:
  static Driver& get();
  const Limits& limits() const { return limits_; }

  void enter() const;  // the calling thread may use the device
  size_t free_memory() const;

  // Memory that host and device see at one address, zeroed; kept on the device when both have used it.
  void* alloc_managed(size_t bytes) const;
  DevicePtr alloc_device(size_t bytes) const;
  void free(DevicePtr p) const;
  void* alloc_pinned(size_t bytes) const;
  void free_pinned(void* p) const;
  void upload(DevicePtr to, const void* pinned, size_t bytes, Stream stream) const;

  Stream new_stream() const;
  void free_stream(Stream s) const;
  void synchronize(Stream s) const;
  Event new_event(bool timed) const;
  void free_event(Event e) const;
  void record(Event e, Stream s) const;
  bool done(Event e) const;  // throws when what came before it failed
  void synchronize(Event e) const;
  double seconds(Event begin, Event end) const;
  void wait_event(Stream s, Event e) const;  // what comes in s waits for what e was last recorded behind
  void wait_value(Stream s, DevicePtr p, uint64_t at_least) const;
  void write_value(Stream s, DevicePtr p, uint64_t value) const;

  // Compiles one kernel to machine code of this device; the text of the compiler comes with the error.
  std::vector<char> compile(const std::string& source, const std::string& name, const std::vector<std::string>& options) const;
  Function load(const std::vector<char>& image, const char* kernel) const;  // kept for good
  void allow_shared(Function f, int bytes) const;
  void launch(Function f, const unsigned (&grid)[3], const unsigned (&block)[3], unsigned shared_bytes, Stream s, void** params) const;

  // Graphs of launches; only where they were asked for (graphs_asked) are their functions looked up.
  GraphHandle new_graph() const;
  GraphNode add_launch(GraphHandle graph, const std::vector<GraphNode>& behind, Function f, const unsigned (&grid)[3], const unsigned (&block)[3],
                       unsigned shared_bytes, void** params) const;
  GraphExec instantiate(GraphHandle graph) const;
  // For launches of the graph that come; arguments are copied.
  void set_launch(GraphExec exec, GraphNode node, Function f, const unsigned (&grid)[3], const unsigned (&block)[3], unsigned shared_bytes,
                  void** params) const;
  void launch_graph(GraphExec exec, Stream s) const;
  void free_graph_exec(GraphExec exec) const;
  void free_graph(GraphHandle graph) const;

 private:
  Driver();
  Limits limits_;
};

}  // namespace ds4::cuda
