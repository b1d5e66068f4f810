"""What an opened model really takes, against its plan; measured in a process of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from ds4v41 import Drafter, MemoryPlanError, Model, _ext, memory
from ds4v41.memory import run_rows
from ds4v41.synth_gguf import slice_config
from ds4v41.weights import shape_of

from .support import nano, python, small, tiny

MEASURE = """
import json, sys
import numpy as np
import ds4v41
from ds4v41 import Model, Session, _ext, sampling, synth

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

ids = np.random.default_rng(1).integers(5, 4000, 1000).astype(np.int32)
context = int(sys.argv[1])
if sys.argv[2] == "warm":  # interpreter, allocator arenas, tokenizer library: once, with another model
    from pathlib import Path
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        config = synth.tiny_config()
        synth.write_official(folder, config, 1)
        with Model.open(folder, threads=2) as model, model.session() as session:
            session.prefill(ids[:100] % 500, logits=None)
            del session
        del model
before = resident()
model = Model.open(threads=2)
opened = resident()
session = model.session(context=context)
made = resident()
session.prefill(ids)
prefilled = resident()
for token in ids[:20]:
    session.step([int(token)])
plan, _ = model.plan(context)
print(json.dumps({
    "before": before, "opened": opened - before, "session": made - before, "prefilled": prefilled - before,
    "after_steps": resident() - before, "weights": plan.weights, "caches": plan.caches, "scratch": plan.scratch,
    "held_scratch": session._ext.scratch_bytes, "on_disk": plan.engram_on_disk,
}))
"""


def measure(context: int = 4096, start: str = "cold") -> dict[str, int]:
    """Resident bytes by stage, above those of the interpreter with the library imported."""
    done = python(MEASURE, str(context), start)
    assert done.returncode == 0, done.stderr
    numbers: dict[str, int] = json.loads(done.stdout)
    return numbers


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_opened_session_takes_little_more_than_weights_and_caches() -> None:
    """Everything that opening, a prefill of 1,000 tokens and some steps add to a process that has only imported the
    library: mapped weight pages, caches, working memory, tokenizer, Python objects, threads. Below 1.5 times weights
    and (whole) caches. While the prompt is read, the planned working memory of a chunk comes on top."""
    found = measure()
    allowed = 1.5 * (found["weights"] + found["caches"])
    assert found["after_steps"] < allowed, found
    assert found["prefilled"] < allowed + found["scratch"], found
    # The measure is not blind: the weights were read.
    assert found["prefilled"] > found["weights"], found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_caches_are_committed_as_they_fill() -> None:
    """A session reserves its whole context, and takes next to nothing before it is used."""
    found = measure(start="warm")
    assert found["session"] - found["opened"] < found["caches"] // 4, found


def test_a_decoding_session_holds_little_working_memory() -> None:
    with nano().session(context=2048) as session:
        session.prefill(range(5, 605), logits=None)
        long = session._ext.scratch_bytes
        session.step([5])
        assert session._ext.scratch_bytes < long // 8


# ---- the plan ------------------------------------------------------------------------------------------------------


def test_the_plan_is_what_is_reserved() -> None:
    """Caches to the page, for several models and sizes."""
    for model in (tiny("bf16"), tiny("fp8"), small(), nano()):
        for context, retain, chunk in ((1, 0, 1), (100, 0, 1), (300, 50, 8), (512, 8192, 8192), (500, 500, 17)):
            plan, rows = model.plan(context, retain=retain, chunk=chunk)
            with model.session(context=context, retain=retain, chunk=chunk) as session:
                assert session.chunk == rows
                assert session._ext.chunk == run_rows(rows, context)
                assert session._ext.reserved_bytes == plan.caches
                n = min(context, run_rows(rows, context))
                session.prefill([5] * n)
                assert session._ext.scratch_bytes + session._ext.working_bytes <= plan.scratch


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_plan_of_the_operations_is_near_what_they_hold(threads: int) -> None:
    """Each worker's memory and the operations' own, on every instruction set, for steps and for chunks."""
    for isa in _ext.cpu_isas():
        for path, activations in ((None, "bf16"), (None, "fp8"), (tiny("bf16").path, "bf16")):
            with Model.open(path, backend=f"cpu/{isa}", activations=activations, threads=threads) as model:
                for context, chunk in ((500, 400), (500, 16), (64, 1)):
                    shape = shape_of(model.config)
                    rows = run_rows(chunk, context)
                    plan = _ext.memory_plan(shape, activations, context, 0, rows, 0, threads)["working"]
                    with model.session(context=context, retain=0, chunk=chunk) as session:
                        session.prefill([5] * (context - 1))
                        session.step([5])
                        held = session._ext.working_bytes
                    assert held <= plan < 3 * held + (1 << 16), (isa, path, activations, context, chunk, held, plan)
    assert _ext.memory_plan(shape, "bf16", 500, 0, 16)["working"] == 0  # a device


@pytest.mark.parametrize("threads", [1, 2])
def test_the_plan_counts_what_the_drafters_operations_hold(threads: int) -> None:
    """On every instruction set: windows filled from a long prompt, a whole block, every draft's row."""
    for isa in _ext.cpu_isas():
        for path, activations in ((None, "fp8"), (tiny("bf16").path, "bf16")):
            with Model.open(path, backend=f"cpu/{isa}", activations=activations, threads=threads) as model:
                drafter = Drafter.open(None, model)
                alone, _ = model.plan(300, chunk=64)
                plan, _ = model.plan(300, chunk=64, drafter=drafter)
                with model.session(context=300, chunk=64, drafter=drafter) as session:
                    session.prefill([5] * 70)
                    session._ext.draft_start(5, drafter.block_size)
                    for i in range(drafter.block_size):
                        session._ext.draft_row(i, 5)
                    held, planned = session._ext.draft_working_bytes, drafter.working_bytes
                assert 0 < held <= planned < 3 * held + (1 << 16), (isa, path, activations, held, planned)
                assert plan.scratch - alone.scratch == drafter.session_bytes + planned


