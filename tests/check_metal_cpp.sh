#!/usr/bin/env bash
# Type-checks the Metal host code, and the test of the stand-in's classes, against Apple's own metal-cpp headers, without a Mac:
# what compiles here uses only names and signatures that Apple has. Needs clang. The headers are in Apple's archive, and in the
# mlx-metal wheel: pip download --no-deps --platform macosx_14_0_arm64 --only-binary=:all: mlx-metal
# Usage: tests/check_metal_cpp.sh FOLDER_WITH_Metal_AND_Foundation [CLANG]
set -euo pipefail
metal_cpp=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
clang=${2:-$(command -v clang++ || ls /usr/bin/clang++-* | tail -1)}
test -f "$metal_cpp/Metal/Metal.hpp" || { echo "no Metal/Metal.hpp in $metal_cpp" >&2; exit 2; }
# tests/standin/apple declares the few things of Apple's system headers that metal-cpp names.
for file in csrc/metal_host/*.cpp tests/cpp/metal_objects.cpp; do
  [ -f "$file" ] || continue
  "$clang" -std=c++20 -fblocks -fsyntax-only -w -include cmath -DDS4_METAL=1 -Itests/standin/apple -I"$metal_cpp" -Icsrc -Imetal "$file"
  echo "$file"
done
