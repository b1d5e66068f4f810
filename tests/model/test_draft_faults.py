"""Failures at every point of drafting: what they leave of the text, the session and the drafter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ds4v41.drafter import Drafter
from ds4v41.errors import NumericsError, OptionError, StateError
from ds4v41.generation import GenerationOptions, TokenStream
from ds4v41.model import Model
from ds4v41.session import Session
from tests.golden import load

CONTEXT = 128
PROMPT = [5, 6, 7, 300]
KINDS = {"runtime": RuntimeError, "memory": MemoryError, "numerics": NumericsError}


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[Model, Drafter]]:
    with Model.open(load.checkpoint_folder("fp8fp4"), threads=1) as model:
        yield model, Drafter.open(None, model)


def drawn(session: Session, prompt: list[int], **options: Any) -> list[int]:
    given = {"temperature": 1.0, "seed": 9, "max_tokens": 30} | options
    settings = GenerationOptions.from_options(given, session.model)
    return [draw.token for draw, _ in TokenStream(session, np.array(prompt, np.int32), settings)]


@pytest.fixture(scope="module")
def expected(tiny: tuple[Model, Drafter]) -> list[int]:
    return drawn(tiny[0].session(CONTEXT), PROMPT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize(
    "point", ["draft_begin", "draft_capture", "draft_commit", "draft_settle", "draft_start", "draft_row"]
)
def test_a_failing_drafter_is_dropped_and_the_text_goes_on(
    tiny: tuple[Model, Drafter], expected: list[int], point: str, after: int, kind: str
) -> None:
    model, drafter = tiny
    with model.session(CONTEXT, drafter=drafter) as session, model.session(CONTEXT) as plain:
        session._ext.inject_fault(point, after, kind)
        assert drawn(session, PROMPT, drafting=3) == expected
        assert session.drafter_fault, "the fault did not happen"
        if kind != "memory":
            assert f"injected at {point}" in session.drafter_fault
        assert session.stats.drafter is None or session.stats.drafter.off_reason == session.drafter_fault
        assert drawn(plain, PROMPT) == expected
        assert session._ext.live_bytes() == plain._ext.live_bytes()
        with session.fork() as other:  # the fork knows as well
            assert other.drafter_fault == session.drafter_fault
            assert drawn(other, PROMPT, drafting=3) == expected


@pytest.mark.parametrize("kind", ["runtime", "memory"])
@pytest.mark.parametrize("point", ["draft_settle"])
def test_a_mark_and_a_fork_survive_a_failing_drafter(tiny: tuple[Model, Drafter], point: str, kind: str) -> None:
    model, drafter = tiny
    for call in (Session.mark, Session.fork):
        with model.session(CONTEXT, drafter=drafter) as session:
            session.prefill(PROMPT)
            session._ext.inject_fault(point, 0, kind)
            call(session)
            assert session.drafter_fault


@pytest.mark.parametrize("kind", ["runtime", "numerics"])
@pytest.mark.parametrize("point", ["run_start", "run_layer", "run_head", "run_commit"])
def test_a_failing_run_leaves_the_session_as_it_was(
    tiny: tuple[Model, Drafter], expected: list[int], point: str, kind: str
) -> None:
    """In a verify step as in a plain one; the drafter stays."""
    model, drafter = tiny
    for length in (3, 4):  # at an even and an odd position
        with model.session(CONTEXT, drafter=drafter) as session, model.session(CONTEXT) as plain:
            for s in (session, plain):
                s.prefill(PROMPT[:length])
            before = session._ext.live_bytes()
            session._ext.inject_fault(point, 0, kind)
            with pytest.raises(KINDS[kind], match="injected"):
                session.verify([8, 9, 10])
            assert session._ext.live_bytes() == before and session.position == length
            assert session.drafter_fault is None
            assert np.array_equal(session.step([8, 9]), plain.step([8, 9]))
            assert session._ext.live_bytes() == plain._ext.live_bytes()
            assert drawn(session, PROMPT, drafting=3) == expected


def test_bad_numbers_of_a_verify_step_are_left_to_serial_decoding(
    tiny: tuple[Model, Drafter], expected: list[int]
) -> None:
    model, drafter = tiny
    with model.session(CONTEXT, drafter=drafter) as session:
        for after in (1, 2, 4):
            session.rewind(0)
            session._ext.inject_fault("run_head", after, "numerics")
            assert drawn(session, PROMPT, drafting=3) == expected
            assert session.drafter_fault is None


def test_no_memory_for_a_verify_step_turns_drafting_off(tiny: tuple[Model, Drafter], expected: list[int]) -> None:
    model, drafter = tiny
    with model.session(CONTEXT, drafter=drafter) as session:
        session._ext.inject_fault("run_start", 1, "memory")  # the prefill passes
        assert drawn(session, PROMPT, drafting=3) == expected
        assert "no memory for a verify step of 4 rows" in (session.drafter_fault or "")
        assert session.stats.drafter is not None and session.stats.drafter.off_reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", ["rollback_before", "rollback_after"])
def test_a_failing_rollback_refuses_until_rewound_or_closed(
    tiny: tuple[Model, Drafter], expected: list[int], point: str, kind: str
) -> None:
    model, drafter = tiny
    for back in (4, 3, 0):
        with model.session(CONTEXT, drafter=drafter) as session:
            session._ext.inject_fault(point, 1, kind)  # the first one is the prompt's own rewind
            with pytest.raises(KINDS[kind]):
                drawn(session, PROMPT, drafting=5)
            for refused in (
                lambda: session.step([9]), lambda: session.prefill([9]), session.mark, session.fork,
                lambda: drawn(session, PROMPT), lambda: session.save("nowhere"),
            ):  # fmt: skip
                with pytest.raises(StateError, match="rewind"):
                    refused()
            assert not session.closed and list(session.tokens)[:4] == PROMPT
            session.rewind(back)
            assert drawn(session, PROMPT, drafting=5) == expected
            with model.session(CONTEXT) as plain:
                assert drawn(plain, PROMPT) == expected
                assert session._ext.live_bytes() == plain._ext.live_bytes()


def test_unknown_points_and_kinds_are_refused(tiny: tuple[Model, Drafter]) -> None:
    with tiny[0].session(CONTEXT) as session:
        for wrong in (("nowhere", 0, "runtime"), ("run_head", 0, "cosmic")):
            with pytest.raises(OptionError):
                session._ext.inject_fault(*wrong)