def test_a_chunk_of_the_released_model_is_planned_with_all_that_it_takes() -> None:
    """What an operation makes in between for the rows of a chunk does not grow with the chunk where it is wide: the
    projected Engram rows alone would be 127 KB a row."""
    shape = shape_of(slice_config("released", 40, 384, 100_000))
    most, few = (_ext.memory_plan(shape, "bf16", 1 << 17, 8192, n, 0, 8)["working"] for n in (8192, 256))
    assert most < 160 << 20
    assert few < most


def test_weights_are_counted_as_they_lie_in_the_file() -> None:
    plan, _ = nano().plan()
    size = sum(file.stat().st_size for file in nano().path.glob("*.safetensors"))
    assert plan.weights + plan.engram_on_disk < size  # the drafter is not read
    assert plan.total == plan.weights + plan.caches + plan.scratch + plan.engram_memory
    assert "MiB" in str(plan)


def test_a_chunk_that_was_asked_for_is_taken_where_it_fits() -> None:
    _, planned = nano().plan(4096)
    _, asked = nano().plan(4096, chunk=1024)
    assert planned < asked == 1024
    with nano().session(context=4096, chunk=1024) as session:
        assert session.chunk == 1024


def test_chunks_shrink_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 8 << 20)
    plan, rows = nano().plan(4096)
    assert rows < 256
    assert plan.scratch <= 2 << 20
    with nano().session(context=4096) as session:
        assert session.chunk == rows
    assert nano().plan(4096, chunk=4096)[0].scratch <= 2 << 20


def test_what_cannot_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 20)
    with pytest.raises(MemoryPlanError, match=r"4,096 tokens needs .* available 1.0 MiB.*smaller context"):
        nano().session(context=4096)
    assert isinstance(MemoryPlanError("x"), MemoryError)


def test_more_weights_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ds4v41.model as model

    monkeypatch.setattr(model, "physical_memory", lambda: 1 << 20)
    with pytest.raises(MemoryPlanError, match=r"17\.8 MiB.* 1\.0 MiB"):
        model.Model.open()


def _report() -> dict[str, Any]:
    return {start: measure(start=start) for start in ("cold", "warm")}


if __name__ == "__main__":
    print(json.dumps(_report(), indent=1))
