"""E2: with a drafter the same tokens come out, whatever it proposes; rows of a verify step have the serial bits."""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4v41 import _ext
from ds4v41.checkpoint.convert import convert, convert_drafter
from ds4v41.drafter import Drafter
from ds4v41.errors import CheckpointError, NumericsError, OptionError, StateError
from ds4v41.generation import GenerationOptions, TokenStream
from ds4v41.model import Model
from ds4v41.sampling import Sampler, SamplingParams
from ds4v41.session import Session
from ds4v41.synth import write_official
from tests.golden import load

from .proposers import FakeProposer, script

CONTEXT = 256


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[Model, Drafter]]:
    with Model.open(load.checkpoint_folder("fp8fp4"), threads=1) as model:
        yield model, Drafter.open(None, model)


@pytest.fixture(scope="module")
def nano() -> Iterator[tuple[Model, Drafter]]:
    with Model.open(threads=2) as model:
        yield model, Drafter.open(None, model)


def drawn(session: Session, prompt: list[int], **options: Any) -> list[tuple[int, int]]:
    """(token, position) of a text."""
    stream = TokenStream(session, np.array(prompt, np.int32), GenerationOptions.from_options(options, session.model))
    return [(draw.token, position) for draw, position in stream]


def both(model: Model, drafter: Drafter, prompt: list[int], **options: Any) -> tuple[Session, Session]:
    """The same text drafted and serial; checks tokens and states, returns the two sessions."""
    drafting = options.pop("drafting")
    plain, drafted = model.session(CONTEXT), model.session(CONTEXT, drafter=drafter)
    want = drawn(plain, prompt, **options)
    assert drawn(drafted, prompt, drafting=drafting, **options) == want
    assert drafted.tokens == plain.tokens
    assert drafted._ext.live_bytes() == plain._ext.live_bytes()
    return plain, drafted


OPTIONS = st.one_of(
    st.just({"temperature": 0.0}),
    st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.3, 1.0, 1.5]), "seed": st.integers(0, 2**64 - 1)},
        optional={
            "top_k": st.integers(1, 40),
            "top_p": st.sampled_from([0.5, 0.9, 1.0]),
            "min_p": st.sampled_from([0.0, 0.05]),
            "presence_penalty": st.sampled_from([0.0, 1.0]),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
        },
    ),
)
SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW
@given(
    prompt=st.lists(st.integers(4, 511), min_size=1, max_size=40),
    n=st.integers(1, 40),
    drafting=st.sampled_from(["auto", 0, 1, 2, 3, 4, 5]),
    options=OPTIONS,
)
def test_tiny_same_tokens_and_state(
    tiny: tuple[Model, Drafter], prompt: list[int], n: int, drafting: str | int, options: dict[str, Any]
) -> None:
    both(*tiny, prompt, max_tokens=n, drafting=drafting, **options)


@settings(SLOW, max_examples=12)
@given(start=st.integers(0, 400), length=st.integers(1, 40), drafting=st.integers(1, 5), options=OPTIONS)
def test_nano_same_tokens_and_state(
    nano: tuple[Model, Drafter], start: int, length: int, drafting: int, options: dict[str, Any]
) -> None:
    text = "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n" * 8
    ids = nano[0].tokenizer.encode(text)
    both(*nano, ids[start : start + length] or [5], max_tokens=32, drafting=drafting, **options)


def test_long_texts_are_the_same(nano: tuple[Model, Drafter]) -> None:
    model, drafter = nano
    prompt = model.tokenizer.encode("class Stack:\n    def push(self, item):\n", add_bos=True)
    for n, options in ((520, {"temperature": 0.0}), (260, {"temperature": 1.0, "seed": 11})):
        plain, drafted = model.session(640), model.session(640, drafter=drafter)
        want = drawn(plain, prompt, max_tokens=n, **options)
        assert drawn(drafted, prompt, max_tokens=n, drafting=5, **options) == want
        assert drafted._ext.live_bytes() == plain._ext.live_bytes()
        assert drafted.stats.drafter is not None and drafted.stats.drafter.accepted > 0


