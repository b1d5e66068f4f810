#!/usr/bin/env bash
# Builds the extension under the thread sanitizer and runs what restores stored pages on several threads with it: long
# restores, and sessions of one process over one store, in threads. Takes minutes. Usage: tests/sanitize_restore.sh [BUILD FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
build=${1:-build/sanitize-thread}
launcher=$(command -v ccache || true)
cmake -S . -B "$build" -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" -DCMAKE_BUILD_TYPE=Release \
  -DDS4_CPU_ISAS=plain -DDS4_SANITIZE=thread ${launcher:+-DCMAKE_CXX_COMPILER_LAUNCHER="$launcher"} >/dev/null
cmake --build "$build" --target _ext -j "$(nproc)" >/dev/null
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
cp -r src/ds4v41 "$package/"
rm -f "$package"/ds4v41/_ext*.so
cp "$build"/_ext*.so "$package/ds4v41/"
# Not built with the sanitizer, so it does not see how their threads wait for each other.
printf '%s\n' 'called_from_lib:tokenizers.abi3.so' 'race:tokenizers.abi3.so' >"$package/suppressions"
status=0
# Python itself is not built with the sanitizer, so what it and numpy do is not seen; the extension is, and its threads are.
LD_PRELOAD="$(c++ -print-file-name=libtsan.so) $(c++ -print-file-name=libstdc++.so)" \
  TSAN_OPTIONS="halt_on_error=0:exitcode=66:suppressions=$package/suppressions:log_path=$package/report" PYTHONPATH="$package" \
  "$python" tests/restore_in_threads.py || status=$?
cat "$package"/report.* >&2 2>/dev/null || true
exit "$status"
