// The kernels that were compiled in.
#pragma once

#include <string>
#include <vector>

#include "metal_standin/kernel/abi.h"

namespace ds4::standin {

struct Entry {
  const Family* family;         // fast build
  const Kernel* kernel;
  const Family* checked_family;
  const Kernel* checked;        // null when the instrumented build was left out
};

// A family of the .metal folder with its text as Metal would compile it.
struct Compiled {
  const Family* fast;
  const Family* checked;
  const char* source;
};
const std::vector<Compiled>& compiled();  // generated
// Was the instrumented build of the kernels made? Not together with a sanitizer.
bool has_checked();

const Entry* find_kernel(const std::string& name);
std::vector<Entry> all_kernels();

}  // namespace ds4::standin
