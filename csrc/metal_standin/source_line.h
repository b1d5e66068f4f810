// Where a machine instruction comes from.
#pragma once

#include <string>

namespace ds4::standin {

// "at metal/linear.metal:40" of a return address, or nothing: it takes line tables in the binary and addr2line.
std::string source_line(const void* code);
bool in_this_module(const void* address);

}  // namespace ds4::standin