@SLOW
@given(kind=st.sampled_from(["wrong", "right", "random"]), drafts=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_any_proposals_give_the_same_tokens(
    tiny: tuple[Model, Drafter], kind: str, drafts: int, seed: int
) -> None:
    model, drafter = tiny
    rng = random.Random(seed)
    prompt = [rng.randrange(4, 512) for _ in range(rng.randrange(1, 20))]
    options = {"temperature": rng.choice([0.0, 1.0]), "seed": seed, "max_tokens": rng.randrange(1, 40)}
    plain = model.session(CONTEXT)
    want = drawn(plain, prompt, **options)
    tokens = [token for token, _ in want]
    drafted = model.session(CONTEXT, drafter=drafter)
    script(drafted, len(prompt), tokens, kind, rng)
    assert drawn(drafted, prompt, drafting=drafts, **options) == want
    assert drafted._ext.live_bytes() == plain._ext.live_bytes()
    stats = drafted.stats.drafter
    assert stats is not None
    assert stats.accepted == 0 if kind == "wrong" else stats.accepted >= 0
    if kind == "right":
        assert stats.accepted == len(want) - 1 - stats.cycles - stats.serial_tokens


@SLOW
@given(prompt=st.lists(st.integers(4, 511), min_size=1, max_size=40), extra=st.lists(st.integers(4, 511), max_size=6))
def test_verify_rows_have_the_serial_bits(tiny: tuple[Model, Drafter], prompt: list[int], extra: list[int]) -> None:
    model, _ = tiny
    with model.session(CONTEXT) as one, model.session(CONTEXT) as many:
        for session in (one, many):
            session.prefill(prompt)
        rows = many.verify([9, *extra])
        for i, token in enumerate([9, *extra]):
            assert np.array_equal(one.feed(token).view(np.uint32), rows[i].view(np.uint32))


@pytest.mark.parametrize("stop_at", range(7))
def test_a_stop_id_ends_it_at_any_row(tiny: tuple[Model, Drafter], stop_at: int) -> None:
    model, drafter = tiny
    prompt = [31, 64, 90]
    tokens = [t for t, _ in drawn(model.session(CONTEXT), prompt, temperature=1.0, seed=4, max_tokens=24)]
    first = 8 + stop_at
    assert tokens.index(tokens[first]) == first
    plain, drafted = both(
        model, drafter, prompt, temperature=1.0, seed=4, max_tokens=24, stop=[tokens[first]], drafting=5
    )
    assert plain.position == drafted.position == len(prompt) + first - (0 if first else 1)


def test_the_context_end_is_the_same(tiny: tuple[Model, Drafter]) -> None:
    model, drafter = tiny
    for context in range(20, 30):
        plain, drafted = model.session(context), model.session(context, drafter=drafter)
        want = drawn(plain, [5, 6, 7], temperature=0.0)
        assert drawn(drafted, [5, 6, 7], temperature=0.0, drafting=5) == want
        assert len(want) == context - 3


@pytest.mark.parametrize("drafting", range(6))
def test_short_prompts_and_tails(tiny: tuple[Model, Drafter], drafting: int) -> None:
    """BL-013: prompts of 1 to 16 tokens, and 0 to 16 tokens behind what the session holds, at every block length."""
    model, drafter = tiny
    line = [(37 * i) % 500 + 4 for i in range(40)]
    with model.session(CONTEXT) as plain, model.session(CONTEXT, drafter=drafter) as drafted:

        def check(prompt: list[int]) -> None:
            want = drawn(plain, prompt, temperature=0.0, max_tokens=7)
            assert drawn(drafted, prompt, temperature=0.0, max_tokens=7, drafting=drafting) == want
            assert drafted._ext.live_bytes() == plain._ext.live_bytes()

        for n in range(1, 17):
            for session in (plain, drafted):
                session.rewind(0)
            check(line[:n])
        for n in range(17):
            for session in (plain, drafted):
                session.rewind(0)
                session.prefill(line[:20], None)
            check(line[: 20 + n])


def test_a_small_chunk_limits_the_rows(tiny: tuple[Model, Drafter]) -> None:
    model, drafter = tiny
    for chunk in (1, 2, 3):
        session = model.session(CONTEXT, drafter=drafter, chunk=chunk)
        want = drawn(model.session(CONTEXT), [5, 6, 7], temperature=0.0, max_tokens=20)
        assert drawn(session, [5, 6, 7], temperature=0.0, max_tokens=20, drafting=5) == want


def test_masks_see_the_same_calls(tiny: tuple[Model, Drafter]) -> None:
    model, drafter = tiny
    calls: list[list[int]] = []

    def mask(tokens: list[int]) -> list[int]:
        calls.append(tokens)
        return [t for t in range(4, 512) if (t + len(tokens)) % 3]

    plain, drafted = model.session(CONTEXT), model.session(CONTEXT, drafter=drafter)
    want = drawn(plain, [5, 6], temperature=1.0, seed=3, max_tokens=24, mask=mask)
    seen, calls[:] = list(calls), []
    assert drawn(drafted, [5, 6], temperature=1.0, seed=3, max_tokens=24, mask=mask, drafting=4) == want
    assert len({tuple(text) for text in calls}) == len(calls)  # nobody asks twice
    assert [text for text in calls if text in seen] == seen  # and what serial decoding asks is asked in its order


def test_text_and_stop_strings_are_the_same(nano: tuple[Model, Drafter]) -> None:
    model, drafter = nano
    with model.session(CONTEXT) as plain, model.session(CONTEXT, drafter=drafter) as drafted:
        for stop in ("return", "\n\n", "self.", "zzz"):
            options = {"temperature": 0, "max_tokens": 60, "stop": stop}
            want = plain.generate("def is_prime(n):\n", **options).finish()
            got = drafted.generate("def is_prime(n):\n", **options, drafting=5).finish()
            assert (got.text, got.tokens, got.stop) == (want.text, want.tokens, want.stop)
            assert drafted.tokens == plain.tokens


def test_the_session_looks_the_same_between_tokens(tiny: tuple[Model, Drafter]) -> None:
    model, drafter = tiny
    views = []
    for session, drafting in ((model.session(CONTEXT), "off"), (model.session(CONTEXT, drafter=drafter), 5)):
        options = GenerationOptions.from_options({"temperature": 0.0, "max_tokens": 30, "drafting": drafting}, model)
        seen = []
        for _ in TokenStream(session, np.array([4, 5, 6], np.int32), options):
            seen.append((session.position, session.tokens, session.room))
            if len(seen) % 7 == 3:
                mark = session.mark()
                seen[-1] = (*seen[-1], mark.position)
        views.append(seen)
    assert views[0] == views[1]


def test_left_in_the_middle_of_a_block(tiny: tuple[Model, Drafter]) -> None:
    """Stopping to read after any token leaves what serial would leave; going on from there is the same."""
    model, drafter = tiny
    for n in range(1, 14):
        after = []
        for session, drafting in ((model.session(CONTEXT), "off"), (model.session(CONTEXT, drafter=drafter), 5)):
            given = {"temperature": 0.0, "max_tokens": 30, "drafting": drafting}
            options = GenerationOptions.from_options(given, model)
            stream = iter(TokenStream(session, np.array([40, 50, 60], np.int32), options))
            for _ in range(n):
                next(stream)
            logits = session.step([8, 9])
            with pytest.raises(StateError, match="used by another call"):
                next(stream)
            after.append((session.tokens, logits.tobytes(), session._ext.live_bytes()))
        assert after[0] == after[1]


def test_rings_are_those_of_a_fresh_prefill(tiny: tuple[Model, Drafter]) -> None:
    """After any mix of prefill, steps, verifies, rejects, rewinds and marks, proposals equal those of a new session."""
    model, drafter = tiny
    rng = random.Random(7)
    session = model.session(CONTEXT, drafter=drafter, retain=64, chunk=32)
    marks: list[Any] = []
    for _ in range(60):
        what = rng.randrange(5)
        room = session.room - 8
        if what == 0 and room > 0:
            session.prefill([rng.randrange(4, 512) for _ in range(rng.randint(1, min(40, room)))])
        elif what == 1 and room > 0:
            session.step([rng.randrange(4, 512) for _ in range(rng.randint(1, 6))])
        elif what == 2 and session.position > 2:
            session.rewind(session.position - rng.randint(0, min(40, session.position - 1)))
            marks = [m for m in marks if m.position <= session.position]
        elif what == 3 and session.position > 0:
            marks.append(session.mark())
        elif marks:
            session.truncate(marks[-1])
        if session.position == 0:
            continue
        fresh = _ext.Session(model._handle(), CONTEXT, 256, 256, drafter._handle())
        fresh.run(np.array(session.tokens, np.int32), "none")
        assert fresh.draft_context == min(16, session.position)
        assert session._ext.draft_context == fresh.draft_context
        for one in (session._ext, fresh):
            one.draft_start(9, 5)
        for i in range(5):
            a, b = session._ext.draft_row(i, 11), fresh.draft_row(i, 11)
            assert np.array_equal(a[0], b[0]) and a[1:] == b[1:]


def test_two_sessions_interleaved_do_not_meet(tiny: tuple[Model, Drafter]) -> None:
    model, drafter = tiny
    prompts = ([5, 6, 7, 8], [300, 301])
    want = [drawn(model.session(CONTEXT), p, temperature=1.0, seed=1, max_tokens=24) for p in prompts]
    options = GenerationOptions.from_options({"temperature": 1.0, "seed": 1, "max_tokens": 24, "drafting": 4}, model)
    sessions = [model.session(CONTEXT, drafter=drafter) for _ in prompts]
    streams = [iter(TokenStream(s, np.array(p, np.int32), options)) for s, p in zip(sessions, prompts, strict=True)]
    got: list[list[tuple[int, int]]] = [[], []]
    for _ in range(24):
        for i, stream in enumerate(streams):
            draw, position = next(stream)
            got[i].append((draw.token, position))
    assert got == want


def test_a_step_says_how_certain_the_target_was(tiny: tuple[Model, Drafter]) -> None:
    """What the controller goes by, from plain steps and from blocks: the largest probability of the row."""
    model, drafter = tiny
    sampler = Sampler(SamplingParams(temperature=0.0), model.config.vocab_size)
    with model.session(CONTEXT) as plain, model.session(CONTEXT, drafter=drafter) as drafted:
        for session in (plain, drafted):
            session.prefill([5, 6, 7])
        token, wanted = 9, []
        for _ in range(4):
            z = plain.feed(token).astype(np.float64)
            wanted.append(1 / np.exp(z - z.max()).sum())
            token = int(z.argmax())
        first = drafted.feed_draw(9, sampler, None, True)
        assert drafted.feed_draw(first.token, sampler, None).chance is None
        drafted.truncate(4)
        text = plain.tokens[4:]
        draws = drafted.verify_draw(text, sampler, None)
        assert [first.chance, *(draw.chance for draw in draws)] == pytest.approx(wanted, rel=1e-4)


def test_windows_fill_in_two_goes(nano: tuple[Model, Drafter]) -> None:
    """The newest half first; after the second go drafts are those of windows that were filled at once. Where more than
    half a window is new, it is the newest half of that."""
    model, drafter = nano
    window, prompt = model.config.sliding_window, list(range(100, 300))
    with model.session(640, drafter=drafter) as whole, model.session(640, drafter=drafter) as halves:
        whole.prefill(list(range(1000, 1136)))
        whole.settle_drafter()  # leaves rows in its windows that nobody may read later
        whole.settle_drafter()
        whole.rewind(0)
        for session in (whole, halves):
            session.prefill(prompt)
        one, two = whole._ext, halves._ext
        for session in (whole, halves):
            assert session.settle_drafter() == window // 2
            session._ext.draft_start(9, 5, settled=True)
        assert np.array_equal(one.draft_row(4, 9)[0], two.draft_row(4, 9)[0])
        one.draft_start(9, 5)
        assert two.draft_unsettled == window // 2
        two.draft_start(9, 5, settled=True)
        assert two.draft_unsettled == window // 2
        assert not np.array_equal(one.draft_row(0, 9)[0], two.draft_row(0, 9)[0])
        assert halves.settle_drafter() == window // 2
        assert two.draft_unsettled == 0 and halves.settle_drafter() == 0
        two.draft_start(9, 5, settled=True)
        for i in range(5):
            assert np.array_equal(one.draft_row(i, 9)[0], two.draft_row(i, 9)[0])
        for token in range(20):
            halves.feed(token + 50)
        assert halves.settle_drafter() == 20 and two.draft_unsettled == 0
        for token in range(window // 2 + 10):
            halves.feed(token + 50)
        assert halves.settle_drafter() == window // 2 == two.draft_unsettled
        assert halves.settle_drafter() == window // 2
        whole.step(halves.tokens[200:206])
        for at in range(206, halves.position):
            whole.feed(halves.tokens[at])
        for ext in (one, two):
            ext.draft_start(9, 5)
        for i in range(5):
            assert np.array_equal(one.draft_row(i, 9)[0], two.draft_row(i, 9)[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere pages come as they are written")
def test_a_step_with_a_drafter_takes_no_page_of_it(nano: tuple[Model, Drafter]) -> None:
    """A page fault takes longer than the row that is kept."""
    model, drafter = nano
    taken = []
    for which in (None, drafter, None, drafter):  # the first two for what a process needs once
        with model.session(640, drafter=which) as session:
            session.prefill([5, 6, 7])
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for token in range(300):
                session.feed(token + 50)
            taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert taken[3] < taken[2] + 60  # its rows have 225 pages


# ---- faults ------------------------------------------------------------------------------------------------------


class Failing(FakeProposer):
    """Fails after some proposals."""

    def __init__(self, after: int, error: Exception) -> None:
        super().__init__(lambda anchor, most: [7] * most)
        self.after, self.error = after, error

    def propose(self, anchor: int, most: int, worth: Any) -> tuple[list[int], list[float]]:
        self.after -= 1
        if self.after < 0:
            raise self.error
        return super().propose(anchor, most, worth)


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("error", [NumericsError("NaN in the logits"), RuntimeError("device lost"), MemoryError()])
def test_a_drafter_fault_turns_drafting_off_and_nothing_else(
    tiny: tuple[Model, Drafter], after: int, error: Exception
) -> None:
    model, drafter = tiny
    want = drawn(model.session(CONTEXT), [5, 6], temperature=0.0, max_tokens=20)
    session = model.session(CONTEXT, drafter=drafter)
    session.proposer = lambda sampler, history, allowed: Failing(after, error)  # type: ignore[method-assign]
    assert drawn(session, [5, 6], temperature=0.0, max_tokens=20, drafting=3) == want
    assert session.stats.drafter is not None and session.stats.drafter.cycles == after
    assert type(error).__name__ in str(session.stats.drafter)
    assert session.drafter_fault is not None
    assert drawn(session, [5, 6], temperature=0.0, max_tokens=20, drafting=3) == want
    with pytest.raises(StateError, match="no drafter"):
        session._ext.draft_start(5, 1)


def test_nan_rows_of_the_drafter_are_a_fault(tiny: tuple[Model, Drafter]) -> None:
    model, drafter = tiny
    want = drawn(model.session(CONTEXT), [5, 6], temperature=1.0, seed=2, max_tokens=20)
    session = model.session(CONTEXT, drafter=drafter)
    session._ext.inject_fault("draft_nan", 3)
    assert drawn(session, [5, 6], temperature=1.0, seed=2, max_tokens=20, drafting=3) == want
    assert "NaN" in (session.drafter_fault or "")


def test_a_failed_verify_leaves_the_session_as_it_was(tiny: tuple[Model, Drafter]) -> None:
    model, drafter = tiny
    session, plain = model.session(CONTEXT, drafter=drafter), model.session(CONTEXT)
    for s in (session, plain):
        s.prefill([5, 6, 7])
    before = session._ext.live_bytes()
    with pytest.raises(Exception, match="token"):
        session.verify([8, 100_000])
    assert session._ext.live_bytes() == before and session.position == 3
    assert np.array_equal(session.step([9]), plain.step([9]))


def test_bad_numbers_of_draft_rows_are_left_to_serial_decoding(tiny: tuple[Model, Drafter]) -> None:
    """A row that serial decoding would not compute cannot end a text."""
    model, drafter = tiny
    want = drawn(model.session(CONTEXT), [5, 6], temperature=0.0, max_tokens=20)
    session = model.session(CONTEXT, drafter=drafter)
    real = session._ext

    class NoVerify:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def run(self, tokens: np.ndarray, logits: str, *rest: Any) -> Any:
            if logits == "all" and len(tokens) > 1:
                raise NumericsError("injected")
            return real.run(tokens, logits, *rest)

    session._ext = NoVerify()  # type: ignore[assignment]
    assert drawn(session, [5, 6], temperature=0.0, max_tokens=20, drafting=3) == want
    assert session.drafter_fault is None and session.tokens[:2] == [5, 6]


def test_a_failed_rollback_refuses_until_rewound(tiny: tuple[Model, Drafter]) -> None:
    model, drafter = tiny
    session, plain = model.session(CONTEXT, drafter=drafter), model.session(CONTEXT)
    for s in (session, plain):
        s.prefill([5, 6, 7])
    real = session._ext

    class NoTruncate:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def truncate(self, position: int) -> None:
            raise RuntimeError("injected")

    session.verify([8, 9, 10])
    session._ext = NoTruncate()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="injected"):
        session.step([11])
    for call in (lambda: session.step([11]), session.mark, lambda: drawn(session, [5, 6], max_tokens=1)):
        with pytest.raises(StateError, match="rewind"):
            call()
    session._ext = real
    with pytest.raises(StateError, match="rewind"):
        session.step([11])
    session.rewind(4)
    plain.step([8])
    assert session.tokens == plain.tokens == [5, 6, 7, 8]
    assert np.array_equal(session.step([11]), plain.step([11]))


# ---- opening and options -----------------------------------------------------------------------------------------


def test_a_drafter_belongs_to_one_model(tiny: tuple[Model, Drafter], nano: tuple[Model, Drafter]) -> None:
    with pytest.raises(StateError, match="another model"):
        tiny[0].session(CONTEXT, drafter=nano[1])
    with pytest.raises(CheckpointError, match=r"hidden_size is 128, the model has 256"):
        Drafter.open(load.checkpoint_folder("bf16"), nano[0])
    own = Drafter.open(load.checkpoint_folder("fp8fp4"), tiny[0])
    assert (own.block_size, own.n_stages) == (5, 3) and "3 stages" in repr(own)


@pytest.mark.parametrize("recipe", ["f16", "q4"])
def test_a_drafter_file_drafts(nano: tuple[Model, Drafter], recipe: str, tmp_path: Path) -> None:
    model, own = nano
    convert_drafter(model.path, tmp_path / "d.gguf", recipe, threads=1)
    drafter = Drafter.open(tmp_path / "d.gguf", model)
    prompt = model.tokenizer.encode("def add(a, b):\n", add_bos=True)
    _, drafted = both(model, drafter, prompt, temperature=0.0, max_tokens=60, drafting=5)
    _, reference = both(model, own, prompt, temperature=0.0, max_tokens=60, drafting=5)
    assert drafted.stats.drafter is not None and reference.stats.drafter is not None
    assert drafted.stats.drafter.accepted > 0.6 * reference.stats.drafter.accepted > 0


def test_a_drafter_of_other_weights_is_refused(tiny: tuple[Model, Drafter], tmp_path: Path) -> None:
    """Same shape, other weights: a file that knows its model says so; one that does not know is taken."""
    model, _ = tiny
    other = tmp_path / "other"
    write_official(other, model.config, seed=99, storage="fp8fp4", parts=("main", "engram", "drafter"))
    with pytest.raises(CheckpointError, match="made with other weights"):
        Drafter.open(other, model)
    convert_drafter(other, tmp_path / "other.gguf", "q4", threads=1)
    with pytest.raises(CheckpointError, match="made with other weights"):
        Drafter.open(tmp_path / "other.gguf", model)
    convert_drafter(model.path, tmp_path / "own.gguf", "q4", threads=1)
    assert Drafter.open(tmp_path / "own.gguf", model).block_size == 5
    convert(model.path, tmp_path / "model.gguf", "q4", threads=1)
    with Model.open(tmp_path / "model.gguf", threads=1) as same:  # other types, the same weights
        assert Drafter.open(tmp_path / "own.gguf", same).block_size == 5
        assert Drafter.open(model.path, same).block_size == 5
        with pytest.raises(CheckpointError, match="made with other weights"):
            Drafter.open(tmp_path / "other.gguf", same)
    unknown = tmp_path / "unknown"
    write_official(unknown, model.config, seed=99, storage="fp8fp4", parts=("drafter",))
    assert Drafter.open(unknown, model).block_size == 5


def test_the_command_line_shows_what_drafting_did(call: Any) -> None:
    options = ("generate", "def add(a, b):", "--max-tokens", "40", "--temperature", "0", "--stats")
    plain, drafted = call(*options), call(*options, "--drafter", "own")
    assert plain.out == drafted.out
    assert "drafter:" in drafted.err and "drafter:" not in plain.err
    assert call("generate", "x", "--drafter", "nowhere.gguf").code != 0


@pytest.mark.parametrize("wrong", [6, -1, True, "always", 2.5])
def test_wrong_drafting_options_are_refused(tiny: tuple[Model, Drafter], wrong: Any) -> None:
    with pytest.raises(OptionError, match="drafting: expected"):
        GenerationOptions.from_options({"drafting": wrong}, tiny[0])


def test_stats_count_every_token(nano: tuple[Model, Drafter]) -> None:
    model, drafter = nano
    session = model.session(CONTEXT, drafter=drafter)
    got = session.generate("def add(a, b):\n", max_tokens=80, temperature=0, stop=None, drafting=5).finish()
    stats = session.stats.drafter
    assert stats is not None
    assert stats.committed + stats.serial_tokens == len(got.tokens) - (got.finish_reason == "length")
    assert stats.accepted == sum(stats.accepted_at) and stats.drafted == sum(stats.verified_at)
    assert session.stats.decoded == stats.committed + stats.serial_tokens
    assert "cycles" in str(stats) and "drafter" in session.stats._repr_html_()
