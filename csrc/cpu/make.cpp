// The factory of this instruction set; dispatch.cpp declares it by name.
#include "cpu/backend.h"

namespace ds4::cpu::DS4_ISA {

Backend* make(const Shape& shape, Activations activations, ThreadPool& pool);
Backend* make(const Shape& shape, Activations activations, ThreadPool& pool) {
  return new CpuBackend(shape, activations, pool);
}

}  // namespace ds4::cpu::DS4_ISA
