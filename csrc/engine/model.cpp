#include "engine/model.h"

#include "cpu/cpu.h"
#ifdef DS4_METAL
#include "metal_host/metal.h"
#endif

namespace ds4 {

std::unique_ptr<Backend> Model::make_backend() const {
#ifdef DS4_METAL
  if (isa == metal::kName) return metal::make_backend(shape, activations);
#endif
  return cpu::make_backend(isa, shape, activations, *pool);
}

}  // namespace ds4
