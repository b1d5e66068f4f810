"""The ledger and the benchmarks on a device: here the stand-in, whose times are a processor's and stand for nothing."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4v41 import Drafter, Model, _ext, bench
from ds4v41.bench import device
from ds4v41.cli import main
from ds4v41.errors import BackendError, OptionError
from ds4v41.ledger import HOST_ONLY, Ledger

from .both import STANDIN, needs_standin

pytestmark = needs_standin
PLACE = "metal" if STANDIN is not None else "cuda"
SIZES: dict[str, Any] = {"layers": 7, "experts": 5, "engram_rows": 2000}


def check(ledger: Ledger) -> None:
    """Everything is there, the device worked within the time that the host waited, and on every operation."""
    assert ledger.complete and ledger.on_device and ledger.device_seconds is not None
    for row in ledger.rows:
        if row.op in HOST_ONLY:
            assert row.kernels == 0 and row.device_seconds is None
        else:
            assert row.device_seconds is not None and (row.kernels == 0 or 0 < row.device_seconds <= row.seconds), row
    assert 0 < ledger.device_seconds <= ledger.seconds and ledger.covered <= 1.0


def test_a_step_of_the_nano_model_to_the_last_dispatch() -> None:
    with Model.open(backend=PLACE) as model, model.session(64) as plain, model.session(64) as session:
        for s in (plain, session):
            s.prefill([5, 6, 7], logits=None)
        session.start_ledger()
        before = _ext.metal_counters()["dispatches"]
        row = session.step([8])
        issued = _ext.metal_counters()["dispatches"] - before
        np.testing.assert_array_equal(row.view(np.uint32), plain.step([8]).view(np.uint32))
        ledger = session.ledger()
        check(ledger)
        assert ledger.kernels == issued and ledger.runs == 1
        session.step([9])
        session.start_ledger()  # anew; the position has the same parity again
        session.step([10])
        again = session.ledger()
    assert again.complete and again.runs == 1 and again.kernels == issued
    with Model.open() as cpu, cpu.session(64) as session:
        session.prefill([5, 6, 7], logits=None)
        session.start_ledger()
        session.step([8])
        other = session.ledger()
    assert not other.on_device and other.kernels == 0 and other.device_seconds is None
    counted = {(r.op, r.layer): (r.dispatches, r.bytes) for r in other.rows if r.op not in HOST_ONLY}
    assert counted == {(r.op, r.layer): (r.dispatches, r.bytes) for r in ledger.rows if r.op not in HOST_ONLY}


def test_what_the_drafter_issues_is_told_apart() -> None:
    """Both ledgers are complete though they share a stream; captures of the target belong to no operation."""
    with Model.open(backend=PLACE) as model, model.session(128, drafter=Drafter.open(None, model)) as session:
        session.start_ledger()
        session.generate([5, 6, 7], max_tokens=4, temperature=0.0, drafting=3).finish()
        check(session.ledger())
        drafts = session.draft_ledger()
    assert drafts.complete and drafts.on_device and drafts.runs > 0 and drafts.kernels > 0


def test_the_table_and_the_json() -> None:
    with Model.synthetic("tiny", **SIZES, backend=PLACE) as model:
        result = bench.decode(model, context=100, steps=2)
    ledger = result["ledger"]
    check(ledger)
    head, *_, total = str(ledger).split("\n")
    assert head.split()[:3] == ["op", "calls", "kernels"] and "device ms/run" in head and "roof" in head
    assert total.split()[0] == "all" and total.split()[5] == "100.0"
    data = ledger.to_json()
    assert data["clock"] == "device" and data["kernels"] == sum(r["kernels"] for r in data["rows"])
    assert data["gb_s"] == pytest.approx(ledger.bytes / ledger.device_seconds / 1e9)
    assert data["share"] == pytest.approx(data["gb_s"] / result["roof_gb_s"])
    json.dumps(data)


def test_bench_on_a_device() -> None:
    with Model.synthetic("tiny", **SIZES, backend=PLACE) as model:
        first, second = bench.depth(model, contexts=(20, 200), steps=2)["results"]
        assert first["rate"] == 1.0 and second["context"] == 200 and "attend" in second["ms_by_op"]
        assert first["per_step"]["waits"] == 1 and first["per_step"]["dispatches"] > first["per_step"]["levels"] > 0
        (prompt,) = bench.prefill(model, tokens=(20,), behind=(40,))["results"]
        assert prompt["tok_s"] > 0 and prompt["seconds_by_op"]["moe"] > 0 and prompt["behind"] == 40
        with pytest.raises(OptionError, match="open model"):
            bench.decode(model, threads=2)
        with pytest.raises(OptionError, match="open model"):
            bench.prefill(model, matrix=True)
    result = bench.decode(None, context=20, steps=1, backend=PLACE)
    assert result["isa"] == PLACE and result["clock"] == "device" and ("note" in result) == (STANDIN is not None)


def test_sides_on_a_device_are_compared_by_wall_time() -> None:
    result = bench.compare(None, {"backend": "cpu"}, {"backend": PLACE}, pairs=2)
    assert result["clock"] == "wall" and result["outputs_equal"] and result["ratio"] == result["wall_ratio"]
    assert bench.compare(None, {}, {"threads": 1}, pairs=2)["clock"] == "cpu"


def test_roof_and_ops() -> None:
    found = bench.roof(backend=PLACE, gib=0.01)
    assert found["roof_gb_s"] >= found["roof_wall_gb_s"] > 0 and 0 < found["dispatch_us"] <= found["dispatch_wall_us"]
    (row,) = bench.ops(backend=PLACE, types=("f32",), rows=(1,))["results"]
    assert row["share"] > 0 and row["shape"] == [384, 5120]
    for wrong in ({"threads": 2}, {"huge_pages": False}, {"gib": 0}):
        for call in (bench.roof, bench.ops):
            with pytest.raises(OptionError, match=next(iter(wrong))):
                call(backend=PLACE, **wrong)
    with pytest.raises(OptionError, match="matrix"):
        bench.ops(backend=PLACE, matrix=True)
    with pytest.raises(OptionError, match="backend"):
        bench.roof(backend="gpu")
    with pytest.raises(BackendError, match="is not here"):
        device.Roof("cuda" if PLACE == "metal" else "metal")


def test_the_benchmark_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/device_steps.py, as it will run on a GPU, on a small model made on the device."""
    script = Path(__file__).parents[2] / "benchmarks" / "device_steps.py"
    out = tmp_path / "r.json"
    words = "--shape tiny --layers 7 --experts 5 --contexts 100 --rows 2 --steps 2 --prefill 20 --backend"
    monkeypatch.setattr("sys.argv", [str(script), *words.split(), PLACE, "--json", str(out)])
    runpy.run_path(str(script), run_name="__main__")
    found = json.loads(out.read_text())
    (step,) = found["steps"]
    assert step["rows_ms"]["2"] > 0 and step["waits"] == 1 and step["ledger_clock"] == "device"
    assert step["ledger_ms"]["moe"] > 0 and found["roof"]["roof_gb_s"] > 0 and found["prefill"][0]["tokens"] == 20
    assert found["model"].startswith("synthetic tiny, 7 layers")


