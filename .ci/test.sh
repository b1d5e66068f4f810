#!/usr/bin/env bash
# Sets up everything in .venv-test (a fresh environment), builds and installs the wheel, runs all tests.
# The wheel has the stand-in for Metal, so that kernels and their host code are tested on any machine.
# Needs Python 3.11+, a C++20 compiler and git; CMake and ninja come from pip.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
venv=.venv-test
rm -rf "$venv"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
rm -rf dist/test
"$venv/bin/python" -m pip wheel --quiet --no-deps -C cmake.define.DS4_STANDIN=ON --wheel-dir dist/test .
"$venv/bin/python" -m pip install --quiet "$(ls dist/test/ds4v41-*.whl)[dev]"
exec "$venv/bin/python" -m pytest "$@"
