// The kernels of metal/ in CUDA C++, embedded by the build (metal/generate_cuda.py).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ds4::cuda {

struct Param {
  enum Kind : uint8_t { value, buffer, threadgroup } kind;  // value: a struct that the launch carries
  uint8_t index;
};
struct Text {
  const char* family;
  std::string source;
};
struct Kernel {
  const char* name;
  int text;
  std::vector<Param> params;
};

const std::vector<Text>& texts();
const std::vector<Kernel>& kernels();

}  // namespace ds4::cuda
