"""What the tests of the command line share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ds4v41

SOURCE = Path(ds4v41.__file__).parents[1]
RELEASED = Path(__file__).parents[1] / "golden" / "released"
COMMAND = [sys.executable, "-m", "ds4v41.cli"]
PROMPT = "def add(a, b):"
QUESTION = "Write a function that adds two numbers."
ADDS = "```python\ndef add_numbers(a, b):\n    return a + b\n```"
GREEDY = ["--temperature", "0"]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def run(*args: str, stdin: str | bytes = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    return subprocess.run([*COMMAND, *args], input=data, capture_output=True, timeout=120, env=environment(), **more)


class Out:
    """What a command printed in this process."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
