"""The day at a real device, rehearsed on the stand-in: every check and measurement runs, and a wrong bit is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4v41 import BackendError, OptionError, _ext, device_check
from ds4v41.cli import main
from ds4v41.manifest import read_manifest

pytestmark = pytest.mark.skipif(not hasattr(_ext, "standin"), reason="this build has no stand-in for Metal")


@pytest.fixture(scope="module")
def slice_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("day") / "slice.gguf"
    assert main(["synth", str(path), "--shape", "tiny"]) == 0
    return path


def test_a_whole_day(slice_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """With short texts: every operation of a trace waits, which takes the stand-in minutes at full length."""

    def short(path: Path) -> Any:
        manifest = read_manifest(path)
        manifest.fixtures[:] = [f for f in manifest.fixtures if f.name == "bf16"]
        return manifest

    verify = device_check.Verifier.verify
    monkeypatch.setattr(device_check.Verifier, "verify", lambda self, m, f, trace: verify(self, m, f, trace=False))
    for name, value in (("_PREFILLED", 9), ("_STEPPED", 2), ("_DRAWN", 12)):
        monkeypatch.setattr(device_check, name, value)
    monkeypatch.setattr(device_check, "read_manifest", short)
    monkeypatch.setattr(device_check, "_MODES", ("bf16",))
    monkeypatch.setattr(device_check, "_prompt", lambda model, n, real=device_check._prompt: real(model, n // 16))
    report = tmp_path / "report.json"
    assert main(["verify", "--mac-day", str(report), "--model", str(slice_path), "--contexts", "64,200"]) == 0
    out = capsys.readouterr().out
    assert "DIFFERS" not in out and "steps beside the CPU" in out
    found = json.loads(report.read_text())
    assert found["ok"] and found["same_logits_on_model"] and found["isa"] == "metal"
    assert [row["context"] for row in found["depth"]] == [64, 200]
    assert all(
        row["tok_s"] > 0 and row["per_step"]["waits"] == 1 and "moe" in row["ledger_ms"] for row in found["depth"]
    )
    assert len(found["prefill"]) == 2 and found["interval"][0] <= found["cpu_over_device"] <= found["interval"][1]


def test_wrong_bits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        config = type("C", (), {"vocab_size": 100})

        def __init__(self, shift: float) -> None:
            self.shift = np.float32(shift)

        def session(self, context: int) -> Wrong:
            return self

        def __enter__(self) -> Wrong:
            return self

        def __exit__(self, *exc: object) -> None: ...

        def prefill(self, ids: Any, logits: str) -> Any:
            rows = np.ones((len(ids), 4), np.float32)
            rows[7] += self.shift
            return rows

        def step(self, ids: Any) -> Any:
            return np.ones((1, 4), np.float32)

    told: Any = device_check._different_rows
    assert told(Wrong(0), Wrong(1e-6)) == "1 of 220 rows, the first at position 7"
    assert told(Wrong(0), Wrong(0)) == ""


def test_no_device_no_day(tmp_path: Path) -> None:
    with pytest.raises(BackendError):
        device_check.run(tmp_path / "r.json", backend="cuda")
    assert not (tmp_path / "r.json").exists()


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "x.gguf"]) == 2
    assert main(["verify", "--mac-day", "r.json", "--trace"]) == 2
    assert main(["verify", "--mac-day", "r.json", "--contexts", "many"]) == 2


def test_what_cannot_work_is_refused_at_once(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    for wrong in ({"contexts": (64, -5)}, {"model": tmp_path / "none.gguf"}, {"report": tmp_path / "no" / "r.json"}):
        with pytest.raises(OptionError):
            device_check.run(**({"report": report} | wrong))
    assert not report.exists()
