"""Forks, replays, restores and saved sessions with a drafter: the same tokens, and drafting goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ds4v41 import KVStore, Session
from ds4v41.drafter import Drafter
from ds4v41.model import Model

CONTEXT = 700
PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return"


@pytest.fixture(scope="module")
def nano() -> Iterator[tuple[Model, Drafter]]:
    with Model.open(threads=1) as model:
        yield model, Drafter.open(None, model)


def text(session: Session, prompt: list[int], n: int = 30) -> list[int]:
    done = session.generate(prompt, max_tokens=n, temperature=0.0, drafting=4 if session.drafter else "off").finish()
    return done.tokens


@pytest.fixture(scope="module")
def expected(nano: tuple[Model, Drafter]) -> tuple[list[int], list[int], list[int]]:
    """(prompt, what follows it, what follows after 30 tokens more than half of all)."""
    model, _ = nano
    prompt = model.tokenizer.encode(PROMPT, add_bos=True)
    with model.session(CONTEXT) as serial:
        first = text(serial, prompt)
        again = text(serial, [*prompt, *first[:10], *prompt[1:]])
    return prompt, first, again


def test_a_fork_drafts_from_the_same_rows(nano: tuple[Model, Drafter], expected: tuple[list[int], ...]) -> None:
    model, drafter = nano
    prompt, first, again = expected
    with model.session(CONTEXT, drafter=drafter) as s:
        s.prefill(prompt)
        known = s._ext.draft_context
        twin = s.fork()
        assert twin._ext.draft_context == known > 0 and twin.drafter is drafter
        assert text(s, prompt) == first and text(twin, prompt) == first
        assert text(twin, [*prompt, *first[:10], *prompt[1:]]) == again
        assert text(s, prompt) == first
        twin.close()


def test_a_replay_and_a_restore_keep_the_tokens(
    nano: tuple[Model, Drafter], expected: tuple[list[int], ...], tmp_path: Path
) -> None:
    model, drafter = nano
    prompt, first, again = expected
    store = KVStore(tmp_path / "s", budget="64 MiB")
    with model.session(CONTEXT, drafter=drafter, retain=0, chunk=16, store=store) as s:
        assert text(s, prompt) == first
        s.prefill(np.resize(np.array(prompt, np.int32), 500), None)
        s.rewind(len(prompt))
        assert s.stats.replayed > 0
        assert text(s, prompt) == first
        s.save(tmp_path / "file")
    with model.session(CONTEXT, drafter=drafter, store=store) as s:
        assert text(s, prompt) == first
        assert s.stats.restored > 0
        assert text(s, [*prompt, *first[:10], *prompt[1:]]) == again
    with model.load_session(tmp_path / "file", CONTEXT, drafter=drafter) as s:
        assert text(s, prompt) == first
    store.close()


def test_a_checkpoint_holds_no_rejected_drafts(nano: tuple[Model, Drafter], expected: tuple[list[int], ...]) -> None:
    model, drafter = nano
    prompt, first, _ = expected
    store = KVStore(None)
    with model.session(CONTEXT, drafter=drafter, store=store) as s:
        for n in range(1, 9):  # ends in the middle of blocks
            assert text(s, prompt, n) == first[:n]
            assert list(s.tokens) == [*prompt, *first[: n - 1]]
            assert s.stats.stored is not None and s.stats.stored.position == len(s.tokens)
