"""E2 block by block: every draft length, kind of drafter, prompt length and end of a block, against serial steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4v41 import Cancelled
from ds4v41.drafter import Drafter
from ds4v41.errors import NumericsError
from ds4v41.generation import GenerationOptions, TokenStream
from ds4v41.model import Model
from ds4v41.sampling import Draw
from ds4v41.session import Session
from tests.golden import load

from .proposers import script

CONTEXT = 128
"""The tiny model's windows have 16 rows, so texts of 40 tokens wrap them at every kind of position."""
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.3, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 7, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 1.5, "logit_bias": {9: 4.0, 11: -2.0, 12: -float("inf")}, "logprobs": True, "top_logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 0.8, "logprobs": True},
]


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[Model, Drafter]]:
    with Model.open(load.checkpoint_folder("fp8fp4"), threads=1) as model:
        yield model, Drafter.open(None, model)


def stream_of(session: Session, prompt: list[int], **options: Any) -> Iterator[tuple[Draw, int]]:
    settings = GenerationOptions.from_options({"seed": 3, "max_tokens": 24} | options, session.model)
    return iter(TokenStream(session, np.array(prompt, np.int32), settings))


def drawn(session: Session, prompt: list[int], **options: Any) -> list[tuple[Draw, int]]:
    """Whole draws: also log probabilities and what the filters left."""
    return list(stream_of(session, prompt, **options))


def arm(session: Session, prompt: list[int], want: list[tuple[Draw, int]], kind: str, seed: int) -> None:
    if kind == "nan":
        session._ext.inject_fault("draft_nan", seed % 7)
    elif kind != "own":
        script(session, len(prompt), [draw.token for draw, _ in want], kind, random.Random(seed))


@pytest.mark.parametrize("kind", ["own", "right", "wrong", "random", "nan"])
@pytest.mark.parametrize("drafts", range(6))
def test_every_prompt_length_with_every_drafter(tiny: tuple[Model, Drafter], drafts: int, kind: str) -> None:
    """Prompts of 1 to 16 tokens, so blocks begin at even and odd positions and cross the end of the windows."""
    model, drafter = tiny
    for n in range(1, 17):
        prompt, options = [(37 * i + n) % 500 + 4 for i in range(n)], WAYS[(n + drafts) % len(WAYS)]
        with model.session(CONTEXT) as plain, model.session(CONTEXT, drafter=drafter) as drafted:
            want = drawn(plain, prompt, **options)
            arm(drafted, prompt, want, kind, n)
            assert drawn(drafted, prompt, drafting=drafts, **options) == want
            assert drafted.tokens == plain.tokens
            assert drafted._ext.live_bytes() == plain._ext.live_bytes()
            assert (drafted.drafter_fault is not None) == (kind == "nan" and drafts > 0)


@pytest.mark.parametrize("way", ["rewind", "truncate", "mark", "fork", "save"])
@pytest.mark.parametrize("kind", ["own", "right", "random"])
def test_after_going_back_and_after_a_restore(
    tiny: tuple[Model, Drafter], kind: str, way: str, tmp_path: Path
) -> None:
    """Even and odd positions, nearer and further than the windows reach."""
    model, drafter = tiny
    line = [(91 * i) % 500 + 4 for i in range(60)]
    for at in (1, 2, 15, 16, 17, 30, 33):
        with model.session(CONTEXT) as plain, model.session(CONTEXT, drafter=drafter, retain=64) as first:
            session = first
            first.prefill(line[:at])
            mark = first.mark()
            drawn(first, line[:40], drafting=5, max_tokens=15)  # something to go back from, in the middle of a block
            if way == "mark":
                first.truncate(mark)
            elif way == "truncate" and first._ext.reaches(at):
                first.truncate(at)
            else:
                first.rewind(at)
            if way == "fork":
                session = first.fork()
            elif way == "save":
                first.save(tmp_path / f"{at}.ds4")
                session = model.load_session(tmp_path / f"{at}.ds4", drafter=drafter)
            prompt = [*line[:at], 9, 8]
            want = drawn(plain, prompt, temperature=1.0)
            arm(session, prompt, want, kind, at)
            assert drawn(session, prompt, temperature=1.0, drafting=4) == want
            assert session._ext.live_bytes() == plain._ext.live_bytes()
            session.close()


@pytest.mark.parametrize("kind", ["own", "right", "random"])
def test_a_text_that_is_left_at_any_row_goes_on_as_a_serial_one(tiny: tuple[Model, Drafter], kind: str) -> None:
    """What a stop string, a finished tool call or a reader who has enough does: the iterator is closed."""
    model, drafter = tiny
    prompt = [31, 64, 90]
    for n in range(1, 15):
        with model.session(CONTEXT) as plain, model.session(CONTEXT, drafter=drafter) as drafted:
            want = drawn(plain, prompt, temperature=1.0)
            plain.rewind(0)
            arm(drafted, prompt, want, kind, n)
            for session, drafting in ((plain, "off"), (drafted, 5)):
                stream = stream_of(session, prompt, temperature=1.0, drafting=drafting)
                assert [next(stream) for _ in range(n)] == want[:n]
                stream.close()  # type: ignore[attr-defined]
            assert drafted.tokens == plain.tokens == prompt + [draw.token for draw, _ in want[: n - 1]]
            assert drafted._ext.live_bytes() == plain._ext.live_bytes()
            more = [*prompt, *(draw.token for draw, _ in want[:n]), 5, 6]
            after = drawn(plain, more, temperature=1.0, max_tokens=6)
            drafted.__dict__.pop("proposer", None)
            assert drawn(drafted, more, temperature=1.0, max_tokens=6, drafting=5) == after


