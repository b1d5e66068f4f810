#include "cuda/graphs.h"

#include <cstdlib>
#include <cstring>
#include <mutex>

namespace ds4::cuda {

namespace {

std::mutex g_mutex;
GraphCounts g_counts;

void shape_of(const Launch& l, unsigned (&shape)[7]) {
  for (int i = 0; i < 3; ++i) shape[i] = l.grid[i], shape[3 + i] = l.block[i];
  shape[6] = l.shared_bytes;
}

}  // namespace

bool graphs_asked() {
  static const char* const asked = std::getenv("DS4_CUDA_GRAPHS");
  return asked != nullptr && std::strcmp(asked, "1") == 0;
}

GraphCounts graph_counts() {
  const std::lock_guard<std::mutex> lock(g_mutex);
  return g_counts;
}

bool Launch::add(const void* bytes, size_t n) {
  n_words = (n_words + 1) / 2 * 2;  // argument structs may hold vectors of 16 bytes
  const uint32_t end = n_words + static_cast<uint32_t>((n + 7) / 8);
  if (end > sizeof words / sizeof words[0] || n_params == 40) return false;
  std::memset(words + n_words, 0, (end - n_words) * sizeof words[0]);  // so that equal arguments are equal words
  std::memcpy(words + n_words, bytes, n);
  params[n_params++] = words + n_words;
  n_words = end;
  return true;
}

Graphs::Graph::~Graph() {
  const Driver& driver = Driver::get();
  if (exec != nullptr) driver.free_graph_exec(exec);  // one that runs still goes when it is done
  if (graph != nullptr) driver.free_graph(graph);
}

Graphs::~Graphs() = default;

Graphs::Graph* Graphs::find(const Recorded& recorded) {
  for (auto g = graphs_.begin(); g != graphs_.end(); ++g) {
    const Graph& graph = **g;
    if (graph.levels != recorded.levels || graph.functions.size() != recorded.launches.size()) continue;
    size_t i = 0;
    bool same = true;
    for (const Launch& l : recorded.launches) same = same && graph.functions[i++] == l.function;
    if (!same) continue;
    graphs_.splice(graphs_.begin(), graphs_, g);
    return graphs_.front().get();
  }
  return nullptr;
}

std::unique_ptr<Graphs::Graph> Graphs::make(const Recorded& recorded) {
  const Driver& driver = Driver::get();
  auto graph = std::make_unique<Graph>();
  graph->levels = recorded.levels;
  graph->graph = driver.new_graph();
  std::vector<GraphNode> before, now;
  auto l = recorded.launches.begin();
  for (const size_t n : recorded.levels) {
    now.clear();
    for (size_t i = 0; i < n; ++i, ++l) {
      Node node;
      node.node = driver.add_launch(graph->graph, before, l->function, l->grid, l->block, l->shared_bytes, const_cast<void**>(l->params));
      shape_of(*l, node.shape);
      node.words.assign(l->words, l->words + l->n_words);
      now.push_back(node.node);
      graph->nodes.push_back(std::move(node));
      graph->functions.push_back(l->function);
    }
    before = now;
  }
  graph->exec = driver.instantiate(graph->graph);
  return graph;
}

// What was launched before keeps the arguments that it had then.
void Graphs::update(Graph& graph, const Recorded& recorded) {
  const Driver& driver = Driver::get();
  int64_t updated = 0;
  size_t i = 0;
  for (const Launch& l : recorded.launches) {
    Node& node = graph.nodes[i++];
    unsigned shape[7];
    shape_of(l, shape);
    if (std::memcmp(shape, node.shape, sizeof shape) == 0 && node.words.size() == l.n_words &&
        std::memcmp(node.words.data(), l.words, l.n_words * sizeof l.words[0]) == 0)
      continue;
    driver.set_launch(graph.exec, node.node, l.function, l.grid, l.block, l.shared_bytes, const_cast<void**>(l.params));
    std::memcpy(node.shape, shape, sizeof shape);
    node.words.assign(l.words, l.words + l.n_words);
    ++updated;
  }
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_counts.updated += updated;
}

void Graphs::launch(const Recorded& recorded, Stream stream) {
  Graph* graph = find(recorded);
  if (graph != nullptr) {
    update(*graph, recorded);
  } else {
    graphs_.push_front(make(recorded));
    graph = graphs_.front().get();
    if (graphs_.size() > kMost) graphs_.pop_back();
    const std::lock_guard<std::mutex> lock(g_mutex);
    ++g_counts.made;
  }
  Driver::get().launch_graph(graph->exec, stream);
  const std::lock_guard<std::mutex> lock(g_mutex);
  ++g_counts.launched;
  g_counts.nodes += static_cast<int64_t>(recorded.launches.size());
}

}  // namespace ds4::cuda
