"""Forks, replays, restores and saved sessions with a drafter: the same tokens, and drafting goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ds4v41 import KVStore, Session
from ds4v41.drafter import Drafter
from ds4v41.kvstore.format import FULL, Prefixes
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


@pytest.mark.parametrize("place", ["disk", "memory", "both"])
def test_a_frontier_without_drafter_state_is_replaced_by_one_with(
    place: str, nano: tuple[Model, Drafter], expected: tuple[list[int], ...], tmp_path: Path
) -> None:
    model, drafter = nano
    prompt, first, _ = expected
    memory = "8 MiB" if place == "both" else None
    folder = None if place == "memory" else tmp_path / "s"
    with KVStore(folder, budget="64 MiB", memory=memory) as store:

        def stored() -> dict[int, int]:
            full = store.find(Prefixes(model.store_root, np.array(prompt, np.int32))).frontiers
            return {at: store._holder(f.id)._files.drafter_rows(f.id) for at, f in full.items()}

        def sent() -> int:
            return store.stats().written_bytes

        with model.session(CONTEXT, store=store) as s:
            s.prefill(prompt)
        assert stored() == {len(prompt): 0}
        with model.session(CONTEXT, drafter=drafter) as s:
            s.prefill(prompt)
            rows = s._ext.draft_context
            s._store = store
            assert rows > 0 and s.checkpoint().kept
            once = sent()
            assert s.checkpoint().why == "it was stored before" and sent() == once
        assert stored() == {len(prompt): rows}
        with model.session(CONTEXT) as s:  # no step back
            s.prefill(prompt)
            s._store = store
            assert s.checkpoint().why == "it was stored before" and sent() == once
        assert stored() == {len(prompt): rows} and store.verify().clean
        with model.session(CONTEXT, drafter=drafter, store=store) as s:
            s.advance_to(np.array(prompt, np.int32))
            assert s.stats.restored == len(prompt) and s._ext.draft_context == rows
            assert text(s, prompt) == first
    if folder is not None:
        with KVStore(folder, budget="64 MiB") as store:
            assert store.verify().clean


def test_a_replaced_frontier_whose_row_was_not_written_is_no_damage(
    nano: tuple[Model, Drafter], expected: tuple[list[int], ...], tmp_path: Path
) -> None:
    """The process was killed between the rename and the row."""
    model, drafter = nano
    prompt = np.array(expected[0], np.int32)
    for name, own in (("with", drafter), ("without", None)):
        with KVStore(tmp_path / name, budget="64 MiB") as store, model.session(CONTEXT, drafter=own, store=store) as s:
            s.prefill(prompt)
    new = next((tmp_path / "with" / "objects").glob("*.frontier"))
    old = tmp_path / "without" / "objects" / new.name
    assert old.stat().st_size < new.stat().st_size
    old.write_bytes(new.read_bytes())
    with KVStore(tmp_path / "without", budget="64 MiB") as store:
        assert store.verify().clean and not store.stats().damaged
        assert not list((tmp_path / "without").glob("index.damaged*"))
        assert {i.bytes for i in store.ls() if i.kind == FULL} == {-(-new.stat().st_size // 4096) * 4096}


def test_a_read_only_store_takes_a_replaced_frontier_as_it_is(
    nano: tuple[Model, Drafter], expected: tuple[list[int], ...], tmp_path: Path
) -> None:
    """Its own index, in memory, is made again; that of the folder is not touched."""
    model, drafter = nano
    prompt = np.array(expected[0], np.int32)
    with KVStore(tmp_path / "s", budget="64 MiB") as store, model.session(CONTEXT, store=store) as s:
        s.prefill(prompt)
        with KVStore(tmp_path / "s", read_only=True) as reader:
            with model.session(CONTEXT, drafter=drafter) as other:
                other.prefill(prompt)
                other._store = store
                assert other.checkpoint().new_bytes > 0
            assert reader.verify().clean and not list((tmp_path / "s").glob("index.damaged*"))
            with model.session(CONTEXT, drafter=drafter, store=reader) as third:
                third.advance_to(prompt)
                assert third.stats.restored == len(prompt) and third._ext.draft_context > 0