def test_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["bench", "roof", "--backend", PLACE, "--gib", "0.01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clock"] == "device"
    assert main(["bench", "decode", "--backend", PLACE, "--context", "20", "--steps", "1", "--ledger"]) == 0
    assert "device ms/run" in capsys.readouterr().out
    small = ["--synthetic", "q4", "--layers", "6", "--experts", "6"]
    assert main(["bench", "decode", *small, "--layers", "3"]) == 2 and "layers" in capsys.readouterr().err
    assert main(["bench", "depth", "--layers", "6"]) == 2 and "--synthetic" in capsys.readouterr().err
    assert main(["bench", "prefill", *small, "--model", "x.gguf"]) == 2 and "one of them" in capsys.readouterr().err
    def made(**options: Any) -> Model:
        raise AssertionError("no model is made before the options are known to be right")

    monkeypatch.setattr(Model, "synthetic", made)
    for wrong in (["decode", "--steps", "0"], ["decode", "--context", "nan"], ["decode", "--context", "8,16"],
                  ["depth", "--steps", "-1"], ["depth", "--context=-4"], ["prefill", "--behind", "x"],
                  ["prefill", "--matrix"]):  # fmt: skip
        assert main(["bench", *wrong, "--backend", PLACE, *small]) == 2
        assert capsys.readouterr().err.count("expected") + (wrong[-1] == "--matrix") + (wrong[-1] == "8,16") >= 1
    other = "cuda" if PLACE == "metal" else "metal"
    for words in (["roof"], ["ops"], ["decode"], ["depth"], ["prefill"]):
        assert main(["bench", *words, "--backend", other]) != 0
        assert "is not here" in capsys.readouterr().err
    assert main(["bench", "select", "--backend", PLACE]) == 2
