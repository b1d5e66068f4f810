"""Going back: marks, truncation, rewind, and runs that fail half-way. The bits are always those of a session that never
went further."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from ds4v41 import Cancelled, Mark, OptionError, Session, StateError

from .support import MODES, assert_as_fresh, fresh, live, small, stepped, tiny, tokens_of

WINDOW = 16
LONGEST = 400


def failing_run(session: Session, ids: np.ndarray, layer: int) -> None:
    """A run that breaks off in front of a layer, after the layers before it have written their rows."""
    with pytest.raises(OptionError, match="float32"):
        session._ext.trace_run(np.ascontiguousarray(ids, np.int32), "none", streams={layer: "no array"})


# ---- truncation, position by position ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_truncate_everywhere(mode: str) -> None:
    """From 400 down, by 1 to 23 at a time, within everything retained; odd positions of ratio 2 included."""
    oracle = stepped(mode, 1, LONGEST)
    with tiny(mode).session(decoder="all") as session:
        session.prefill(oracle.ids, logits=None)
        position, hop = LONGEST, 1
        while position > 0:
            position = max(0, position - hop)
            hop = hop % 23 + 2
            session.truncate(position)
            assert session.tokens == oracle.ids[:position].tolist()
            assert live(session) == oracle.states[position], position
            assert session.step([int(oracle.ids[position])]).tobytes() == oracle.rows[position].tobytes(), position


@pytest.mark.parametrize(
    ("at", "back"),
    [(at, b) for at in (15, 16, 17, 64, 65, 199, 200) for b in (1, 2, 7, 8, 9, 15, 16, 17, 18, 40) if b <= at],
)
def test_truncate_after_the_ring_wrapped(at: int, back: int) -> None:
    """retain=40 and small chunks: the rings (of 40 + 16 + 4 rows) wrap many times."""
    oracle = stepped("bf16", 1, LONGEST)
    with tiny().session(retain=40, chunk=4) as session:
        session.prefill(oracle.ids[:at], logits=None)
        session.truncate(at - back)
        assert live(session) == oracle.states[at - back]
        other = tokens_of(99, 60)
        session.prefill(other, logits=None)
        assert_as_fresh(session, [*oracle.ids[: at - back], *other])


@settings(max_examples=settings().max_examples // 3)
@given(st.integers(0, 60), st.integers(1, 40), st.integers(1, 130))
def test_retain_is_a_promise(retain: int, chunk: int, n: int) -> None:
    """Any position up to `retain` back can be reached; beyond it either the same bits or a StateError."""
    oracle = stepped("bf16", 1, LONGEST)
    for back in {0, 1, retain // 2, retain - 1, retain, retain + 1, retain + chunk, retain + chunk + WINDOW, n}:
        if not 0 <= back <= n:
            continue
        with tiny().session(retain=retain, chunk=chunk) as session:
            session.prefill(oracle.ids[:n], logits=None)
            try:
                session.truncate(n - back)
            except StateError:
                assert back > retain
                assert live(session) == oracle.states[n], "a refusal changes nothing"
            else:
                assert live(session) == oracle.states[n - back]


def test_truncate_to_nothing_and_start_again() -> None:
    oracle = stepped("bf16", 2, LONGEST)
    with tiny().session(retain=0, chunk=5) as session:
        for n in (1, 2, 31, 200):
            session.prefill(oracle.ids[:n], logits=None)
            assert live(session) == oracle.states[n]
            session.truncate(0)
            assert session.tokens == []
            assert live(session) == oracle.states[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position", [0, 1, 2, 15, 16, 17, 150, 151, 299, 300])
def test_rewind_reaches_every_position(mode: str, position: int) -> None:
    """Even where the window rows are gone: they are computed again, and stats say so."""
    oracle = stepped(mode, 1, LONGEST)
    with tiny(mode).session(retain=0, chunk=16) as session:
        session.prefill(oracle.ids[:300], logits=None)
        session.rewind(position)
        assert live(session) == oracle.states[position]
        assert session.step([int(oracle.ids[position])]).tobytes() == oracle.rows[position].tobytes()
        assert session.stats.reused + session.stats.prefilled == position
        if 1 < position < 280:  # position 1 is reached by running the one token again
            assert "not kept" in session.stats.why


# ---- marks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", [0, 1, 2, 15, 16, 17, 33, 100, 101])
def test_a_mark_survives_many_wraps(mode: str, at: int) -> None:
    oracle = stepped(mode, 1, LONGEST)
    other = tokens_of(77, 150)
    with tiny(mode).session(retain=0, chunk=8) as session:
        if at:
            session.prefill(oracle.ids[:at], logits=None)
        mark = session.mark()
        for ids in (oracle.ids[at:300], other, oracle.ids[at : at + 3], other[:149]):
            session.prefill(ids, logits=None)
            assert mark.valid
            session.truncate(mark)
            assert session.position == mark.position == at
            assert live(session) == oracle.states[at]
        assert session.step([int(oracle.ids[at])]).tobytes() == oracle.rows[at].tobytes()


def test_many_marks_at_once() -> None:
    """A mark at every 7th position; back to them from the newest to the oldest."""
    oracle = stepped("bf16", 2, LONGEST)
    with tiny().session(retain=0, chunk=3) as session:
        marks = []
        for begin in range(0, 210, 7):
            marks.append(session.mark())
            session.prefill(oracle.ids[begin : begin + 7], logits=None)
        for mark in reversed(marks):
            session.truncate(mark)
            assert live(session) == oracle.states[mark.position]
            assert session.step([7]).tobytes() == fresh(tiny(), tuple(oracle.ids[: mark.position].tolist()))[1]


def test_a_mark_that_was_passed_backwards_is_refused() -> None:
    ids = tokens_of(1, 60)
    with tiny().session() as session:
        session.prefill(ids[:40], logits=None)
        mark = session.mark()
        session.truncate(39)
        with pytest.raises(StateError, match="no longer valid"):
            session.truncate(mark)
        session.prefill(ids[:20], logits=None)  # past its position, with other tokens
        with pytest.raises(StateError, match="no longer valid"):
            session.truncate(mark)
        assert_as_fresh(session, [*ids[:39], *ids[:20]])


def test_marks_outlive_their_session() -> None:
    session = tiny().session()
    session.prefill([5, 6, 7], logits=None)
    mark = session.mark()
    session.close()
    assert mark.position == 3
    with pytest.raises(StateError, match="closed"):
        session.truncate(mark)


def test_back_to_a_mark_at_the_beginning_leaves_a_session_like_new() -> None:
    """Window rows written since then can be gone back to."""
    ids = tokens_of(1, 250)
    with tiny().session(retain=0, chunk=16) as session:
        mark = session.mark()
        session.prefill(ids[:200], logits=None)
        session.truncate(mark)
        session.prefill(ids[:10], logits=None)
        session.truncate(5)
        assert_as_fresh(session, ids[:5].tolist())


def test_a_mark_of_another_session_is_refused() -> None:
    a, b = tokens_of(1, 50), tokens_of(2, 100)
    with tiny().session(retain=0, chunk=16) as one, tiny().session(retain=0, chunk=16) as two:
        one.prefill(a, logits=None)
        two.prefill(b, logits=None)
        with pytest.raises(StateError, match="another session"):
            two.truncate(one.mark())
        assert_as_fresh(two, b.tolist())


# ---- runs that fail half-way ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "at", "n"),
    [("bf16", at, n) for at in (0, 1, 2, 17, 101) for n in (1, 2, 16, 70, 140)] + [("fp8", 31, 3), ("fp32", 30, 65)],
)
def test_a_run_that_fails_leaves_no_trace(mode: str, at: int, n: int) -> None:
    """In front of each layer; the window rings, the open pair and the compressed rows are as if it had not begun."""
    oracle, other = stepped(mode, 1, LONGEST), tokens_of(55, 140)
    with tiny(mode).session(context=512, retain=0, chunk=140) as session:
        if at:
            session.prefill(oracle.ids[:at], logits=None)
        mark = session.mark()
        for layer in range(session.model.config.num_hidden_layers):
            failing_run(session, other[:n], layer)
            assert session.position == at
            assert live(session) == oracle.states[at], f"layer {layer}"
        assert session.step([int(oracle.ids[at])]).tobytes() == oracle.rows[at].tobytes()
        session.truncate(mark)
        assert live(session) == oracle.states[at]


def test_cancelled_before_it_begins() -> None:
    oracle = stepped("bf16", 1, LONGEST)
    with tiny().session() as session:
        session.prefill(oracle.ids[:33], logits=None)
        session._ext.cancel()
        with pytest.raises(Cancelled):
            session._ext.run(oracle.ids[33:60], "none")
        assert live(session) == oracle.states[33]
        session.prefill(oracle.ids[33:60], logits=None)  # a new call forgets the old cancel
        assert live(session) == oracle.states[60]


def test_a_cancelled_truncation_keeps_marks_honest() -> None:
    """Going far back to an odd position runs one token again. When that is cancelled the session stands there all the
    same and runs it later; a mark at the position must not come back with other rows after other tokens were read."""
    ids = tokens_of(1, 200)
    with tiny().session() as session:
        session.prefill(ids[:51], logits=None)
        mark = session.mark()
        session.prefill(ids[51:], logits=None)
        session._ext.cancel()
        with pytest.raises(Cancelled):
            session._ext.truncate(51)
        session._ext.clear_cancel()
        held = session.tokens
        assert held == ids[:51].tolist() and not session._ext.ready
        assert session._ext.complete() == 1
        assert live(session) == fresh(tiny(), tuple(held))[0]
        session.step([(int(ids[len(held)]) + 1) % 512])
        try:
            session.truncate(mark)
        except StateError:
            return
        assert session.tokens == ids[:51].tolist()
        assert_as_fresh(session, ids[:51].tolist())


# ---- everything in any order ---------------------------------------------------------------------------------------


class GoingBack(RuleBasedStateMachine):
    """A session against a plain list of tokens."""

    marks: Bundle[tuple[Mark, list[int]]] = Bundle("marks")

    @initialize(retain=st.sampled_from([0, 1, 9, 40, 200]), chunk=st.sampled_from([1, 3, 8, 33, 200]))
    def open(self, retain: int, chunk: int) -> None:
        self.session = small().session(context=120, retain=retain, chunk=chunk)
        self.held: list[int] = []
        self.n_calls = 0

    def _ids(self, n: int, variant: int) -> list[int]:
        """Tokens that depend on little, so that the oracle's cache is hit often."""
        n = min(n, 120 - len(self.held))
        return [int(i) for i in tokens_of(variant, 60, 320)[:n]]

    @rule(n=st.integers(1, 60), variant=st.integers(0, 2))
    def prefill(self, n: int, variant: int) -> None:
        if ids := self._ids(n, variant):
            self.session.prefill(ids, logits=None)
            self.held += ids

    @rule(n=st.integers(1, 8), variant=st.integers(0, 2))
    def step(self, n: int, variant: int) -> None:
        if ids := self._ids(n, variant):
            self.session.step(ids)
            self.held += ids

    @rule(n=st.integers(1, 60), layer=st.integers(0, 4))
    def fail(self, n: int, layer: int) -> None:
        if ids := self._ids(min(n, self.session.chunk), 3):
            failing_run(self.session, np.array(ids), layer)

    @rule(target=marks)
    def mark(self) -> Any:
        return self.session.mark(), list(self.held)

    @rule(pair=marks)
    def truncate_to_mark(self, pair: tuple[Mark, list[int]]) -> None:
        mark, held = pair
        if not mark.valid:
            with pytest.raises(StateError):
                self.session.truncate(mark)
            return
        self.session.truncate(mark)
        self.held = list(held)

    @precondition(lambda self: self.held)
    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        position = int(share * len(self.held))
        try:
            self.session.truncate(position)
        except StateError:
            assert position < len(self.held), "staying is always possible"
        else:
            self.held = self.held[:position]

    @precondition(lambda self: self.held)
    @rule(back=st.integers(0, 20))
    def rewind(self, back: int) -> None:
        position = max(0, len(self.held) - back)
        self.session.rewind(position)
        self.held = self.held[:position]

    @rule()
    def empty(self) -> None:
        self.session.truncate(0)
        self.held = []

    @invariant()
    def same_bits(self) -> None:
        if not hasattr(self, "session"):
            return
        assert self.session.tokens == self.held
        assert live(self.session) == fresh(small(), tuple(self.held))[0]

    def teardown(self) -> None:
        if hasattr(self, "session"):
            if len(self.held) < 120:
                assert self.session.step([7]).tobytes() == fresh(small(), tuple(self.held))[1]
            self.session.close()


TestGoingBack = GoingBack.TestCase
TestGoingBack.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=25)
