"""The engine's drafter against the reference's: drafts, logits, confidences and captured rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ds4v41 import _ext
from ds4v41.checkpoint import open_checkpoint
from ds4v41.drafter import Drafter
from ds4v41.model import Model
from tests.golden import compare, load

PROMPTS = ("p5", "p16", "p17", "p40", "p150")
NANO = json.loads((Path(load.FOLDER) / "nano" / "golden.json").read_text(encoding="utf-8"))["runs"]
ACTIVATIONS = {"fp32": "fp32", "bf16": "bf16", "fp8fp4": "fp8"}


@pytest.fixture(scope="module")
def tiny() -> Iterator[dict[str, tuple[Model, Drafter]]]:
    opened = {}
    for mode, activations in ACTIVATIONS.items():
        model = Model.open(load.checkpoint_folder(mode), activations=activations, threads=1)  # type: ignore[arg-type]
        opened[mode] = (model, Drafter.open(None, model))
    yield opened
    for model, _ in opened.values():
        model.close()


def greedy_drafts(session: _ext.Session, anchor: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """[anchor, five drafts], logits [5, vocab], confidences [5]."""
    session.draft_start(anchor, 5)
    ids, logits, confidence = [anchor], [], []
    for i in range(5):
        row, value, top = session.draft_row(i, ids[-1])
        assert top == pytest.approx(1 / np.exp(row.astype(np.float64) - row.max()).sum(), rel=1e-5)
        ids.append(int(row.argmax()))
        logits.append(row)
        confidence.append(value)
    return ids, np.stack(logits), np.array(confidence)


def follow(
    model: Model, drafter: Drafter, prompt: np.ndarray, tokens: np.ndarray
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Feed the golden tokens one by one; the drafts after each."""
    session = _ext.Session(model._handle(), 512, 64, 512, drafter._handle())
    session.run(prompt.astype(np.int32), "none")
    for i in range(len(tokens) - 1):
        session.run(tokens[i : i + 1].astype(np.int32), "none")
        yield greedy_drafts(session, int(tokens[i + 1]))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tiny_fp32_drafts(tiny: dict[str, tuple[Model, Drafter]], prompt: str) -> None:
    runs = load.runs("fp32")
    got = list(follow(*tiny["fp32"], runs[f"{prompt}.input_ids"], runs[f"{prompt}.greedy_tokens"]))
    ids = np.array([g[0] for g in got])
    assert (ids == runs[f"{prompt}.draft_ids"]).mean() > 0.99
    want_logits = runs[f"{prompt}.draft_logits"]
    for i, want in enumerate(want_logits):
        assert compare.row_errors(got[i][1], want).max() < 5e-5
    want = runs[f"{prompt}.draft_confidence"]
    close = np.abs(np.array([g[2] for g in got]) - want) < 5e-3
    assert close.mean() > 0.99


@pytest.mark.parametrize(("mode", "median", "equal"), [("bf16", 0.15, 0.8), ("fp8fp4", 0.2, 0.7)])
def test_tiny_rounded_modes_agree_statistically(
    tiny: dict[str, tuple[Model, Drafter]], mode: str, median: float, equal: float
) -> None:
    runs, errors, same = load.runs(mode), [], []
    for prompt in PROMPTS:
        tokens = runs[f"{prompt}.greedy_tokens"]
        for i, (ids, logits, _) in enumerate(follow(*tiny[mode], runs[f"{prompt}.input_ids"], tokens)):
            want = runs[f"{prompt}.draft_ids"][i]
            same.append(ids[1] == want[1])
            if i < len(runs[f"{prompt}.draft_logits"]) and ids == list(want):
                errors += list(compare.row_errors(logits, runs[f"{prompt}.draft_logits"][i]))
    assert np.median(errors) < median
    assert np.mean(same) > equal


def test_captured_rows_are_the_means_of_the_target_layers_inputs(tiny: dict[str, tuple[Model, Drafter]]) -> None:
    model, drafter = tiny["fp32"]
    want = load.intermediates("fp32")
    runs = load.runs("fp32")
    session = _ext.Session(model._handle(), 512, 64, 512, drafter._handle())
    session.run(runs["p40.input_ids"].astype(np.int32), "none")
    assert compare.row_errors(session.draft_captured(), want["prefill.main_hidden"]).max() < 1e-5
    session.draft_settle()
    session.run(runs["p40.greedy_tokens"][:1].astype(np.int32), "none")
    assert compare.row_errors(session.draft_captured(), want["decode0.main_hidden"]).max() < 1e-5


def test_nano_drafts(nano: tuple[Model, Drafter]) -> None:
    """Teacher-forced drafts at the golden positions, by statistics: a flipped fp4 or fp8 code upstream moves logits."""
    model, drafter = nano
    shares, confidence = [], []
    for run in NANO:
        golden = run["owner_keys"]
        tokens = np.array([*run["prompt_ids"], *golden["greedy_ids"]], np.int32)
        session = _ext.Session(model._handle(), 1024, 64, 1024, drafter._handle())
        equal = []
        for draft in golden["drafts"]:
            done, want = draft["position"] + 1, draft["anchor_and_draft_ids"]
            assert tokens[done] == want[0]
            session.run(tokens[session.position : done], "none")
            ids, _, got = greedy_drafts(session, want[0])
            equal += [a == b for a, b in zip(ids[1:], want[1:], strict=True)]
            if ids == want:
                confidence += list(np.abs(got - np.array(draft["confidence_logits"])))
        shares.append(np.mean(equal))
    assert min(shares) > 0.7 and np.mean(shares) > 0.88, shares
    assert np.median(confidence) < 0.12


@pytest.fixture(scope="module")
def nano() -> Iterator[tuple[Model, Drafter]]:
    with Model.open(threads=1) as model:
        yield model, Drafter.open(None, model)


def test_the_checkpoint_of_the_tests_has_a_drafter() -> None:
    assert open_checkpoint(load.checkpoint_folder("bf16")).config.num_nextn_predict_layers == 3
