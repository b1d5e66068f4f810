#!/usr/bin/env bash
# Writes the stubs of the built extension: stubs.sh OUTPUT_FOLDER [PYTHON]. To renew the committed ones: stubs.sh src/ds4v41
set -euo pipefail
"${2:-python3}" -m nanobind.stubgen -q -r -m ds4v41._ext -O "$1"