def test_a_stop_id_and_the_last_token_at_every_row(tiny: tuple[Model, Drafter]) -> None:
    model, drafter = tiny
    prompt = [31, 64, 90]
    with model.session(CONTEXT) as plain, model.session(CONTEXT, drafter=drafter) as drafted:
        want = drawn(plain, prompt, temperature=1.0)
        for n in range(1, 16):
            for options in ({"max_tokens": n}, {"stop": [want[n][0].token]}):
                for session in (plain, drafted):
                    session.rewind(0)
                serial = drawn(plain, prompt, temperature=1.0, **options)
                arm(drafted, prompt, want, "right", n)
                assert drawn(drafted, prompt, temperature=1.0, drafting=5, **options) == serial
                assert drafted.tokens == plain.tokens
                assert drafted._ext.live_bytes() == plain._ext.live_bytes()


def test_cancelled_between_blocks_and_within(tiny: tuple[Model, Drafter]) -> None:
    model, drafter = tiny
    prompt = [5, 6, 7]
    with model.session(CONTEXT) as plain:
        want = drawn(plain, prompt, temperature=1.0)
    for n in range(1, 12):
        with model.session(CONTEXT, drafter=drafter) as drafted:
            arm(drafted, prompt, want, "random", n)
            stream = stream_of(drafted, prompt, temperature=1.0, drafting=5)
            got = [next(stream) for _ in range(n)]
            drafted.cancel()
            with pytest.raises(Cancelled):
                for token in stream:  # what was verified already still comes
                    got.append(token)
            assert got == want[: len(got)] and len(got) < len(want)
            assert drafted.tokens == prompt + [draw.token for draw, _ in got[:-1]]
            assert drawn(drafted, prompt, temperature=1.0, drafting=5) == want


# ---- failing draws -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["runtime", "numerics", "memory"])
@pytest.mark.parametrize("row", range(6))
def test_a_draw_that_fails_in_a_block(tiny: tuple[Model, Drafter], row: int, error: str) -> None:
    """Of the block's first row it is the text's own failure, and the session holds the token; behind an accepted draft
    it ends the block, and the text comes to the same row in a step of its own, where nothing fails this time."""
    model, drafter = tiny
    kinds = {"runtime": RuntimeError, "numerics": NumericsError, "memory": MemoryError}
    prompt = [5, 6, 7, 300]
    with model.session(CONTEXT) as plain, model.session(CONTEXT, drafter=drafter) as drafted:
        want = drawn(plain, prompt, temperature=1.0)
        arm(drafted, prompt, want, "right", 0)
        stream = stream_of(drafted, prompt, temperature=1.0, drafting=5)
        first = next(stream)  # comes out of the prefill
        drafted._ext.inject_fault("draw", row, error)
        if row > 0:
            assert [first, *stream] == want
            assert drafted._ext.live_bytes() == plain._ext.live_bytes()
            return
        with pytest.raises(kinds[error]):
            next(stream)
        assert drafted.tokens == [*prompt, first[0].token] and drafted.n_ahead == 0
        assert drawn(drafted, prompt, temperature=1.0, drafting=5) == want


def test_a_draw_that_fails_in_a_plain_step(tiny: tuple[Model, Drafter]) -> None:
    model, drafter = tiny
    prompt = [5, 6, 7, 300]
    for options in ({}, {"drafter": drafter}):
        with model.session(CONTEXT, **options) as session:
            stream = stream_of(session, prompt, temperature=1.0)
            got = [next(stream), next(stream)]
            session._ext.inject_fault("draw", 0, "numerics")
            with pytest.raises(NumericsError):
                next(stream)
            assert session.tokens == prompt + [draw.token for draw, _ in got]


def test_a_history_is_left_as_it_was(tiny: tuple[Model, Drafter]) -> None:
    """Drafts and rows that are tried count for penalties while they are tried only."""
    model, drafter = tiny
    options = GenerationOptions.from_options({"temperature": 1.0, "seed": 2, "presence_penalty": 2.0}, model)
    stream = TokenStream(model.session(CONTEXT), np.array([5], np.int32), options)
    with model.session(CONTEXT, drafter=drafter) as session:
        session.prefill([5, 6, 7])
        history = stream.sampler.new_history([5, 6, 7])
        for tokens in ([8], [8, 9, 10, 11], [12, 13]):
            session.verify_draw(tokens, stream.sampler, history)
            assert history.n_generated == 0
            session.proposer(stream.sampler, history, None).propose(9, 5, [])
            assert history.n_generated == 0
            session._ext.inject_fault("draw", 0)
            with pytest.raises(RuntimeError):
                session.verify_draw(tokens, stream.sampler, history)
            assert history.n_generated == 0 and session.n_ahead == 0
