"""The ledger: it counts everything, changes nothing, and shows no timings when something is missing. And `bench`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ds4v41
from ds4v41 import bench
from ds4v41.bench.ab import parse_side
from ds4v41.bench.model import fill
from ds4v41.cli import main
from ds4v41.errors import OptionError, StateError
from ds4v41.ledger import Ledger
from ds4v41.synth_gguf import write_gguf

TOKENS = list(range(20, 60))


@pytest.fixture(scope="module")
def slice_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in the GGUF dialect."""
    return write_gguf(tmp_path_factory.mktemp("slice") / "tiny.gguf", "tiny", engram_rows=2000).path


def test_same_bits_with_the_ledger() -> None:
    sizes = {"context": 128, "chunk": 64}
    with ds4v41.Model.open() as model, model.session(**sizes) as plain, model.session(**sizes) as counted:
        counted.start_ledger()
        np.testing.assert_array_equal(plain.prefill(TOKENS, logits="all"), counted.prefill(TOKENS, logits="all"))
        np.testing.assert_array_equal(plain.step([7, 8]), counted.step([7, 8]))
        ledger = counted.ledger()
    assert ledger.complete and ledger.runs == 2 and ledger.tokens == len(TOKENS) + 2
    assert 0.3 < ledger.covered <= 1.0


def test_a_step_counts_every_matrix_that_it_reads(slice_path: Path) -> None:
    with ds4v41.Model.open(slice_path) as model, model.session(128) as session:
        session.prefill(TOKENS, logits=None)
        session.start_ledger()
        session.step([5])
        ledger = session.ledger()
        config = model.config
        tensors = {name: t.nbytes for name, t in model.checkpoint.tensors.items()}
    by_op = {row.op: row.bytes for row in ledger.by_op()}
    attention = sum(n for name, n in tensors.items() if ".attn.wo_" in name)
    experts = sum(n for name, n in tensors.items() if ".ffn.experts." in name)
    shared = sum(n for name, n in tensors.items() if ".shared_experts." in name)
    assert by_op["attn_out"] == attention
    assert by_op["head"] == tensors["head.weight"]
    assert by_op["moe"] == shared + experts * config.num_experts_per_tok // config.n_routed_experts
    assert ledger.experts_touched == config.num_experts_per_tok * config.num_hidden_layers


def test_an_incomplete_ledger_shows_no_timings() -> None:
    with ds4v41.Model.open() as model, model.session(64) as session:
        with pytest.raises(StateError, match="start_ledger"):
            session.ledger()
        session.start_ledger()
        session.step([1])
        whole = session.ledger()
    broken = replace(whole, missing=("moe in layer 3: 1 dispatches expected, 0 seen",))
    for call in (broken.by_op, broken.to_json):
        with pytest.raises(StateError, match="moe in layer 3"):
            call()
    assert "ms/run" in str(whole) and "ms/run" not in str(broken) and "<table>" not in broken._repr_html_()


def _one_step() -> Ledger:
    with ds4v41.Model.open() as model, model.session(64) as session:
        session.start_ledger()
        session.step([1])
        return session.ledger()


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = _one_step()
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(StateError, match=r"pip install 'ds4v41\[plot\]'"):
        ledger.plot()
    with pytest.raises(StateError, match="moe in layer 3"):
        replace(ledger, missing=("moe in layer 3: 1 dispatches expected, 0 seen",)).plot()


def test_a_plot_has_a_bar_for_every_operation() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    ledger = _one_step()
    ax = ledger.plot(figures.Figure().subplots())
    bars = dict(zip([label.get_text() for label in ax.get_yticklabels()], ax.patches, strict=True))
    rows = {row.op: row for row in ledger.by_op()}
    assert {name.removesuffix(" (beside)") for name in bars} == set(rows) and "engram_io (beside)" in bars
    assert bars["moe"].get_width() == pytest.approx(1e3 * rows["moe"].seconds / ledger.runs)
    assert "milliseconds" in ax.get_xlabel()


