"""Models without a file: the same as one whose file holds the same bytes, on every back end; sizes; bad options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ds4v41
from ds4v41 import _ext, synthetic
from ds4v41.bench.model import fill
from ds4v41.errors import BackendError, OptionError
from ds4v41.synth_gguf import _plan
from tests.ref import synth_units as ref

PLACE = next((name for name in ("metal", "cuda") if not _ext.device_missing(name)), None)
needs_device = pytest.mark.skipif(PLACE is None, reason="no device, and no stand-in for one")
DEVICE = pytest.param(PLACE, marks=needs_device)
SIZES: dict[str, Any] = {"layers": 7, "experts": 5, "engram_rows": 2000}


def bytes_of(units: synthetic.Units, name: str, seed: int, n: int) -> bytes:
    u = units
    return ref.units(u.kind, u.unit_bytes, u.heads, u.codes, synthetic.key_of(seed, name), u.table, 0, n).tobytes()


def write(path: Path, recipe: str, seed: int) -> Path:
    """The same model as a GGUF file, by the specification of the units."""
    config = synthetic.config_of("tiny", **SIZES, recipe=recipe)
    plan, header = _plan(config, recipe)
    made = {item.name: item for item in synthetic.plan(config, recipe)}
    with path.open("wb") as file:
        file.write(header)
        for tensor in plan.tensors:
            name = tensor.spec.name
            if tensor.spec.role == "engram_table":
                units = synthetic.units_of("row", 0.0, synthetic.ROW_STD, 0, config.engram_head_dim)
            else:
                units = synthetic.units_for(made[name])
            file.seek(len(header) + tensor.offset)
            file.write(bytes_of(units, name, seed, tensor.nbytes // units.unit_bytes))
        file.truncate(plan.file_bytes)
    return path


def logits(model: ds4v41.Model) -> np.ndarray:
    """A prompt, a step, a verification: past the window, with selection and both Engram layers."""
    ids = np.random.default_rng(3).integers(10, model.config.vocab_size, 45).astype(np.int32)
    with model.session(128) as session:
        rows = session.prefill(ids[:38], logits="all")
        return np.concatenate([rows, session.step(ids[38:39]), session.step(ids[39:])])


@pytest.mark.parametrize("recipe", ["q4", "mxfp4"])
@pytest.mark.parametrize("backend", ["cpu", DEVICE])
def test_the_same_as_through_a_file(tmp_path: Path, recipe: str, backend: str) -> None:
    with ds4v41.Model.open(write(tmp_path / "a.gguf", recipe, 5)) as model:
        want = logits(model)
        tokens = model.tokenizer.encode("some text")
    assert np.isfinite(want).all() and 0.1 < want.std() < 30
    with ds4v41.Model.synthetic("tiny", **SIZES, recipe=recipe, seed=5, backend=backend) as model:
        np.testing.assert_array_equal(logits(model).view(np.uint32), want.view(np.uint32))
        assert model.tokenizer.encode("some text") == tokens
        assert model.engram is not None and model.engram.mode == "made" and model.engram.rows > 0


@needs_device
@pytest.mark.parametrize("recipe", ["fp8fp4", "bf16"])
def test_types_of_official_folders_on_both(recipe: str) -> None:
    rows = []
    for backend in ("cpu", PLACE):
        with ds4v41.Model.synthetic("tiny", **SIZES, recipe=recipe, backend=backend) as model:
            assert model.activations == ("fp8" if recipe == "fp8fp4" else "bf16")
            rows.append(logits(model))
            types = {t.dtype for t in model.checkpoint.tensors.values()}
    assert types == ({"F8_E4M3", "F8_E8M0", "I8", "BF16", "F32"} if recipe == "fp8fp4" else {"BF16", "F32"})
    assert np.isfinite(rows[0]).all() and rows[0].std() > 0.1
    np.testing.assert_array_equal(rows[0].view(np.uint32), rows[1].view(np.uint32))


def test_ids_say_what_the_bytes_follow_from() -> None:
    ids = set()
    for seed, recipe in ((1, "q4"), (2, "q4"), (1, "mxfp4"), (1, "q4")):
        with ds4v41.Model.synthetic("tiny", **SIZES, seed=seed, recipe=recipe) as model:
            ids.add(model.weights_id)
    assert len(ids) == 3


@pytest.mark.parametrize("backend", ["cpu", DEVICE])
@pytest.mark.parametrize("recipe", ["q4", "fp8fp4"])
def test_tensors_can_be_read_from_wherever_they_lie(backend: str, recipe: str) -> None:
    with ds4v41.Model.synthetic("tiny", **SIZES, recipe=recipe, backend=backend) as model:
        tensors = model.checkpoint.tensors
        model.checkpoint.check()
        made = next(m for m in synthetic.plan(model.config, recipe) if m.name == "layers.3.ffn.experts.w2.weight")
        units = synthetic.units_for(made)
        want = bytes_of(units, made.name, 1, made.nbytes // units.unit_bytes)
        if recipe == "q4":
            assert tensors[made.name].read() == want and tensors[made.name].read(17, 100) == want[17:117]
        else:
            size = made.nbytes // 5
            assert tensors["layers.3.ffn.experts.2.w2.weight"].read() == want[2 * size : 3 * size]


def test_progress_and_the_sizes_of_the_plan() -> None:
    seen: list[tuple[int, int]] = []
    with ds4v41.Model.synthetic("tiny", **SIZES, progress=lambda done, total: seen.append((done, total))) as model:
        stored = sum(t.nbytes for t in model.checkpoint.tensors.values())
    assert seen[-1] == (stored, stored) and [a for a, _ in seen] == sorted(a for a, _ in seen)
    released = synthetic.plan(synthetic.config_of("released", 40, 128, "q4", None), "q4")
    assert 111e9 < sum(item.nbytes for item in released) < 113e9  # a card of 141 GB takes it


def test_a_session_at_depth_and_a_text() -> None:
    with ds4v41.Model.synthetic("tiny", **SIZES) as model, model.session(256) as session:
        fill(session, 100)
        assert np.isfinite(session.step([5])).all()
    with ds4v41.Model.synthetic("tiny", **SIZES) as model, model.session(256) as session:
        assert len(session.generate([5, 6, 7], max_tokens=8, temperature=0.0).finish().tokens) == 8


def test_bad_options() -> None:
    for wrong in ({"layers": 3}, {"experts": 0}, {"recipe": "q5"}, {"seed": -1}, {"threads": 0}, {"engram_rows": 1},
                  {"activations": "fp9"}, {"backend": "gpu"}, {"progress": 3}):  # fmt: skip
        with pytest.raises(OptionError, match=next(iter(wrong))):
            ds4v41.Model.synthetic("tiny", **(SIZES | wrong))
    with pytest.raises(OptionError, match="shape"):
        ds4v41.Model.synthetic("large")  # type: ignore[arg-type]
    with pytest.raises(BackendError):
        ds4v41.Model.synthetic("tiny", **SIZES, backend="metal" if PLACE != "metal" else "cuda")


def test_numbers_of_numpy_are_numbers() -> None:
    sizes = {name: np.int64(value) for name, value in SIZES.items()}
    one = ds4v41.Model.synthetic("tiny", **SIZES, seed=3)
    other = ds4v41.Model.synthetic("tiny", **sizes, seed=np.int64(3))  # type: ignore[arg-type]
    with one, other:
        assert one.path == other.path and one.weights_id == other.weights_id
        np.testing.assert_array_equal(logits(one), logits(other))
