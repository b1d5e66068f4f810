"""Sixty turns of three agent chats over one store, at the sizes of the released model: what is reused at every turn.

Nothing is computed: rows and frontiers are zeros of the real sizes (890 bytes a token, 2.77 MB a frontier), sessions
are lists of tokens. So this measures what the store keeps, finds, writes and deletes, not how fast a model runs. The
chats share a system prompt, one grows to about 100,000 tokens; there are regenerations, edits of earlier turns, and a
process restart every few turns (nothing is left but the store).

Reuse is counted against everything that any chat ever computed: the longest prefix of a prompt that was computed
before, whether or not the store still has it. The budget is a share of all different bytes that are ever put: rows of
all different tokens, and a frontier for each state. `--clairvoyant` deletes what is needed latest, knowing all turns to
come (and thins no ladder), to see what the store's own order loses for not knowing them.

    python benchmarks/agent_chat.py [--share 0.333] [--seed 1] [--clairvoyant] [--out benchmarks/results/agent-chat.csv]
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ds4v41.kvstore import KVStore
from ds4v41.kvstore import store as store_module
from ds4v41.kvstore.format import PAGE, Prefixes
from ds4v41.kvstore.policy import Item, victims
from ds4v41.reuse import Costs, choose, common_prefix

ROW_BYTES, FRONTIER_BYTES = 890, 2_764_496
SLACK, DECODER_CONE, CONE = 256, 2_797, 5_337
ROOT = b"r" * 32
SYSTEM, TURNS = 3_300, 60


@dataclass
class Turn:
    """One call: the whole conversation goes in, a reply comes out."""

    chat: int
    kind: str
    prompt: np.ndarray
    reply: np.ndarray
    restart: bool


def conversations(seed: int = 1, turns: int = TURNS, system: int = SYSTEM, scale: float = 1.0) -> Iterator[Turn]:
    """Chat 0 gets most turns; 1 and 2 are asked now and then."""
    dice, noise = random.Random(seed), np.random.default_rng(seed)

    def text(n: float) -> np.ndarray:
        return noise.integers(5, 300, max(1, int(n * scale))).astype(np.int32)

    base = noise.integers(5, 300, system).astype(np.int32)
    # Per chat: the conversation at the beginning of each of its turns, and after the last one.
    chats: list[list[np.ndarray]] = [[base], [base], [base]]
    last: dict[int, np.ndarray] = {}
    for turn in range(turns):
        chat = dice.choices((0, 1, 2), (7, 1.5, 1.5))[0]
        line = chats[chat]
        kind = dice.choices(("next", "again", "edit"), (8, 1, 1))[0]
        if kind == "again" and chat in last:
            line.pop()
            prompt = last[chat]
        elif kind == "edit" and len(line) > 3:
            del line[-dice.randrange(1, 3) :]
            prompt = np.concatenate([line[-1], text(200)])
        else:
            kind = "next"
            prompt = np.concatenate([line[-1], text(dice.choice((60, 300, 2_500, 6_500)))])
        reply = text(dice.choice((80, 300, 900)))
        last[chat] = prompt
        line.append(np.concatenate([prompt, reply]))
        yield Turn(chat, kind, prompt, reply, restart=turn % 4 == 3)


class SizedSession:
    """What a store asks of a session, with the sizes of the released model."""

    ready = True
    draft_context = 0

    def __init__(self, n: int) -> None:
        self.n = n

    def export_rows(self, begin: int, end: int) -> np.ndarray:
        return np.zeros((end - begin) * ROW_BYTES, np.uint8)

    def export_frontier(self, encoder: bool) -> np.ndarray:
        return np.zeros(FRONTIER_BYTES, np.uint8)


@dataclass
class Row:
    """One line of the table."""

    turn: int
    chat: int
    kind: str
    restart: bool
    prompt: int
    ever_stored: int
    last_frontier: int
    reused: int
    replayed: int
    prefilled: int
    from_store: int
    store_mb: float
    written_mb: float


def used(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in [folder, *folder.rglob("*")])


class Clairvoyant:
    """Victims by the turn that needs them next, the latest first. A turn needs the pages of its prompt, and the deepest
    frontier that was ever put on the way to it."""

    def __init__(self, turns: list[Turn]) -> None:
        self.turn = 0
        self._prompts = [Prefixes(ROOT, turn.prompt) for turn in turns]
        self._wanted: list[bytes | None] = []
        self._uses: dict[bytes, list[int]] = {}
        self._known: list[int] = []  # how far each prompt was computed before
        lists = [turns[0].prompt[:0]]
        states = [Prefixes(ROOT, turns[0].prompt[:SYSTEM])]
        for turn, prompt in zip(turns, self._prompts, strict=True):
            ends = [s for s in states if len(s) <= len(prompt) and prompt.node(len(s)) == s.node(len(s))]
            deepest = max(ends, key=len, default=None)
            self._wanted.append(None if deepest is None else deepest.node(len(deepest)))
            whole = np.concatenate([turn.prompt, turn.reply])
            states += [prompt, Prefixes(ROOT, whole)]
            self._known.append(max(common_prefix(ids, turn.prompt) for ids in lists))
            lists += [turn.prompt, whole]

    def next_use(self, item: Item) -> int:
        """The turn, after the present one, that needs it; one after all others when none does."""
        if item.id not in self._uses:
            self._uses[item.id] = [
                t
                for t, prompt in enumerate(self._prompts)
                if (item.kind != PAGE and self._wanted[t] == item.node)
                or (item.kind == PAGE and item.begin < self._known[t] and prompt.node(item.begin) == item.parent)
            ]
        return next((t for t in self._uses[item.id] if t > self.turn), len(self._prompts))

    def victims(self, items: Iterable[Item], need: int, protected: Collection[bytes], now: int) -> list[Item]:
        """As `policy.victims`: a page still goes only after those that follow it."""
        ranked = [replace(item, score=1.0 / (1 + self.next_use(item)), tick=now) for item in items]
        return victims(ranked, need, protected, now)


def simulate(folder: Path, budget: int, seed: int = 1, clairvoyant: bool = False) -> list[Row]:
    """The table. The store's own order, or that of one who knows what comes."""
    turns = list(conversations(seed))
    if not clairvoyant:
        return run(folder, budget, turns)
    oracle = Clairvoyant(turns)
    with (
        mock.patch.object(store_module, "victims", oracle.victims),
        mock.patch.object(store_module, "off_ladder", lambda *_: []),
    ):
        return run(folder, budget, turns, oracle)


