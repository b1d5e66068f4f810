"""The stand-in and the tests of all kernels under sanitizers of addresses and undefined behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not os.environ.get("DS4_SANITIZERS"), reason="heavy: set DS4_SANITIZERS=1 when metal/ changes")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "sanitize_metal.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    environment.pop("DS4_SANITIZERS")
    done = subprocess.run(["bash", str(script), str(tmp_path)], capture_output=True, text=True, timeout=3600,
                          check=False, env=environment)  # fmt: skip
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("this compiler has no sanitizer libraries")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