def test_filled_sessions_run_and_are_refused_when_in_use(slice_path: Path) -> None:
    with ds4v41.Model.open(slice_path) as model, model.session(400) as session:
        fill(session, 300)
        assert session.position == 300 and np.isfinite(session.step([4])).all()
        with pytest.raises(StateError, match="empty"):
            fill(session, 10)
        with model.session(40) as small, pytest.raises(OptionError):
            fill(small, 41)


def test_bench_of_a_model(slice_path: Path) -> None:
    result = bench.decode(slice_path, context=100, steps=3)
    assert result["context"] == 100 and result["gb_s"] > 0 and result["ledger"].complete
    depths = bench.depth(slice_path, contexts=(50, 200), steps=2)["results"]
    assert [d["context"] for d in depths] == [50, 200] and depths[0]["rate"] == 1.0
    with ds4v41.Model.open(slice_path) as model:
        longest = model.config.max_position_embeddings
    assert bench.decode(slice_path, steps=1)["context"] == min(8192, (longest - 9) & ~1)
    for too_deep in (longest, 1 << 40):  # what was asked for is measured or refused
        with pytest.raises(OptionError, match="at most"):
            bench.decode(slice_path, context=too_deep, steps=3)
        with pytest.raises(OptionError, match="at most"):
            bench.depth(slice_path, contexts=(50, too_deep), steps=2)
    prompts = bench.prefill(slice_path, tokens=(40,), behind=(0, 100))["results"]
    assert [p["behind"] for p in prompts] == [0, 100] and all(p["tok_s"] > 0 for p in prompts)
    for tokens, behind in ((0, 0), (40, 1), (40, -2), (40, 1 << 40)):
        with pytest.raises(OptionError, match=r"even number|at least"):
            bench.prefill(slice_path, tokens=(tokens,), behind=(behind,))


def test_ab_compares_outputs(slice_path: Path) -> None:
    same = bench.compare(slice_path, {"threads": 1}, {"threads": 2}, pairs=3)
    assert same["outputs_equal"] and same["ratio_low"] <= same["ratio"] <= same["ratio_high"]
    with pytest.raises(StateError, match="not the same bytes"):
        bench.compare(slice_path, {"activations": "bf16"}, {"activations": "fp32"}, pairs=2)
    wide = bench.compare(slice_path, {"rows": 1, "context": 40}, {"rows": 4, "context": 40}, pairs=2)
    assert wide["outputs_equal"] and wide["rows_compared"] == 1
    with pytest.raises(StateError, match="not the same bytes"):
        bench.compare(slice_path, {"rows": 1}, {"rows": 2, "activations": "fp32"}, pairs=2)
    assert parse_side(["threads=1", "backend=cpu"]) == {"threads": 1, "backend": "cpu"}
    for bad in ("threads", "threads=x", "colour=red"):
        with pytest.raises(OptionError):
            parse_side([bad])


def test_probes() -> None:
    roof = bench.roof(gib=0.05)
    assert roof["roof_gb_s"] > 0.1 and roof["fma_gflop_s"] > 0.1
    result = bench.ops(types=("q8_0",), rows=(1,), gib=0.2)["results"][0]
    assert 0 < result["share"] < 2 and result["rows"] == 1
    with pytest.raises(OptionError):
        bench.ops(types=("q9",), gib=0.05)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.gguf"
    assert main(["synth", str(out), "--shape", "tiny", "--engram-rows", "600", "--json"]) == 0
    assert '"file_bytes"' in capsys.readouterr().out
    assert main(["bench", "decode", "-m", str(out), "--context", "20", "--steps", "2", "--ledger"]) == 0
    assert "attn_out" in capsys.readouterr().out
    assert main(["bench", "ab", "-m", str(out), "--a", "x=1", "--b", "threads=1"]) == 2
    assert main(["synth", str(out), "--shape", "tiny", "--layers", "3"]) == 2
