#!/usr/bin/env bash
# Cross-compiles the core for aarch64 and compares NEON with plain bits under qemu. Needs g++-aarch64-linux-gnu and
# qemu-user-static. Heavy, so not part of .ci/run: run it when csrc/cpu or metal/numerics.h change.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cxx=${CXX_ARM:-aarch64-linux-gnu-g++}
flags=(-std=c++20 -O2 -ffp-contract=off -fno-math-errno -fno-trapping-math -fsigned-char -Icsrc -Imetal)
families=($(sed -n 's/^set(DS4_CPU_FAMILIES \(.*\))$/\1/p' CMakeLists.txt))
for isa in neon plain; do
  for f in "${families[@]}"; do
    "$cxx" "${flags[@]}" -DDS4_ISA=$isa "-DDS4_ISA_${isa^^}=1" -c "csrc/cpu/$f.cpp" -o "$out/$isa-$f.o"
  done
done
for f in csrc/base/*.cpp csrc/engine/*.cpp csrc/kv/*.cpp csrc/engram/*.cpp csrc/cpu/half_table.cpp csrc/cpu/memory.cpp; do
  "$cxx" "${flags[@]}" -c "$f" -o "$out/core-$(basename "$f").o"
done
"$cxx" "${flags[@]}" -DDS4_HAVE_NEON=1 -c csrc/cpu/dispatch.cpp -o "$out/dispatch.o"
"$cxx" "${flags[@]}" -static tests/cpp/isa_bits.cpp "$out"/*.o -o "$out/isa_bits" -pthread
qemu-aarch64-static "$out/isa_bits"
