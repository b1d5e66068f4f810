// Looks into a run: every named intermediate passes by, and a layer's input may be replaced (golden tests, `verify --trace`).
#pragma once

#include <cstdint>
#include <initializer_list>

namespace ds4 {

class Trace {
 public:
  virtual ~Trace() = default;
  // layer -1: outside the layers.
  virtual void tap(int layer, const char* name, const float* data, std::initializer_list<int64_t> shape) = 0;
  virtual void tap(int layer, const char* name, const int32_t* data, std::initializer_list<int64_t> shape) = 0;
  virtual bool wants(const char* name) = 0;
  // May overwrite the stream [n][C][D] and mix [n][C] that enter a layer (before its Engram).
  virtual void enter(int layer, float* stream, float* mix, int64_t n) = 0;
  // May overwrite the stream after the layer's Engram.
  virtual void after_engram(int layer, float* stream, int64_t n) = 0;
};

}  // namespace ds4
