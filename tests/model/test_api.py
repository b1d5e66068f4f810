"""The API: bad input of every kind, what it raises and that nothing changes; closed things; threads; reports."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ds4v41
from ds4v41 import (
    BackendError,
    CheckpointError,
    ContextError,
    Ds4Error,
    Model,
    OptionError,
    Session,
    StateError,
    TokenError,
)

from .support import TINY, assert_as_fresh, live, nano, same_bits, stepped, tiny, tokens_of

HELD = tokens_of(1, 400)[:33].tolist()


@pytest.fixture
def session() -> Iterator[Session]:
    """A tiny session that holds 33 tokens, context 100; afterwards it must hold them still, with the same bits."""
    with tiny().session(context=100) as opened:
        opened.prefill(HELD, logits=None)
        yield opened
        if not opened.closed:
            assert_as_fresh(opened, HELD)


# ---- options -------------------------------------------------------------------------------------------------------

OPEN: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"backend": "gpu"}, OptionError, "backend"),
    ({"backend": None}, OptionError, "backend"),
    ({"backend": "cpu/sse"}, OptionError, "backend"),
    ({"backend": "cuda"}, BackendError, "cuda"),
    ({"activations": "int8"}, OptionError, "activations"),
    ({"activations": 8}, OptionError, "activations"),
    ({"prefill": "matrix", "backend": "cpu/plain"}, OptionError, "AVX-512-BF16"),
    ({"prefill": True}, OptionError, "prefill"),
    ({"threads": 0}, OptionError, "threads"),
    ({"threads": -1}, OptionError, "threads"),
    ({"threads": 1.5}, OptionError, "threads"),
    ({"threads": True}, OptionError, "threads"),
    ({"threads": "2"}, OptionError, "threads"),
    ({"threads": 10**9}, OptionError, "threads"),
    ({"engram": "gpu"}, OptionError, "engram"),
    ({"check": 1}, OptionError, "check"),
    ({"progress": 5}, OptionError, "progress"),
    ({"thread": 2}, TypeError, "thread"),
    ({"path": 5}, OptionError, "path"),
    ({"path": b"x"}, OptionError, "path"),
    ({"path": "/nowhere/at/all"}, CheckpointError, "/nowhere/at/all"),
]


@pytest.mark.parametrize(("options", "kind", "word"), OPEN, ids=lambda value: str(value)[:40])
def test_open_refuses(options: dict[str, Any], kind: type[Exception], word: str) -> None:
    given = {"path": TINY / "bf16", **options}
    with pytest.raises(kind, match=word):
        Model.open(given.pop("path"), **given)


SESSION: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"context": 0}, OptionError, "context"),
    ({"context": 513}, OptionError, "context"),
    ({"context": "100"}, OptionError, "context"),
    ({"context": 10.0}, OptionError, "context"),
    ({"context": True}, OptionError, "context"),
    ({"retain": -1}, OptionError, "retain"),
    ({"retain": None}, OptionError, "retain"),
    ({"chunk": 0}, OptionError, "chunk"),
    ({"chunk": 1 << 20}, OptionError, "chunk"),
    ({"chunk": [4]}, OptionError, "chunk"),
    ({"contxt": 100}, TypeError, "contxt"),
    ({"drafter": object()}, OptionError, "drafter: expected a Drafter"),
    ({"store": object()}, OptionError, "store"),
    ({"store": "folder"}, OptionError, r"KVStore\(folder\)"),
]


@pytest.mark.parametrize(("options", "kind", "word"), SESSION, ids=lambda value: str(value)[:40])
def test_session_refuses(options: dict[str, Any], kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        tiny().session(**options)


def test_numpy_integers_are_integers() -> None:
    with tiny().session(context=np.int64(64), retain=np.int32(5), chunk=np.int16(7)) as session:  # type: ignore[arg-type]
        assert (session.context, session.chunk) == (64, 7)
        session.prefill(np.arange(5, 25, dtype=np.uint8))
        session.truncate(np.int64(18))
        assert session.position == 18


TOKENS: list[tuple[Any, str]] = [
    ([], "at least one"),
    (np.zeros(0, np.int32), "at least one"),
    ([-1], "-1 at index 0"),
    ([5, 512], "512 at index 1"),
    ([2**31], "2147483648"),
    ([2**63], "9223372036854775808"),
    ([2**70], "integers"),
    ([1.0], "integers"),
    ([True, False], "integers"),
    (["5"], "integers"),
    ([None], "integers"),
    (None, "flat list"),
    (5, "flat list"),
    ([[5, 6]], "flat list"),
    ([[5], [6, 7]], "flat list"),
    ({5, 6}, "flat list"),
    ({5: 6}, "flat list"),
    (np.array(5), "flat list"),
    (b"abc", "text"),
]


@pytest.mark.parametrize(("tokens", "word"), TOKENS, ids=lambda value: repr(value)[:30])
def test_tokens_are_checked(session: Session, tokens: Any, word: str) -> None:
    for call in (session.prefill, session.step):
        with pytest.raises(TokenError, match=word):
            call(tokens)
    with pytest.raises(TokenError):  # what is no prompt has words of its own, below
        session.generate(tokens)


def test_text_is_no_token_list(session: Session) -> None:
    for call in (session.prefill, session.step):
        with pytest.raises(TokenError, match="encode"):
            call("def")


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ([{"role": "user", "content": "x"}], "found messages; chat\\(\\) takes those"),
        ({"role": "user", "content": "x"}, "found messages"),
        (["def", "class"], "a call takes one prompt"),
        (None, "expected text or token ids, found None"),
        (b"def", "expected text or token ids, found bytes"),
    ],
)
def test_what_is_taken_for_a_prompt(session: Session, prompt: Any, word: str) -> None:
    with pytest.raises(TokenError, match=word):
        session.generate(prompt)


CALLS: list[tuple[Callable[[Session], Any], type[Exception], str]] = [
    (lambda s: s.prefill([5], logits="first"), OptionError, "logits"),
    (lambda s: s.prefill([5], logits=True), OptionError, "logits"),
    (lambda s: s.prefill([5], logits=["last"]), OptionError, "logits"),
    (lambda s: s.prefill([5], logits=np.array(["last", "all"])), OptionError, "logits"),
    (lambda s: s.prefill([5], progress=1), OptionError, "progress"),
    (lambda s: s.prefill([5], chunk=1), TypeError, "chunk"),
    (lambda s: s.prefill(range(5, 73)), ContextError, "68 tokens do not fit"),
    (lambda s: s.step(range(5, 14)), OptionError, "1 to 8"),
    (lambda s: s.truncate(34), StateError, "33"),
    (lambda s: s.truncate(-1), StateError, "-1"),
    (lambda s: s.truncate(10**30), StateError, "33"),
    (lambda s: s.truncate("5"), OptionError, "position or a mark"),
    (lambda s: s.truncate(True), OptionError, "position or a mark"),
    (lambda s: s.truncate(None), OptionError, "position or a mark"),
    (lambda s: s.truncate(5.0), OptionError, "position or a mark"),
    (lambda s: s.rewind(34), StateError, "33"),
    (lambda s: s.rewind(-1), OptionError, "position"),
    (lambda s: s.rewind("a"), OptionError, "position"),
    (lambda s: s.generate([5], max_tokens=0), OptionError, "max_tokens"),
    (lambda s: s.generate([5], max_tokens=2.5), OptionError, "max_tokens"),
    (lambda s: s.generate([5], max_tokens=True), OptionError, "max_tokens"),
    (lambda s: s.generate([5], max_tokens=100), ContextError, "max_tokens"),
    (lambda s: s.generate(range(5, 105)), ContextError, "100 tokens"),
    (lambda s: s.generate([5], stop=5.0), OptionError, "stop"),
    (lambda s: s.generate([5], stop=[5, None]), OptionError, r"stop\[1\]"),
    (lambda s: s.generate([5], stop=[512]), OptionError, r"stop\[0\]"),
    (lambda s: s.generate([5], stop=[-1]), OptionError, r"stop\[0\]"),
    (lambda s: s.generate([5], stop=[True]), OptionError, r"stop\[0\]"),
    (lambda s: s.generate([5], stop=""), OptionError, "stop"),
    (lambda s: s.generate([5], stop=b"x"), OptionError, "stop"),
    (lambda s: s.generate([5], stop={"x": 1}), OptionError, "stop"),
    (lambda s: s.generate([5], mask=[1, 2]), OptionError, "mask"),
    (lambda s: s.generate([5], progress="yes"), OptionError, "progress"),
    (lambda s: s.generate([5], temperature="hot"), OptionError, "temperature"),
    (lambda s: s.generate([5], temperature=-1), OptionError, "temperature"),
    (lambda s: s.generate([5], temperature=float("nan")), OptionError, "temperature"),
    (lambda s: s.generate([5], top_p=1.5), OptionError, "top_p"),
    (lambda s: s.generate([5], top_k=-1), OptionError, "top_k"),
    (lambda s: s.generate([5], top_k=2.0), OptionError, "top_k"),
    (lambda s: s.generate([5], min_p=2), OptionError, "min_p"),
    (lambda s: s.generate([5], seed=-1), OptionError, "seed"),
    (lambda s: s.generate([5], seed=2**64), OptionError, "seed"),
    (lambda s: s.generate([5], seed="1"), OptionError, "seed"),
    (lambda s: s.generate([5], logit_bias={512: 1}), OptionError, "logit_bias"),
    (lambda s: s.generate([5], logit_bias=[1]), OptionError, "logit_bias"),
    (lambda s: s.generate([5], top_logprobs=5), OptionError, "logprobs"),
    (lambda s: s.generate([5], logprobs=2), OptionError, "logprobs"),
    (lambda s: s.generate([5], presence_penalty=3), OptionError, "presence_penalty"),
    (lambda s: s.generate([5], frequency_penalty="x"), OptionError, "frequency_penalty"),
    (lambda s: s.generate([5], repetition_penalty=0), OptionError, "repetition_penalty"),
    (lambda s: s.generate([5], max_token=5), OptionError, "did you mean max_tokens"),
    (lambda s: s.generate([5], n=2, best_of=3), OptionError, "best_of: unknown"),
    (lambda s: s.generate([5], tools=[]), OptionError, "tools"),
    (lambda s: s.agenerate([5], max_token=5), OptionError, "max_tokens"),
    (lambda s: s.chat([{"role": "user", "content": "x"}]), Ds4Error, "chat markers"),
]


@pytest.mark.parametrize(("call", "kind", "word"), CALLS)
def test_calls_refuse(session: Session, call: Callable[[Session], Any], kind: type[Exception], word: str) -> None:
    """The right class, a message that names the culprit, before any work: `session` checks that nothing changed."""
    epoch, state = session.epoch, live(session)
    with pytest.raises(kind, match=word):
        call(session)
    assert live(session) == state
    assert session.epoch == epoch, "a refused call does not disturb a running generation"


def test_all_problems_at_once(session: Session) -> None:
    with pytest.raises(OptionError) as caught:
        session.generate([5], temperature=-1, top_p=7, top_k=1.5)
    assert all(name in str(caught.value) for name in ("temperature", "top_p", "top_k"))


def test_a_refused_call_does_not_end_a_generation(session: Session) -> None:
    running = session.generate(HELD, max_tokens=6, temperature=0)
    first = next(running)
    for call, kind, _ in CALLS:
        with pytest.raises(kind):
            call(session)
    assert [first.token, *(piece.token for piece in running if piece.token is not None)] == running.result.tokens
    session.truncate(len(HELD))


# ---- rows ----------------------------------------------------------------------------------------------------------


def test_logits_choices_have_the_documented_shapes() -> None:
    oracle = stepped("bf16", 1, 400)
    with tiny().session(chunk=16) as session:
        rows = session.prefill(HELD, logits="all")
        assert rows is not None and rows.dtype == np.float32 and rows.shape == (33, 512)
        assert same_bits(rows, oracle.rows[:33])
        last = session.prefill(oracle.ids[33:50])
        assert last is not None and last.dtype == np.float32 and same_bits(last, oracle.rows[49:50])
        assert session.prefill(oracle.ids[50:51], logits=None) is None
        assert same_bits(session.step(oracle.ids[51:59]), oracle.rows[51:59])


def test_a_step_of_eight_works_with_any_chunk() -> None:
    oracle = stepped("bf16", 1, 400)
    for chunk in (1, 2, 7):
        with tiny().session(chunk=chunk) as session:
            assert session.chunk == chunk
            assert same_bits(session.step(oracle.ids[:8]), oracle.rows[:8])


def test_returned_rows_are_the_callers_own() -> None:
    with tiny().session() as session:
        first = session.step([5])
        copy = first.copy()
        session.step([6])
        first[:] = 0  # writable, and nothing looks at it
        session.truncate(0)
        assert same_bits(session.step([5]), copy)


def test_the_whole_context_can_be_used() -> None:
    oracle = stepped("bf16", 1, 400)
    with tiny().session(context=50) as session:
        session.prefill(oracle.ids[:49], logits=None)
        assert same_bits(session.step(oracle.ids[49:50]), oracle.rows[49:50])
        for call in (session.step, session.prefill):
            with pytest.raises(ContextError, match="context"):
                call([5])
        assert live(session) == oracle.states[50]


# ---- closed things -------------------------------------------------------------------------------------------------


def test_a_closed_session_refuses_everything() -> None:
    session = tiny().session()
    session.prefill(HELD, logits=None)
    running = session.generate(HELD, max_tokens=5, temperature=0)
    next(running)
    session.close()
    session.close()
    assert session.closed
    assert "closed" in repr(session)
    calls: list[Callable[[], Any]] = [
        lambda: session.prefill([5]),
        lambda: session.step([5]),
        lambda: session.mark(),
        lambda: session.truncate(0),
        lambda: session.rewind(0),
        lambda: session.tokens,
        lambda: session.position,
        lambda: session.generate([5]),
        lambda: next(running),
    ]
    for call in calls:
        with pytest.raises(StateError, match="closed"):
            call()
    session.cancel()  # nothing to stop


def test_a_closed_model_makes_no_sessions_and_open_ones_go_on() -> None:
    oracle = stepped("bf16", 1, 400)
    model = Model.open(TINY / "bf16", threads=1)
    session = model.session()
    session.prefill(HELD, logits=None)
    model.close()
    model.close()
    assert "closed" in repr(model)
    with pytest.raises(StateError, match="closed"):
        model.session()
    with pytest.raises(StateError, match="closed"):
        _ = model.backend
    del model
    assert same_bits(session.step([int(oracle.ids[33])])[0], oracle.rows[33])
    session.close()


def test_context_managers_close() -> None:
    with Model.open(TINY / "bf16", threads=1) as model, model.session() as session:
        session.step([5])
    assert session.closed
    with pytest.raises(StateError):
        model.session()


# ---- threads -------------------------------------------------------------------------------------------------------


class Busy:
    """A session in a long prefill in another thread, until it is cancelled."""

    def __init__(self, session: Session) -> None:
        self.session, self.begun = session, threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work)
        self.thread.start()
        assert self.begun.wait(60)

    def _work(self) -> None:
        try:
            self.session.prefill(tokens_of(3, 3500, 4000), logits=None, progress=lambda _: self.begun.set())
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.session.cancel()
        self.thread.join(60)
        assert not self.thread.is_alive()


def test_a_second_thread_gets_an_error_and_the_first_goes_on() -> None:
    with nano().session(context=4000, chunk=32) as session:
        session.prefill([5, 6, 7], logits=None)
        busy = Busy(session)
        try:
            calls: list[Callable[[], Any]] = [
                lambda: session.step([5]),
                lambda: session.prefill([5]),
                lambda: session.truncate(0),
                lambda: session.rewind(0),
                lambda: session.mark(),
                lambda: session.generate([5], max_tokens=1).finish(),
                lambda: session.close(),
            ]
            for call in calls:
                with pytest.raises(StateError, match="busy"):
                    call()
            assert busy.thread.is_alive()
        finally:
            busy.stop()
        assert isinstance(busy.error, ds4v41.Cancelled)
        held = session.tokens
        assert held == [5, 6, 7, *tokens_of(3, 3500, 4000)[: len(held) - 3].tolist()]
        session.rewind(3)
        assert_as_fresh(session, [5, 6, 7])


def test_opened_here_used_there_closed_elsewhere() -> None:
    oracle, out = stepped("bf16", 1, 400), []
    session = Model.open(TINY / "bf16", threads=2).session()
    for work in (lambda: out.append(session.prefill(HELD, logits="all")), session.close):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert session.closed
    assert same_bits(out[0], oracle.rows[:33])


def test_interleaved_generations_are_refused() -> None:
    with tiny().session() as session:
        one = session.generate(HELD, max_tokens=5, temperature=0)
        next(one)
        two = session.generate(HELD[:20], max_tokens=5, temperature=0)
        next(two)
        with pytest.raises(StateError, match="another call"):
            next(one)
        assert one.result.finish_reason == "cancelled"
        assert two.finish().tokens == session.generate(HELD[:20], max_tokens=5, temperature=0).finish().tokens


# ---- reports -------------------------------------------------------------------------------------------------------


def test_progress_counts_every_token() -> None:
    seen: list[ds4v41.Progress] = []
    with tiny().session(chunk=16) as session:
        session.prefill(HELD, logits=None, progress=seen.append)
    # The end of every chunk is told; on a slow machine also what is done of one.
    assert all((p.total, p.cached) == (33, 0) for p in seen)
    done = [p.processed for p in seen]
    assert done == sorted(done) and {16, 32, 33} <= set(done) and done[-1] == 33
    assert all(a.processed <= b.processed and a.seconds <= b.seconds for a, b in itertools.pairwise(seen))


def test_reports_are_readable() -> None:
    model = tiny()
    with model.session() as session:
        result = session.generate(HELD, max_tokens=3, temperature=0).finish()
        for thing in (model, session, session.stats, result, model.plan()[0]):
            assert repr(thing) and str(thing)
        for thing in (model, session.stats, result):
            assert "<" in thing._repr_html_()
        assert "8 layers" in repr(model)
        assert "position 35" in repr(session)
        assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.total_tokens) == (33, 3, 36)
        assert session.stats.decoded == 2
