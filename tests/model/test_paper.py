"""The model on paper (benchmarks/paper.py): its bytes are those that the ledger counts, its sum is plain arithmetic."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import ds4v41
from ds4v41.bench.model import fill
from ds4v41.synth_gguf import slice_config, write_gguf

_FOLDER = Path(__file__).parents[2] / "benchmarks"
paper = SimpleNamespace(**runpy.run_path(str(_FOLDER / "paper.py")))
h200 = SimpleNamespace(**runpy.run_path(str(_FOLDER / "paper_h200.py")))


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


# ---- the fit to what a GPU did --------------------------------------------------------------------------------------


def test_bytes_of_the_fitted_products_are_those_of_the_step() -> None:
    """What the dispatches of one row read is what the paper step counts for the same operations."""
    one = {p.name: p.megabytes for p in h200.products() if p.rows == 1}
    costs = paper.step(slice_config("released", 40, h200.EXPERTS, 384_000_000), "q4", 8192)
    mb = {op: n_bytes / dispatches / 1e6 for op, (dispatches, n_bytes) in costs.items()}
    assert one["head"] == pytest.approx(mb["head"], rel=1e-6)
    assert one["query up"] == pytest.approx(mb["attn_query"])
    assert one["output"] + one["groups"] == pytest.approx(mb["attn_out"])
    assert one["query down"] + one["window row"] == pytest.approx(mb["attn_in"])
    assert one["shared gate and up"] + one["routed gate and up"] + one["down"] == pytest.approx(mb["moe"])
    assert one["Engram projection"] == pytest.approx(mb["engram"])


def test_the_fit_recovers_what_it_is_given() -> None:
    truth = h200.Fit(6.0, 4.0, 0.4, 0.3, 4270.0)
    items = [h200.Product(p.name, p.rows, p.weights, truth.us(p)) for p in h200.products()]
    fit = h200.fit_products(items)
    assert [getattr(fit, n) for n in fit.__slots__] == pytest.approx([getattr(truth, n) for n in truth.__slots__])


def test_the_fit_against_the_stored_results() -> None:
    """No fitted product is off by more than 29 %, and steps that were not fitted to by more than 10 %."""
    result = h200.report()
    assert result["relative_rms"] < 0.14
    assert all(0.75 < r["ratio"] < 1.29 for r in result["products"] if r["fitted"])
    steps = [s for s in result["steps"] if not s["used"]]
    assert len(steps) == 4 and all(0.9 < s["ratio"] < 1.0 for s in steps)
    assert all(0.98 < s["ratio"] < 1.02 for s in result["steps"] if s["used"])


def test_the_page_shows_the_fit() -> None:
    """docs/paper-model.md has the numbers that the script prints now."""
    text = (_FOLDER.parent / "docs" / "paper-model.md").read_text()
    result = h200.report()
    for r in result["products"]:
        assert f"| {r['measured_us']:,.1f} | {r['fit_us']:,.1f} | {r['ratio']:.2f} |" in text, r["name"]
    for s in result["steps"]:
        assert f"| {s['measured_ms']:.1f} | {s['predicted_ms']:.1f} | {s['ratio']:.2f} |" in text, s
    for value in (*result["predicted_384_experts_ms"].values(), *result["predicted_changes_ms"].values()):
        assert f"{value:.1f} ms" in text
    h200_row = next(m for m in paper.MACHINES if m.name == "H200")
    assert h200_row.dispatch_us == pytest.approx(result["fit"]["start"] - h200.EVENT_US, abs=0.05)
