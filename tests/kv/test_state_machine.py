"""E3: whatever a session went through, it continues with the bits of one that never stopped. In both numeric classes,
and whatever happens to the files of its store."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ds4v41
from ds4v41.history import MATRIX_TAG
from ds4v41.kvstore.format import PAGE

from .support import model, reference, session, tokens

MOST = 1500
LONGEST = 4000  # of a prompt that comes as a whole
DECODERS = os.environ.get("DS4V41_E3_DECODERS", "cone cone cone all").split()


class Stop(Exception):
    """Raised by a progress callback."""


def damage(path: Path, how: str, at: float) -> None:
    """Spoil a file of a store. at: where, from 0 to 1."""
    data = bytearray(path.read_bytes())
    i = int(at * max(0, len(data) - 1))
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[:i])
    elif how == "longer":
        path.write_bytes(data + data[:7])
    elif how == "bit":
        data[i : i + 1] = bytes(b ^ 4 for b in data[i : i + 1])
        path.write_bytes(data)
    else:  # everything from there on
        data[i:] = bytes(b ^ 0x15 for b in data[i:])
        path.write_bytes(data)


class Machine(RuleBasedStateMachine):
    """Sessions with their expected histories; every rule acts on one of them and compares bits with a fresh run."""

    matrix = False

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[tuple[ds4v41.Session, list[int]]] = []
        self.store: ds4v41.KVStore | None = None
        self.folder = Path(mkdtemp(prefix="ds4v41-e3-"))
        self.saved: list[tuple[Path, list[int]]] = []
        self.seen: list[list[int]] = []

    @initialize(
        on_disk=st.booleans(),
        retain=st.sampled_from([0, 3, 24]),
        chunk=st.sampled_from([1, 5, 16, 64, 200]),  # the decoder's cone is 15 rows and the slack, which is `retain`
        decoder=st.sampled_from(DECODERS),
        budget=st.sampled_from(["64 MiB", "64 MiB", "600 KB"]),
        shared=st.booleans(),
    )
    def begin(self, on_disk: bool, retain: int, chunk: int, decoder: str, budget: str, shared: bool) -> None:
        self.options = {"retain": retain, "chunk": chunk, "decoder": decoder}
        self.tag = MATRIX_TAG if self.matrix else 0
        self.remote = f"file://{self.folder}/remote" if shared else None
        self.store = ds4v41.KVStore(self.folder / "store" if on_disk else None, budget=budget, remote=self.remote)
        self.sessions.append((session(store=self.store, matrix=self.matrix, **self.options), []))

    def teardown(self) -> None:
        for s, _ in self.sessions:
            s.close()
        if self.store is not None:
            self.store.close()

    def pick(self, which: int) -> tuple[ds4v41.Session, list[int]]:
        return self.sessions[which % len(self.sessions)]

    def check(self, s: ds4v41.Session, ids: list[int], row: np.ndarray | None = None) -> None:
        assert s._ext.history.tolist() == ids
        if not ids:
            return
        want, live = reference(self.matrix).after(np.array(ids, np.int32))
        if row is not None:
            np.testing.assert_array_equal(row.view(np.uint32), want.view(np.uint32))
        s._ext.complete()
        assert bytes(s._ext.live_bytes()) == live

    def follow(self, ids: list[int], prompt: list[int]) -> None:
        """The session was brought to this prompt: what it shared with it keeps its classes."""
        common = next((i for i, (t, p) in enumerate(zip(ids, prompt, strict=False)) if t & ~MATRIX_TAG != p), None)
        common = min(len(ids), len(prompt)) if common is None else common
        ids[common:] = [t | self.tag for t in prompt[common:]]

    @rule(which=st.integers(0, 3), n=st.sampled_from([1, 2, 7, 30, 90, 300]), seed=st.integers(0, 3))
    def prefill(self, which: int, n: int, seed: int) -> None:
        s, ids = self.pick(which)
        if len(ids) + n > MOST:
            return
        more = tokens(n, seed + len(ids)).tolist()
        row = s.prefill(more)
        ids.extend(t | self.tag for t in more)
        assert row is not None
        self.check(s, ids, row[0])

    @rule(
        which=st.integers(0, 3), n=st.sampled_from([30, 90, 300]), share=st.floats(0, 1), keep=st.booleans(),
        seed=st.integers(0, 3),
    )  # fmt: skip
    def stop(self, which: int, n: int, share: float, keep: bool, seed: int) -> None:
        """A prefill that ends early, at the end of a chunk. keep: nothing completes its state by looking at it."""
        s, ids = self.pick(which)
        if len(ids) + n > MOST:
            return
        more = tokens(n, seed + len(ids)).tolist()

        def progress(p: ds4v41.Progress) -> None:
            if p.processed >= share * n:
                raise Stop

        with suppress(Stop):
            s.prefill(more, None, progress=progress)
        ids.extend(t | self.tag for t in more[: s.position - len(ids)])
        s.checkpoint()
        event(f"stopped ready {s._ext.ready}")
        if not keep:
            self.check(s, ids)

    @rule(which=st.integers(0, 3), n=st.integers(1, 4), seed=st.integers(0, 3))
    def step(self, which: int, n: int, seed: int) -> None:
        s, ids = self.pick(which)
        for token in tokens(n, seed).tolist():
            if len(ids) >= MOST:
                return
            row = s.step([token])[0]
            ids.append(token)
            self.check(s, ids, row)

    @rule(which=st.integers(0, 3), back=st.one_of(st.integers(0, 12), st.integers(0, 400)), far=st.booleans())
    def rewind(self, which: int, back: int, far: bool) -> None:
        s, ids = self.pick(which)
        to = max(0, len(ids) - back) if not far else min(len(ids), back)
        self.seen.append(list(ids))
        s.rewind(to)
        del ids[to:]
        assert s.position == to
        self.check(s, ids)

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(which=st.integers(0, 3))
    def fork(self, which: int) -> None:
        s, ids = self.pick(which)
        self.sessions.append((s.fork(), list(ids)))

    @rule(which=st.integers(0, 3))
    def save(self, which: int) -> None:
        s, ids = self.pick(which)
        path = self.folder / f"{len(self.saved)}.session"
        s.save(path)
        self.saved.append((path, list(ids)))

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 3), saved=st.integers(0, 9))
    def load(self, which: int, saved: int) -> None:
        path, ids = self.saved[saved % len(self.saved)]
        s, _ = self.sessions.pop(which % len(self.sessions))
        s.close()
        fresh = model(matrix=self.matrix).load_session(path, 4096, store=self.store, **self.options)
        self.sessions.append((fresh, list(ids)))
        self.check(fresh, ids)

    @rule(
        which=st.integers(0, 3), of=st.integers(0, 9), cut=st.one_of(st.integers(0, 12), st.integers(0, 400)),
        n=st.sampled_from([0, 0, 1, 10, 300, 1, 10, 300, 3000]), seed=st.integers(0, 3),
        before=st.sampled_from([None, None, "gone", "cut", "longer", "bit", "rest"]), at=st.floats(0, 0.5),
    )  # fmt: skip
    def diverge(self, which: int, of: int, cut: int, n: int, seed: int, before: str | None, at: float) -> None:
        """A prompt that shares a prefix with something seen before, by whichever session; before that, something
        happens to all that the store has."""
        s, ids = self.pick(which)
        old = [*(other for _, other in self.sessions), *self.seen[::-1]]
        base = [t & ~MATRIX_TAG for t in old[of % len(old)]]
        prompt = (base[: max(0, len(base) - cut)] + tokens(n, seed).tolist())[:LONGEST]
        if not prompt:
            return
        self.seen.append(list(ids))
        if before is not None:
            self.spoil(range(99), before, at)
        row = s.advance_to(np.array(prompt, np.int32))
        self.follow(ids, prompt)
        assert s.stats.reused + s.stats.prefilled == len(prompt)
        event(f"restored {s.stats.restored > 0}, replayed {s.stats.replayed > 1}, kept {s.stats.reused > 0}")
        self.check(s, ids, row)

    @rule(which=st.integers(0, 3), n=st.sampled_from([20, 90]), back=st.integers(0, 60), seed=st.integers(0, 3))
    def moved(self, which: int, n: int, back: int, seed: int) -> None:
        """A progress callback that moves its session: the call is refused, what the callback did counts."""
        s, ids = self.pick(which)
        if len(ids) + n > MOST:
            return
        more = tokens(n, seed + len(ids)).tolist()
        to = max(0, len(ids) - back)

        def progress(p: ds4v41.Progress) -> None:
            if p.processed == n:
                s.rewind(to)

        with pytest.raises(ds4v41.StateError):
            s.prefill(more, progress=progress)
        if s.position == to:
            del ids[to:]
        else:  # the callback came while the session was busy, and was refused
            ids.extend(t | self.tag for t in more[: s.position - len(ids)])
        self.check(s, ids)

    def spoil(self, which: Sequence[int], how: str, at: float) -> None:
        """Something happens to objects of the store, or of the remote behind it."""
        places = self.folder / "store" / "objects", self.folder / "remote"
        files = sorted(path for place in places for path in place.rglob("*.*") if path.is_file())
        for path in {files[i % len(files)] for i in which if files}:
            with suppress(FileNotFoundError):  # sent under a name of its own just now
                damage(path, how, at)

    @rule(
        which=st.lists(st.integers(0, 99), min_size=1, max_size=3),
        how=st.sampled_from(["gone", "cut", "longer", "bit", "rest"]), at=st.floats(0, 1),
    )  # fmt: skip
    def accident(self, which: list[int], how: str, at: float) -> None:
        """The same at any time, to a few of them."""
        self.spoil(which, how, at)

    @rule(which=st.integers(0, 3))
    def restart(self, which: int) -> None:
        """The process went away: a new session finds what the store has."""
        s, ids = self.sessions.pop(which % len(self.sessions))
        self.seen.append(list(ids))
        s.close()
        self.sessions.append((session(store=self.store, matrix=self.matrix, **self.options), []))

    @precondition(lambda self: self.remote)
    @rule(of=st.integers(0, 9), cut=st.integers(0, 40), n=st.sampled_from([1, 10, 300]), sent=st.booleans())
    def elsewhere(self, of: int, cut: int, n: int, sent: bool) -> None:
        """Another machine goes on with one of the prompts, from what the remote has by then; what it adds is there for
        the others."""
        assert self.store is not None
        old = [*(ids for _, ids in self.sessions), *self.seen[::-1]]
        base = [t & ~MATRIX_TAG for t in old[of % len(old)]]
        prompt = (base[: max(0, len(base) - cut)] + tokens(n, cut).tolist())[:LONGEST]
        if sent:
            self.store.flush()
        store = ds4v41.KVStore(self.folder / "elsewhere", budget="64 MiB", remote=self.remote)
        with store, session(store=store, matrix=self.matrix, **self.options) as s:
            row = s.advance_to(np.array(prompt, np.int32))
            event(f"elsewhere restored {s.stats.restored > 0}")
            self.check(s, [t | self.tag for t in prompt], row)
        self.seen.append(prompt)

    @rule(seed=st.integers(0, 999), share=st.sampled_from([0.1, 0.5, 1.0]), frontiers=st.booleans())
    def lose(self, seed: int, share: float, frontiers: bool) -> None:
        """The store gives up a part of what it holds, as a small budget makes it do: rows without frontiers stay."""
        assert self.store is not None
        dice = random.Random(seed)
        there = [item for item in self.store.ls() if item.kind != PAGE or not frontiers]
        self.store._room.delete([item for item in there if dice.random() < share])

    @invariant()
    def same_tokens(self) -> None:
        for s, ids in self.sessions:
            assert s.position == len(ids)


class InMatrixClass(Machine):
    """Prompts of the matrix class, canonical steps."""

    matrix = True


TestE3 = Machine.TestCase
TestE3InMatrixClass = InMatrixClass.TestCase
EXAMPLES, STEPS = (int(os.environ.get(f"DS4V41_E3_{name}", n)) for name, n in (("EXAMPLES", "20"), ("STEPS", "30")))
for case in (TestE3, TestE3InMatrixClass):
    case.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)
