"""The reading threads under the address and thread sanitizers (tests/sanitize_engram.sh)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.skipif(not os.environ.get("DS4_SANITIZERS"), reason="heavy: set DS4_SANITIZERS=1 when csrc/engram changes")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler with sanitizers")
def test_sanitizers_find_nothing() -> None:
    script = Path(__file__).parents[1] / "sanitize_engram.sh"
    done = subprocess.run(["bash", str(script), "g++"], capture_output=True, text=True, timeout=600, check=False)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("this compiler has no sanitizer libraries")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["address,undefined:", "ok", "thread:", "ok"]
