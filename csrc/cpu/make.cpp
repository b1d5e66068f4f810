// The factory of this instruction set; dispatch.cpp declares it by name.
#include "cpu/backend.h"

namespace ds4::cpu::DS4_ISA {

Backend* make(const Shape& shape, Activations activations, ThreadPool& pool, const MatrixClass& matrix);
Backend* make(const Shape& shape, Activations activations, ThreadPool& pool, const MatrixClass& matrix) {
  return new CpuBackend(shape, activations, pool, matrix);
}

}  // namespace ds4::cpu::DS4_ISA
