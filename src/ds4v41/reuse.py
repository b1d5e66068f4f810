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


@dataclass(frozen=True, slots=True)
class Costs:
    """Tokens in front of a position that are run again on the way to the wanted prompt: when the session goes back to
    it, when stored rows end there, when an encoder frontier is there. After a full frontier there are none."""

    live: Callable[[int], int]
    rows: Callable[[int], int]
    encoder: Callable[[int], int]


def choose(total: int, common: int, costs: Costs, found: Found | None) -> Choice:
    """The cheapest way to a state of `total` tokens whose last logits are wanted.

    common: tokens that the session shares with the prompt. A tie goes to the session, then to the earlier in the list.
    """
    keep = min(common, total - 1)  # the last token is run again: its logits are wanted
    best = Choice(keep, costs.live(keep), total - keep)
    if found is None or found.reach == 0:
        return best
    offers = [Choice(p, 0, total - p, True, f) for p, f in found.frontiers.items() if p <= total]
    offers += [Choice(p, costs.encoder(p), total - p, True, f) for p, f in found.encoders.items() if p < total]
    rows = min(found.reach, total - 1)
    if rows > common:
        offers.append(Choice(rows, costs.rows(rows), total - rows, True))
    return min([best, *offers], key=lambda choice: choice.cost)


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
