"""Drafts of any kind in place of a drafter's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from ds4v41.session import Session


class FakeProposer:
    """make(anchor, most): the drafts; all of them look likely."""

    def __init__(self, make: Callable[[int, int], list[int]]) -> None:
        self.make = make

    def propose(self, anchor: int, most: int, worth: Any) -> tuple[list[int], list[float]]:
        drafts = self.make(anchor, most)
        return drafts, [0.99] * len(drafts)


def script(session: Session, n_prompt: int, tokens: list[int], kind: str, dice: random.Random) -> None:
    """Gives the session a proposer that knows the text after the prompt: its drafts are right, wrong, or each of them
    right with a chance of 0.6 ("random")."""

    def make(anchor: int, most: int) -> list[int]:
        at = session.position - n_prompt + 1
        right = (tokens[at : at + most] + [7] * most)[:most]
        if kind == "wrong":
            return [(t + 1) % 512 for t in right]
        return right if kind == "right" else [t if dice.random() < 0.6 else dice.randrange(512) for t in right]

    session.proposer = lambda sampler, history, allowed: FakeProposer(make)  # type: ignore[method-assign]
