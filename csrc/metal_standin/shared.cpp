// What the classes of Metal do alike wherever they run: on the CPU, and on an NVIDIA GPU (csrc/cuda).
#include <Metal/Metal.hpp>
#include <cstring>

namespace MTL {

void ResidencySet::addAllocation(const Allocation* allocation) {
  auto* a = const_cast<Allocation*>(allocation);
  a->add_reference();
  pending_.push_back(a);
}
void ResidencySet::removeAllocation(const Allocation* allocation) {
  for (auto* list : {&pending_, &committed_})
    for (size_t i = 0; i < list->size(); ++i)
      if ((*list)[i] == allocation) {
        (*list)[i]->drop_reference();
        list->erase(list->begin() + static_cast<long>(i--));
      }
}
bool ResidencySet::containsAllocation(const Allocation* allocation) {
  for (const Allocation* a : committed_)
    if (a == allocation) return true;
  return false;
}
void ResidencySet::commit() {
  committed_.insert(committed_.end(), pending_.begin(), pending_.end());
  pending_.clear();
}
uint64_t ResidencySet::allocatedSize() const {
  uint64_t bytes = 0;
  for (const Allocation* a : committed_) bytes += a->allocatedSize();
  return bytes;
}
ResidencySet::~ResidencySet() {
  for (auto* list : {&pending_, &committed_})
    for (Allocation* a : *list) a->drop_reference();
}

void FunctionConstantValues::setConstantValue(const void* value, DataType type, NS::UInteger index) {
  uint32_t bits = 0;
  std::memcpy(&bits, value, type == DataTypeBool ? 1 : 4);
  values_.push_back({index, type, bits});
}

}  // namespace MTL
