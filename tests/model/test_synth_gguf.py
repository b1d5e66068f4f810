"""Synthetic GGUF slices: they open, every kind of layer is there, values are sane, and bad options are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ds4v41
from ds4v41.checkpoint import open_checkpoint
from ds4v41.errors import OptionError
from ds4v41.synth_gguf import layer_kinds, layer_lists, slice_config, write_drafter, write_gguf


@pytest.mark.parametrize("recipe", ["q4", "mxfp4"])
def test_a_tiny_slice_runs(tmp_path: Path, recipe: str) -> None:
    report = write_gguf(tmp_path / "a.gguf", "tiny", layers=7, experts=5, recipe=recipe, engram_rows=2000)
    assert report.file_bytes == report.path.stat().st_size
    open_checkpoint(report.path).check()
    with ds4v41.Model.open(report.path) as model, model.session(128) as session:
        logits = session.prefill(list(range(5, 70)), logits="all")
    assert logits is not None and np.isfinite(logits).all() and 0.1 < logits.std() < 30


@pytest.mark.parametrize("recipe", ["q4", "mxfp4"])
def test_a_tiny_slice_has_a_drafter(tmp_path: Path, recipe: str) -> None:
    report = write_gguf(tmp_path / "a.gguf", "tiny", engram_rows=2000, recipe=recipe, drafter_experts=4)
    n_bytes = write_drafter(tmp_path / "d.gguf", report.config, recipe)
    assert n_bytes == (tmp_path / "d.gguf").stat().st_size
    with ds4v41.Model.open(report.path) as model:
        drafter = ds4v41.Drafter.open(tmp_path / "d.gguf", model)
        assert (drafter.n_stages, drafter.block_size) == (3, 5)
        with model.session(128, drafter=drafter) as session, model.session(128) as plain:
            options = {"max_tokens": 20, "temperature": 0.0}
            drafted = session.generate([5, 6, 7], drafting=5, **options).finish()
            assert drafted.tokens == plain.generate([5, 6, 7], **options).finish().tokens
            assert session.stats.drafter is not None and session.stats.drafter.cycles > 0


def test_a_released_slice_can_have_a_drafter() -> None:
    config = slice_config("released", 6, 48, 10_000, drafter_experts=16)
    assert config.dspark_target_layer_ids == (3, 4, 5) and config.dspark_markov_rank == 256
    with pytest.raises(OptionError, match="drafter_experts"):
        slice_config("released", 6, 48, 10_000, drafter_experts=2)
    with pytest.raises(OptionError, match="no drafter"):
        write_drafter("nowhere.gguf", slice_config("released", 6, 48, 10_000))


def test_same_options_same_file(tmp_path: Path) -> None:
    a, b = (write_gguf(tmp_path / name, "tiny", engram_rows=400, experts=4).path for name in ("a", "b"))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("layers", range(6, 41))
def test_every_kind_of_layer_occurs(layers: int) -> None:
    kinds = layer_kinds(slice_config("released", layers, 48, 10_000))
    assert len(kinds) == layers
    bare = {kind.removesuffix(" + engram") for kind in kinds}
    two, one = {"ratio-2 source", "ratio-2 reuse"}, {"ratio-1 candidate source", "ratio-1 reuse", "ratio-1 reindex"}
    assert bare == {"window"} | two | one
    assert sum("engram" in kind for kind in kinds) == 2


def test_forty_layers_are_the_release() -> None:
    lists = layer_lists(40)
    assert lists["kv_source_layer_ids"] == (2, 8, 14, 20) and lists["compress_ratios"].count(1) == 20


@pytest.mark.parametrize(
    "options",
    [
        {"shape": "huge"},
        {"layers": 5},
        {"layers": 41},
        {"experts": 1},
        {"experts": 385},
        {"recipe": "q8"},
        {"engram_rows": 10},
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        write_gguf(tmp_path / "a.gguf", **{"shape": "tiny", **options})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
