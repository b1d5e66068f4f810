#include "cpu/backend.h"

#include <sys/mman.h>

#include "base/error.h"
#include "cpu/memory.h"
#include "cpu/row_ops.h"

#define DS4_STRING2(x) #x
#define DS4_STRING(x) DS4_STRING2(x)

namespace ds4::cpu::DS4_ISA {

CpuBackend::CpuBackend(const Shape& shape, Activations activations, ThreadPool& pool, const MatrixClass& matrix)
    : s_(shape), round_(activations != Activations::fp32), quant_(activations == Activations::fp8), pool_(&pool), matrix_(matrix) {}

CpuBackend::~CpuBackend() {
  unmap(scratch_, scratch_floats_ * sizeof(float) * pool_->n_threads());
  unmap(temp_, temp_floats_ * sizeof(float));
}

const char* CpuBackend::name() const { return "cpu/" DS4_STRING(DS4_ISA); }

Backend* CpuBackend::sibling(const Shape& shape) const {
  return new CpuBackend(shape, quant_ ? Activations::fp8 : (round_ ? Activations::bf16 : Activations::fp32), *pool_, matrix_);
}

size_t CpuBackend::working_bytes() const {
  return sizeof(float) * (scratch_floats_ * static_cast<size_t>(pool_->n_threads()) + temp_floats_);
}

void* CpuBackend::alloc(size_t bytes) { return map_zeroed(bytes); }
void CpuBackend::free(void* p, size_t bytes) { unmap(p, bytes); }
void CpuBackend::commit(void* p, size_t bytes) { populate(p, bytes); }

void CpuBackend::throw_cancelled() { raise_cancelled(); }

void CpuBackend::need_scratch(size_t floats) {
  floats = (floats + 1023) & ~static_cast<size_t>(1023);
  if (floats <= scratch_floats_) return;
  unmap(scratch_, scratch_floats_ * sizeof(float) * pool_->n_threads());
  scratch_ = nullptr;
  scratch_floats_ = 0;
  scratch_ = static_cast<float*>(map_zeroed(floats * sizeof(float) * pool_->n_threads()));
  scratch_floats_ = floats;
}

float* CpuBackend::need_temp(size_t floats) {
  if (floats > temp_floats_) {
    unmap(temp_, temp_floats_ * sizeof(float));
    temp_ = nullptr;
    temp_floats_ = 0;
    temp_ = static_cast<float*>(map_zeroed(floats * sizeof(float)));
    temp_floats_ = floats;
  }
  return temp_;
}

}  // namespace ds4::cpu::DS4_ISA
