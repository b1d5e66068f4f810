// What is shared by all sessions of one model: sizes, weights, Engram, worker threads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/threads.h"
#include "engine/backend.h"
#include "engram/engram.h"
#include "engram/hash.h"

namespace ds4 {

struct Model {
  Shape shape;
  Weights weights;
  Activations activations = Activations::bf16;
  EngramHash hash;
  std::shared_ptr<Engram> engram;  // null: the model has none
  std::vector<std::vector<float>> vectors;  // owns the expanded norms, biases, sinks
  std::string isa = "auto";  // of the CPU, or "metal"
  std::shared_ptr<void> adopted;  // by a device that knows the weights in its own terms
  std::unique_ptr<ThreadPool, ThreadPool::Deleter> pool;
  std::vector<float> frequencies, yarn_frequencies;

  std::unique_ptr<Backend> make_backend() const;
};

}  // namespace ds4
