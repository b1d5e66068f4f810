#include "engine/model.h"

#include "cpu/cpu.h"

namespace ds4 {

std::unique_ptr<Backend> Model::make_backend() const { return cpu::make_backend(isa, shape, activations, *pool); }

}  // namespace ds4
