#!/usr/bin/env bash
# Builds the extension with the stand-in for Metal under the address and undefined-behaviour sanitizers and runs the tests of
# kernels with it. What only they see: an overrun of an array on a kernel's stack, shifts and casts without a meaning, and
# faults of the stand-in and of the host code. Takes minutes. Usage: tests/sanitize_metal.sh [BUILD FOLDER [PYTEST ARGUMENTS...]]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
build=${1:-build/sanitize}
shift || true
launcher=$(command -v ccache || true)
cmake -S . -B "$build" -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" -DCMAKE_BUILD_TYPE=Release \
  -DDS4_STANDIN=ON -DDS4_CPU_ISAS=plain -DDS4_SANITIZE=address,undefined -DCMAKE_CXX_FLAGS=-fno-sanitize-recover=all ${launcher:+-DCMAKE_CXX_COMPILER_LAUNCHER="$launcher"} >/dev/null
cmake --build "$build" --target _ext -j "$(nproc)" >/dev/null
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
cp -r src/ds4v41 "$package/"
rm -f "$package"/ds4v41/_ext*.so
cp "$build"/_ext*.so "$package/ds4v41/"
[ $# -gt 0 ] || set -- tests/standin tests/ops -k "standin or metal"  # what needs checked kernels is skipped: a sanitized build has none
# libstdc++ too: python itself has none, and the sanitizer has to find the function that throws. Its report goes to a file, since
# pytest holds back what is written when the process ends.
status=0
LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so)" ASAN_OPTIONS="detect_leaks=0:log_path=$package/report" \
  UBSAN_OPTIONS="print_stacktrace=1:log_path=$package/report" DS4_STANDIN_THREADS=2 PYTHONPATH="$package" \
  "$python" -m pytest -q -p no:cacheprovider "$@" || status=$?
cat "$package"/report.* >&2 2>/dev/null || true
exit "$status"
