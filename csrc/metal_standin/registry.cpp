#include "metal_standin/registry.h"

#include <map>

namespace ds4::standin {

namespace {

const std::map<std::string, Entry>& table() {
  static const std::map<std::string, Entry> kernels = [] {
    std::map<std::string, Entry> found;
    for (const Compiled& c : compiled())
      for (int i = 0; i < c.fast->n_kernels; ++i)
        found[c.fast->kernels[i].name] = {c.fast, &c.fast->kernels[i], c.checked,
                                          c.checked != nullptr ? &c.checked->kernels[i] : nullptr};
    return found;
  }();
  return kernels;
}

}  // namespace

const Entry* find_kernel(const std::string& name) {
  const auto it = table().find(name);
  return it == table().end() ? nullptr : &it->second;
}

bool has_checked() {
  for (const Compiled& c : compiled())
    if (c.checked == nullptr) return false;
  return true;
}

std::vector<Entry> all_kernels() {
  std::vector<Entry> entries;
  for (const auto& item : table()) entries.push_back(item.second);
  return entries;
}

}  // namespace ds4::standin
