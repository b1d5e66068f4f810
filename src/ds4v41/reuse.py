"""Which tokens of a prompt need not be computed: what the session holds, what a store holds, and what each costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .kvstore.find import Found
from .kvstore.policy import Item


@dataclass(frozen=True, slots=True)
class Choice:
    """Start from `position`; `again` tokens in front of it are replayed, `new` after it are prefilled."""

    position: int
    again: int
    new: int
    stored: bool = False
    frontier: Item | None = None

    @property
    def cost(self) -> int:
        """Tokens to run."""
        return self.again + self.new


def choose(
    total: int,
    common: int,
    live_again: Callable[[int], int],
    replay_start: Callable[[int], int],
    found: Found | None,
) -> Choice:
    """The cheapest way to a state of `total` tokens whose last logits are wanted.

    common: tokens that the session shares with the prompt. live_again(p): tokens that a rewind to p runs again.
    replay_start(p): first token of the cone of p. A tie goes to the session.
    """
    keep = min(common, total - 1)  # the last token is run again: its logits are wanted
    best = Choice(keep, live_again(keep), total - keep)
    if found is None or found.reach == 0:
        return best
    for position, frontier in found.frontiers.items():
        at = Choice(position, 0, total - position, True, frontier)
        if position <= total and at.cost < best.cost:
            best = at
    rows = min(found.reach, total - 1)
    at = Choice(rows, rows - replay_start(rows), total - rows, True)
    return at if rows > common and at.cost < best.cost else best


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many tokens two lists share at their beginning."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def why_not_more(have: int, want: int, common: int) -> str:
    """Why the session itself had not more to offer."""
    if have == 0:
        return "the session was empty"
    if common == have:
        return f"the prompt goes on after all {common:,} tokens of the session"
    if common == want:
        return f"the prompt is the first {common:,} of {have:,} tokens of the session; only its last token is run"
    return f"diverged at {common:,} of {have:,}"