def run(folder: Path, budget: int, turns: list[Turn], oracle: Clairvoyant | None = None) -> list[Row]:
    store = KVStore(folder, budget=budget)
    live: dict[int, np.ndarray] = {}
    ends: dict[int, int] = {}  # of the last prefills
    put_states: list[np.ndarray] = []
    rows: list[Row] = []

    def put(ids: np.ndarray, **options: Any) -> None:
        store.put(SizedSession(len(ids)), Prefixes(ROOT, ids), "released", **options)  # type: ignore[arg-type]
        put_states.append(ids)
        assert used(folder) <= budget, "the budget was exceeded"

    for number, turn in enumerate(turns):
        if oracle is not None:
            oracle.turn = number
        prompt, have = turn.prompt, live.get(turn.chat, np.zeros(0, np.int32))
        commons = [common_prefix(state, prompt) for state in put_states]
        frontiers = [c for c, state in zip(commons, put_states, strict=True) if c == len(state)]
        common = common_prefix(have, prompt)
        found = store.find(Prefixes(ROOT, prompt))
        costs = Costs(live_again(len(have), ends.get(turn.chat, 0)), rows_again, rows_again)
        at = choose(len(prompt), common, costs, found)
        if at.stored:
            store.touch([*found.path_to(at.position), *([at.frontier] if at.frontier else [])])
            if at.frontier is None:
                put(prompt[: at.position], weight=4.0)
        if at.position < SYSTEM:
            put(prompt[:SYSTEM], weight=4.0)  # a chat gives its system prompt a frontier of its own
        put(prompt)
        live[turn.chat], ends[turn.chat] = np.concatenate([prompt, turn.reply]), len(prompt)
        put(live[turn.chat])
        stats = store.stats()
        rows.append(
            Row(
                number, turn.chat, turn.kind, turn.restart, len(prompt), max(commons, default=0),
                max(frontiers, default=0), at.position, at.again, at.new, at.position if at.stored else 0,
                stats.disk_bytes / 1e6, stats.written_bytes / 1e6,
            )
        )  # fmt: skip
        if turn.restart:
            live.clear()
            store.close()
            store = KVStore(folder, budget=budget)
    assert store.verify().clean
    store.close()
    return rows


def rows_again(position: int) -> int:
    """Tokens that are run again where rows end without a frontier."""
    return min(position, CONE)


def live_again(have: int, end: int, retain: int = 8192) -> Callable[[int], int]:
    """Tokens that a rewind of a live session of `have` tokens, the last prefill of which came to `end`, runs again."""

    def again(position: int) -> int:
        if position > end - SLACK:
            return 0
        return min(position, DECODER_CONE if position - DECODER_CONE > have - retain else CONE)

    return again


def unique_bytes(seed: int) -> int:
    """Rows of all different tokens, and one frontier for every state that was ever stored."""
    prefixes: set[bytes] = set()
    states: set[bytes] = set()
    for turn in conversations(seed):
        ids = np.concatenate([turn.prompt, turn.reply])
        names = Prefixes(ROOT, ids)
        states |= {names.node(len(turn.prompt)), names.node(len(ids))}
        prefixes |= {names.node(p) for p in range(1, len(ids) + 1)}
    return len(prefixes) * ROW_BYTES + len(states) * FRONTIER_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1 / 3, help="budget, as a share of everything ever put")
    parser.add_argument("--seed", type=int, default=1, help="of the conversations")
    parser.add_argument("--clairvoyant", action="store_true", help="delete what is needed latest")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    total = unique_bytes(args.seed)
    budget = int(total * args.share)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = simulate(Path(folder) / "store", budget, args.seed, args.clairvoyant)
    names = [f.name for f in fields(Row)]
    print("  ".join(names))
    for row in rows:
        print("  ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in (getattr(row, n) for n in names)))
    reusable = sum(row.ever_stored for row in rows)
    got = sum(min(row.reused, row.ever_stored) for row in rows)
    prompts = sum(row.prompt for row in rows)
    replayed = sum(row.replayed for row in rows)
    print(
        f"everything ever put {total / 1e6:.0f} MB, budget {budget / 1e6:.0f} MB, largest "
        f"{max(r.store_mb for r in rows):.0f} MB, written {rows[-1].written_mb:.0f} MB "
        f"({rows[-1].written_mb * 1e6 / total:.2f} of unique)\nreused {got:,} of {reusable:,} tokens that were ever "
        f"stored ({100 * got / reusable:.2f} %), of {prompts:,} prompt tokens; {replayed:,} replayed "
        f"({100 * replayed / prompts:.2f} %); the longest prompt has {max(r.prompt for r in rows):,} tokens"
    )
    if args.out is not None:
        with open(args.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows([getattr(row, n) for n in names] for row in rows)


if __name__ == "__main__":
    main()
