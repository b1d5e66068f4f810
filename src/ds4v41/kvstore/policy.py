"""What to keep: scores that decay, leaves before what they stand on, and a ladder of frontiers. Pure functions.

Time is counted in uses of the store (ticks), never in seconds: a clock that jumps changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from .format import PAGE

HALF_LIFE = 256
"""Ticks after which an old use counts half."""
NEWEST = 8
PER_OCTAVE = 4
UNIT = 1024


@dataclass(frozen=True, slots=True)
class Item:
    """One object as the index knows it."""

    id: bytes
    kind: int
    parent: bytes
    node: bytes
    begin: int
    end: int
    bytes: int
    score: float
    tick: int

    def value(self, now: int) -> float:
        """The decayed score."""
        return decayed(self.score, self.tick, now)


def decayed(score: float, tick: int, now: int) -> float:
    """A score some ticks later."""
    return float(score * 2.0 ** (-max(0, now - tick) / HALF_LIFE))


def victims(items: Iterable[Item], need: int, protected: Collection[bytes], now: int) -> list[Item]:
    """Objects to delete so that at least `need` bytes become free, the least useful first; all that may go when there
    is not enough. A page goes only after every page that follows it, so prefixes of many chains go last."""
    if need <= 0:
        return []
    everything = list(items)
    followers: dict[bytes, int] = {}
    ends: dict[bytes, list[Item]] = {}
    for item in everything:
        if item.kind == PAGE:
            followers[item.parent] = followers.get(item.parent, 0) + 1
            ends.setdefault(item.node, []).append(item)
    heap: list[tuple[float, int, bytes, Item]] = []

    def offer(item: Item) -> None:
        if item.id not in protected:
            heapq.heappush(heap, (item.value(now), item.tick, item.id, item))

    for item in everything:
        if item.kind != PAGE or followers.get(item.node, 0) == 0:
            offer(item)
    out: list[Item] = []
    free = 0
    while heap and free < need:
        item = heapq.heappop(heap)[3]
        out.append(item)
        free += item.bytes
        if item.kind == PAGE:
            followers[item.parent] -= 1
            if followers[item.parent] == 0:
                for page in ends.get(item.parent, ()):
                    offer(page)
    return out


def off_ladder(positions: Sequence[int], tip: int, kept: Collection[int] = ()) -> list[int]:
    """Which frontiers of one chain to give up: all but the newest 8 and 4 of each octave of distance from the tip
    (those farthest from their neighbours), and those in `kept`."""
    behind = sorted((p for p in set(positions) if p <= tip), reverse=True)
    spare = behind[NEWEST:]
    octaves: dict[int, list[int]] = {}
    for p in spare:
        octaves.setdefault(max(0, (tip - p) // UNIT).bit_length(), []).append(p)
    out: list[int] = []
    for members in octaves.values():
        chosen = _spread(members, PER_OCTAVE)
        out.extend(p for p in members if p not in chosen and p not in kept)
    return sorted(out)


def _spread(positions: Sequence[int], n: int) -> set[int]:
    """At most n positions: drops, one at a time, the one whose neighbours are nearest to each other (never an end)."""
    line = sorted(positions)
    while len(line) > n:
        gaps = [line[i + 1] - line[i - 1] for i in range(1, len(line) - 1)]
        del line[1 + gaps.index(min(gaps))]
    return set(line)
