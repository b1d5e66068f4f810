"""The model on paper (benchmarks/paper.py): its bytes are those that the ledger counts, its sum is plain arithmetic."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import ds4v41
from ds4v41.bench.model import fill
from ds4v41.synth_gguf import slice_config, write_gguf

paper = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "paper.py")))


@pytest.mark.parametrize("recipe", ["q4", "mxfp4"])
def test_bytes_and_dispatches_are_those_of_the_ledger(tmp_path: Path, recipe: str) -> None:
    """A step of one token on a slice with every kind of layer, operation by operation, to the byte."""
    path = write_gguf(tmp_path / "a.gguf", "tiny", layers=12, experts=5, recipe=recipe, engram_rows=2000).path
    config = slice_config("tiny", 12, 5, 2000)
    for context in (6, 400):
        with ds4v41.Model.open(path) as model, model.session(512, retain=64, chunk=8) as session:
            fill(session, context)
            session.start_ledger()
            session.step([5])
            ledger = session.ledger()
        seen = {r.op: (r.dispatches, r.bytes) for r in ledger.by_op() if r.op not in ("engram_wait", "engram_io")}
        costs = paper.step(config, recipe, context)
        assert {op: (n, round(n_bytes)) for op, (n, n_bytes) in costs.items()} == seen
        assert paper.bytes_of(costs) == pytest.approx(ledger.bytes)


def test_seconds_are_bytes_over_rate_and_dispatches() -> None:
    machine = paper.Machine("m", 100.0, 2.0, "")
    assert paper.seconds({"a": (3, 5e9), "b": (7, 15e9)}, machine) == pytest.approx(0.2 + 20e-6)


def test_experts_of_several_rows() -> None:
    config = paper.released()
    assert paper.experts_of(config, 1) == pytest.approx(6)
    assert 30 < paper.experts_of(config, 6) < 36
    assert paper.experts_of(config, 10_000) == pytest.approx(384)


def test_the_released_step_is_what_others_count() -> None:
    """Within 4 % of the bytes that the fork publishes, and no published rate is beyond the bound."""
    config = paper.released()
    for rows, published in paper.PUBLISHED_BYTES.items():
        assert paper.bytes_of(paper.step(config, "q4", 8192, rows)) == pytest.approx(published, rel=0.04)
    checks = paper.report("q4", 8192, 1)["published"]
    assert all(0.5 < check["share"] < 1 for check in checks)
