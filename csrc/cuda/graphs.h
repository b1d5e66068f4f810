// A command buffer's launches as one CUDA graph, used again for every command buffer of the same form (DS4_CUDA_GRAPHS=1).
//
// The form is which functions run on which levels. A step of the same kind has it again and again; only arguments change, and
// those that did are set anew in the graph that there is. Launching it costs the host one call.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "cuda/driver.h"

namespace ds4::cuda {

// One launch: its arguments lie in `words`, each from a multiple of 16 bytes on. It points into itself, so it stays where it is.
struct Launch {
  Launch() {}  // NOLINT: its own, or every launch would clear all its words first
  unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, shared_bytes = 0;
  alignas(16) uint64_t words[1024];  // a struct of at most 4 KiB, and pointers
  uint32_t n_words = 0;
  void* params[40];
  int n_params = 0;
  Function function = nullptr;
  bool add(const void* bytes, size_t n);  // false: too many
};

// Asked for by the environment, when the process first makes a queue.
bool graphs_asked();

// Launches in the order in which they were made: levels[i] of them beside each other, behind all of the level before.
struct Recorded {
  std::list<Launch> launches;
  std::vector<size_t> levels;
  bool empty() const { return launches.empty(); }
  void clear() {
    launches.clear();
    levels.clear();
  }
};

// What all queues of the process did.
struct GraphCounts {
  int64_t made = 0, launched = 0;
  int64_t nodes = 0, updated = 0;  // launches in graphs that were launched, and those whose arguments were set anew
};
GraphCounts graph_counts();

// The graphs of one queue, used by one thread at a time.
class Graphs {
 public:
  Graphs() = default;
  ~Graphs();
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;
  void launch(const Recorded& recorded, Stream stream);

 private:
  static constexpr size_t kMost = 32;  // forms that are kept: steps and verifications at a few depths
  struct Node {
    GraphNode node = nullptr;
    unsigned shape[7] = {};  // grid, block, threadgroup memory
    std::vector<uint64_t> words;
  };
  struct Graph {
    std::vector<Function> functions;
    std::vector<size_t> levels;
    std::vector<Node> nodes;
    GraphHandle graph = nullptr;
    GraphExec exec = nullptr;
    Graph() = default;
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
  };
  Graph* find(const Recorded& recorded);
  static std::unique_ptr<Graph> make(const Recorded& recorded);
  static void update(Graph& graph, const Recorded& recorded);

  std::list<std::unique_ptr<Graph>> graphs_;  // the one used last first
};

}  // namespace ds4::cuda
