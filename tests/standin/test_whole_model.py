"""Whole models on Metal: the CPU's logits, intermediates, drafts, tokens and state, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ds4v41 import Drafter, Model
from tests.model.support import live, nano, same_bits, tiny, tokens_of
from tests.model.test_drafting import drawn

from .both import ORDERS, STANDIN, needs_standin

pytestmark = needs_standin

MODES = ("bf16", "fp8", "fp32")


@pytest.fixture(autouse=True)
def default_order() -> Iterator[None]:
    yield
    STANDIN.set_options(order=ORDERS[0], checked=False)


def traced(model: Model, cuts: list[int], ids: np.ndarray) -> list[dict[str, Any]]:
    """Every intermediate of a prefill in parts."""
    with model.session(context=256) as session:
        edges = [0, *cuts, len(ids)]
        return [session._ext.trace_run(ids[a:b], "all") for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(("mode", "order"), list(zip(MODES, ORDERS, strict=True)))
def test_every_intermediate_of_the_tiny_model(mode: str, order: str) -> None:
    """Odd positions, parts of 1 to 15 rows; in mode fp8 past the window and past what is selected."""
    ids, cuts = (tokens_of(3, 26), [1, 6, 21, 22]) if mode == "fp8" else (tokens_of(3, 9), [1, 4])
    want = traced(tiny(mode), cuts, ids)
    STANDIN.set_options(order=order)
    got = traced(tiny(mode, backend="metal"), cuts, ids)
    for part, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a.keys() == b.keys()
        different = [name for name in a if not same_bits(a[name], b[name])]
        assert not different, f"part {part}: the first that differs is {different[0]}"


def test_the_nano_model() -> None:
    ids = tokens_of(5, 6, 4000)
    with nano().session(context=64) as a, nano(backend="metal").session(context=64) as b:
        for part in (ids[:3], ids[3:4], ids[4:6]):
            assert same_bits(a.prefill(part, logits="all"), b.prefill(part, logits="all"))
        assert live(a) == live(b)


@pytest.mark.parametrize("which", ["tiny", "nano"])
def test_drafts(which: str) -> None:
    """The drafter's logits, confidences and probabilities; E2: its tokens are the serial ones, and those of the CPU."""
    models = (tiny("fp8"), tiny("fp8", backend="metal")) if which == "tiny" else (nano(), nano(backend="metal"))
    ids = tokens_of(9, 9 if which == "tiny" else 4, 500)
    rows: list[list[Any]] = []
    for model in models:
        with model.session(context=96, drafter=Drafter.open(None, model)) as session:
            session.prefill(ids)
            session._ext.draft_start(7, 3)
            rows.append([session._ext.draft_row(i, 11 + i) for i in range(3)])
    for a, b in zip(*rows, strict=True):
        assert same_bits(a[0], b[0])
        assert a[1:] == b[1:]
    if which == "nano":
        return
    texts = []
    for model in models:
        with model.session(context=96, drafter=Drafter.open(None, model)) as session:
            texts.append(drawn(session, ids.tolist(), temperature=0.7, seed=3, max_tokens=4, drafting=3))
            texts.append(live(session))
    assert texts[:2] == texts[2:]
