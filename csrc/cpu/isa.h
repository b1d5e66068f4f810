// Every file of cpu/ except dispatch.cpp, half_table.cpp and memory.cpp is compiled once per instruction set, inside its
// own namespace (pairs.cpp for one instruction set alone).
// The build defines DS4_ISA (avx512, avx2, neon, plain) and the DS4_ISA_* flag that goes with it.
//
// Rule for these files: no std containers, streams or strings. Their inline functions would be emitted with this
// file's instruction set and the linker might keep that copy for everybody, which crashes on an older machine.
#pragma once

#ifndef DS4_ISA
#error "csrc/cpu files need DS4_ISA (see CMakeLists.txt)"
#endif

#define DS4_CPU_NAMESPACE_BEGIN \
  namespace ds4::cpu::DS4_ISA { \
  namespace {
#define DS4_CPU_NAMESPACE_END \
  }                           \
  }
