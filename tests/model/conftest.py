"""Fixtures of the tests that run models."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from ds4v41.cli import main

from .cli_support import Out


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(*args: str, stdin: str = "") -> Out:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            code = main(args)
        except SystemExit as error:  # argparse
            assert isinstance(error.code, int)
            code = error.code
        seen = capsys.readouterr()
        return Out(code, seen.out, seen.err)

    return call
