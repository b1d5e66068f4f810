#!/usr/bin/env bash
# Builds tests/cpp/engram_pool.cpp with the address and undefined-behaviour sanitizers, then with the thread sanitizer,
# and runs both. Usage: tests/sanitize_engram.sh [C++ COMPILER]
set -euo pipefail
cd "$(dirname "$0")/.."
cxx=${1:-${CXX:-c++}}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for sanitizer in address,undefined thread; do
  "$cxx" -std=c++20 -O1 -g -fno-omit-frame-pointer -fsanitize=$sanitizer -fno-sanitize-recover=all -Wall -Wextra \
    -Icsrc -Imetal tests/cpp/engram_pool.cpp csrc/engram/*.cpp csrc/base/threads.cpp -o "$out/pool" -pthread
  echo "$sanitizer:"
  # The thread sanitizer does not follow the fork of a program that has threads.
  "$out/pool" $([ $sanitizer = thread ] && echo no-fork || true)
done
