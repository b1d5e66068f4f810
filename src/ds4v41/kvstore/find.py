"""How far a store reaches along a list of tokens: whole pages, a part of a last one, and the frontiers on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreError
from .format import BLOCK, ENCODER, FULL, PAGE, Prefixes
from .policy import Item

MAX_LOOKS = 16
"""Pages whose tokens are read to find a partly matching one."""


BLOCKS_AT_ONCE = 32
"""Blocks that the index is asked for together."""


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of the first `reach` tokens are stored. `pages` covers them in order (the last perhaps only in part);
    `frontiers` maps positions to full frontiers, `encoders` to those of the encoder layers only; `whole` is how far
    complete pages go."""

    reach: int = 0
    whole: int = 0
    pages: tuple[Item, ...] = ()
    frontiers: dict[int, Item] = field(default_factory=dict)
    encoders: dict[int, Item] = field(default_factory=dict)

    def all_frontiers(self) -> list[Item]:
        """Both kinds."""
        return [*self.frontiers.values(), *self.encoders.values()]

    def path_to(self, position: int) -> list[Item]:
        """The pages that cover the first `position` tokens."""
        return [page for page in self.pages if page.begin < position]


def find(
    of_blocks: Callable[[Sequence[bytes], bytes], dict[bytes, list[Item]]],
    read_tokens: Callable[[bytes], NDArray[np.int32]],
    prefixes: Prefixes,
    partial: bool = True,
) -> Found:
    """Look along the prefixes. of_blocks(blocks, root): objects that end in those blocks, as `Index.of_blocks`.

    partial: also use the first part of a page that goes another way further on."""
    reach: dict[int, Item | None] = {0: None}  # position -> page that ends there
    frontiers: dict[int, dict[int, Item]] = {FULL: {}, ENCODER: {}}
    total = len(prefixes)
    deepest, block = 0, 0
    last_items: list[Item] = []
    known: dict[bytes, list[Item]] = {}
    while block * BLOCK < total:
        start = block * BLOCK
        if start not in reach:
            break
        if prefixes.start(block) not in known:
            ahead = range(block, min(block + BLOCKS_AT_ONCE, -(-total // BLOCK)))
            known = of_blocks([prefixes.start(b) for b in ahead], prefixes.root)
        items = known[prefixes.start(block)]
        for item in sorted(items, key=lambda i: (i.end, i.begin)):
            if item.end > total or prefixes.node(item.end) != item.node:
                continue
            if item.kind == PAGE and item.begin in reach and item.end not in reach:
                reach[item.end] = item
            elif item.kind in frontiers:
                frontiers[item.kind][item.end] = item
        deepest, last_items = max(reach), items
        block += 1
    pages = _chain(reach, deepest)
    whole = deepest
    if partial and deepest < total:
        page, matched = _partial(last_items, reach, read_tokens, prefixes, deepest)
        if page is not None:
            pages = [*_chain(reach, page.begin), page]
            deepest = matched
    full, encoders = ({p: f for p, f in frontiers[kind].items() if p <= deepest} for kind in (FULL, ENCODER))
    return Found(deepest, whole, tuple(pages), full, encoders)


def _chain(reach: dict[int, Item | None], end: int) -> list[Item]:
    pages: list[Item] = []
    while (page := reach[end]) is not None:
        pages.append(page)
        end = page.begin
    return pages[::-1]


def _partial(
    items: list[Item],
    reach: dict[int, Item | None],
    read_tokens: Callable[[bytes], NDArray[np.int32]],
    prefixes: Prefixes,
    deepest: int,
) -> tuple[Item | None, int]:
    """The page that goes furthest beyond `deepest` before it differs, and how far."""
    best, furthest = None, deepest
    candidates = [i for i in items if i.kind == PAGE and i.begin in reach and i.end > deepest]
    for item in sorted(candidates, key=lambda i: -i.tick)[:MAX_LOOKS]:
        if prefixes.node(item.begin) != item.parent:
            continue
        with contextlib.suppress(StoreError, OSError):
            tokens = read_tokens(item.id)
            want = prefixes.tokens[item.begin : item.begin + len(tokens)]
            differ = np.flatnonzero(tokens[: len(want)] != want)
            matched = item.begin + (int(differ[0]) if len(differ) else len(want))
            if matched > furthest:
                best, furthest = item, matched
    return best, furthest
