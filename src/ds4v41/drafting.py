"""How the decode loop gets the next token: by a plain step, or out of a block of verified drafts.

Every token is drawn from the same logits, in the same order, with the same options, whether there is a drafter or not.
What is here only decides how many rows the target computes at once: a draft that equals the token that is drawn has its
row computed already. So drafting cannot change a token (docs/dspark.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .admission import LONGEST_REST, Admission, AdmissionConfig
from .errors import Cancelled, Ds4Error, NumericsError, OptionError, StateError
from .masks import Masks
from .sampling import Draw, Sampler

if TYPE_CHECKING:
    from .session import Session

Row = NDArray[np.float32]
Allowed = Callable[[list[int]], Any]
"""Drafts so far -> token ids (int32) that the mask hook allows after them, or None for all. May raise."""


class Rows(Protocol):
    """Computes rows of the target and draws from them."""

    def first(self, row: Row, chances: bool = False) -> Draw:
        """The draw after the prompt, from its last row; with its `chance` if that is wanted and known."""

    def feed(self, token: int, chances: bool = False) -> Draw:
        """Append `token` by a plain step; the draw after it, as `first`."""

    def verify(self, token: int, drafts: list[int]) -> Draw:
        """Append `token` and drafts behind it; the draw after `token`."""

    def ahead(self, token: int) -> Draw | None:
        """The draw after `token`, if the block at hand has its row. The session then counts `token` as read."""

    def drop(self) -> None:
        """Take back what was verified and not reached."""


class DrawnRows:
    """A step and its draw are one call of the extension; so is a block with all the draws that its drafts allow."""

    def __init__(self, session: Session, sampler: Sampler, history: Any) -> None:
        self._session, self._sampler, self._history = session, sampler, history
        self._draws: list[Draw] = []  # behind drafts that held and were not reached yet, last one first

    def first(self, row: Row, chances: bool = False) -> Draw:
        """At the present position."""
        return self._sampler.draw(row, self._session.position, history=self._history, chance=chances)

    def feed(self, token: int, chances: bool = False) -> Draw:
        """One token, one step."""
        return self._session.feed_draw(token, self._sampler, self._history, chances)

    def verify(self, token: int, drafts: list[int]) -> Draw:
        """Drafts that did not hold are gone from the session already."""
        self._draws = self._session.verify_draw([token, *drafts], self._sampler, self._history)
        self._draws.reverse()
        return self._draws.pop()

    def ahead(self, token: int) -> Draw | None:
        """All draws that are left are of this text."""
        if not self._draws or self._session.n_ahead != len(self._draws):
            return None
        self._session.accept()
        return self._draws.pop()

    def drop(self) -> None:
        """Where the text ends in the middle of a block."""
        self._draws = []
        self._session.drop_ahead()


class MaskedRows:
    """With a mask, which is asked about a text when the text is there: rows are kept and drawn from one by one."""

    def __init__(self, session: Session, sampler: Sampler, history: Any, masks: Masks, tokens: list[int]) -> None:
        """tokens: of the text so far; the loop adds to them."""
        self._session, self._sampler, self._history, self._masks = session, sampler, history, masks
        self._tokens = tokens
        self._rows: list[Row] = []  # of drafts that were verified and not reached yet
        self._drafts: list[int] = []

    def first(self, row: Row, chances: bool = False) -> Draw:
        """At the present position."""
        allowed, position = self._masks.at(self._tokens), self._session.position
        return self._sampler.draw(row, position, history=self._history, allowed=allowed, chance=chances)

    def feed(self, token: int, chances: bool = False) -> Draw:
        """One token, one step."""
        return self.first(self._session.feed(token), chances)

    def verify(self, token: int, drafts: list[int]) -> Draw:
        """All drafts stay until one of them does not hold."""
        rows: list[Row] = list(self._session.verify([token, *drafts]))
        self._drafts, self._rows = list(drafts), rows[1:]
        return self.first(rows[0], True)

    def ahead(self, token: int) -> Draw | None:
        """Is `token` the next draft?"""
        if not self._rows or self._drafts[0] != token or self._session.n_ahead != len(self._rows):
            return None
        del self._drafts[0]
        self._session.accept()
        return self.first(self._rows.pop(0), True)

    def drop(self) -> None:
        """Where a draft does not hold, or the text ends."""
        self._rows, self._drafts = [], []
        self._session.drop_ahead()


class Steps(Protocol):
    """Feeds drawn tokens to the model and draws the next ones."""

    def first(self, row: Row) -> Draw:
        """The draw after the prompt, from its last row."""

    def advance(self, token: int) -> Draw:
        """Feed `token`; the draw after it."""

    def close(self) -> None:
        """The text is over: judge the cycle at hand. The session keeps what was read."""


class SerialSteps:
    """One token, one step."""

    def __init__(self, session: Session, rows: Rows) -> None:
        self._session, self._rows = session, rows

    def first(self, row: Row) -> Draw:
        """Nothing is fed yet."""
        return self._rows.first(row)

    def advance(self, token: int) -> Draw:
        """Feed one token."""
        before = time.perf_counter()
        draw = self._rows.feed(token)
        self._session._stats.add_decode(1, time.perf_counter() - before)
        return draw

    def close(self) -> None:
        """Nothing to judge."""


class Proposer(Protocol):
    """Makes drafts."""

    def propose(self, anchor: int, most: int, worth: Sequence[float]) -> tuple[list[int], list[float]]:
        """At most `most` tokens that may follow `anchor`, and the chance of each given those before it. Ends early when
        the product of the chances of the first i + 1 is not above worth[i] (if there is a worth[i])."""


class ModelProposer:
    """Drafts of the session's own drafter, drawn as the target will draw: same options, mask, noise and positions."""

    def __init__(self, session: Session, sampler: Sampler, history: Any, allowed: Allowed | None = None) -> None:
        self._session, self._sampler, self._history, self._allowed = session, sampler, history, allowed

    def propose(self, anchor: int, most: int, worth: Sequence[float]) -> tuple[list[int], list[float]]:
        """All in one call of the extension, or with a mask one row after another."""
        ext, sampler = self._session._ext, self._sampler
        if self._allowed is None:
            handle, seed = sampler.handle, sampler.seed
            return ext.draft_draw(handle, seed, anchor, [], most, list(worth), self._history, start=most, settled=True)
        ext.draft_start(anchor, most, settled=True)
        drafts: list[int] = []
        chances: list[float] = []
        while len(drafts) < most:
            try:
                ids = self._allowed(drafts)
            except Exception:  # should the text come here, it will ask again
                break
            try:
                drawn = ext.draft_draw(sampler.handle, sampler.seed, anchor, drafts, 1, [], self._history, ids)
            except OptionError:  # no token is left: the text will say so, should it come here
                break
            drafts, chances = drafts + drawn[0], chances + drawn[1]
            made = len(drafts) - 1
            if made < len(worth) and not math.prod(chances) > worth[made]:
                break
        return drafts, chances


class DraftingSteps:
    """Steps that verify drafts. One object for one call of `generate`."""

    def __init__(
        self,
        session: Session,
        rows: Rows,
        proposer: Proposer,
        admission: Admission,
        limit: int,
        *,
        forced: int | None = None,
        think: tuple[int, int] | None = None,
        in_reasoning: bool = False,
    ) -> None:
        """`limit`: most tokens of this call. `forced`: verify this many drafts at every step, whatever it costs.
        `think`: ids that open and close reasoning."""
        self._session, self._rows, self._proposer, self._admission = session, rows, proposer, admission
        self._left = limit  # tokens that may still be drawn, the one at hand included
        self._forced = forced
        self._think = think
        self._in_reasoning = in_reasoning
        self._cycle: tuple[float, float, int] | None = None  # draft ms, verify ms, drafts
        self._hits = 0
        # The controller said that it will not draft at so many tokens, and is told of them afterwards: where drafting
        # does not pay, a token costs what it costs without a drafter.
        self._rest = 0
        self._rested: list[tuple[float, float | None]] = []  # ms of their steps, and the chances of the draws behind

    def first(self, row: Row) -> Draw:
        """Nothing is fed yet, but something is known about the text."""
        draw = self._rows.first(row, True)
        self._admission.saw(draw.chance)
        return draw

    def advance(self, token: int) -> Draw:
        """Feed `token`: its row is there already when it was drafted, else by a verify or a plain step."""
        self._left -= 1
        if self._rest > 0:
            return self._resting(token)
        if self._rested:
            self._tell()
        if self._think is not None:
            self._follow_reasoning(token)
        if self._cycle is not None:
            draw = self._rows.ahead(token)
            if draw is not None:
                self._hits += 1
                self._admission.saw(draw.chance)
                self._session._stats.add_decode(1, 0.0)
                return draw
            self.close()
        if not self._wanted():
            draw = self._serial(token, None)
            self._rest = self._how_long()
            return draw
        most = min(self._left - 1, self._session.room - 1, self._session.block_size)
        return self._serial(token, None) if most < 1 else self._cycle_from(token, most)

    def _how_long(self) -> int:
        """At how many tokens now nobody need ask whether to draft."""
        if self._forced is not None or self._session._fault is not None:  # (_wanted() has asked for a fault)
            return LONGEST_REST
        return 0 if self._think is not None else self._admission.rest()  # (reasoning may end at any token)

    def _resting(self, token: int) -> Draw:
        self._rest -= 1
        before = time.perf_counter()
        draw = self._rows.feed(token, True)
        seconds = time.perf_counter() - before
        self._rested.append((seconds, draw.chance))
        self._session._stats.add_decode(1, seconds)
        return draw

    def _tell(self) -> None:
        admission = self._admission
        for seconds, chance in self._rested:
            admission.serial_step(1e3 * seconds)
            admission.saw(chance)
        self._rested.clear()

    def close(self) -> None:
        """Judge the cycle at hand, and take back what was verified but not reached."""
        if self._rested:
            self._tell()
        if self._cycle is not None:
            draft_ms, verify_ms, drafts = self._cycle
            before = time.perf_counter()
            self._cycle = None
            self._rows.drop()
            spent = time.perf_counter() - before
            self._admission.verified(draft_ms, verify_ms + 1e3 * spent, drafts, 1 + self._hits)
            self._session._stats.add_decode(0, spent)

    def _wanted(self) -> bool:
        wanted = self._admission.admit(self._in_reasoning) if self._forced is None else self._forced > 0
        return wanted and self._session.drafter_fault is None

    def _cycle_from(self, token: int, most: int) -> Draw:
        self._enter()
        before = time.perf_counter()
        drafts = self._draft(token, most)
        draft_ms = 1e3 * (time.perf_counter() - before)
        if not drafts:
            return self._serial(token, draft_ms)
        position, before = self._session.position, time.perf_counter()
        try:
            draw = self._rows.verify(token, drafts)
        except (NumericsError, MemoryError) as error:
            if self._session.position > position:  # the step went well, what failed is the text's own
                raise
            if isinstance(error, MemoryError):  # six rows may need more than one
                self._session.drop_drafter(f"no memory for a verify step of {1 + len(drafts)} rows ({error})")
            # Numbers of a row that serial decoding may never see: let it say so itself.
            return self._serial(token, draft_ms)
        verify_ms = 1e3 * (time.perf_counter() - before)
        self._session._stats.add_decode(1, (draft_ms + verify_ms) / 1e3)
        self._cycle, self._hits = (draft_ms, verify_ms, len(drafts)), 0
        self._admission.saw(draw.chance)
        return draw

    def _enter(self) -> None:
        """Fill the drafter's windows, when serial decoding or a prefill left much to do, in two goes; what one draft
        leaves to the next is part of its price."""
        rows = self._session.draft_backlog
        if rows <= self._session.block_size + 1:
            return
        before = time.perf_counter()
        try:
            rows = self._session.settle_drafter()
        except (Ds4Error, RuntimeError, MemoryError) as error:
            if isinstance(error, (Cancelled, StateError)):
                raise
            self._session.drop_drafter(f"{type(error).__name__}: {error}")
        spent = time.perf_counter() - before
        self._admission.entered(1e3 * spent, rows)
        self._session._stats.add_decode(0, spent)

    def _draft(self, token: int, most: int) -> list[int]:
        """The drafts to verify; none when they are not worth it or the drafter failed."""
        if self._session.drafter_fault is not None:
            return []
        if self._forced is not None:
            most = min(most, self._forced)
        worth = self._admission.worth(most) if self._forced is None else []
        try:
            drafts, chances = self._proposer.propose(token, most, worth)
        except (Cancelled, StateError):
            raise
        except (Ds4Error, RuntimeError, MemoryError) as error:
            self._session.drop_drafter(f"{type(error).__name__}: {error}")
            return []
        if self._forced is not None:
            return drafts
        return drafts[: self._admission.choose(chances)]

    def _serial(self, token: int, draft_ms: float | None) -> Draw:
        before = time.perf_counter()
        draw = self._rows.feed(token, True)
        ms = 1e3 * (time.perf_counter() - before)
        if draft_ms is None:
            self._admission.serial_step(ms)
        else:
            self._admission.declined(draft_ms, ms)
        self._admission.saw(draw.chance)
        self._session._stats.add_decode(1, (ms + (draft_ms or 0.0)) / 1e3)
        return draw

    def _follow_reasoning(self, token: int) -> None:
        if self._think is None or token not in self._think:
            return
        inside = token == self._think[0]
        if self._in_reasoning and not inside:
            self._admission.left_reasoning()
        self._in_reasoning = inside


def make_steps(
    session: Session,
    sampler: Sampler,
    history: Any,
    limit: int,
    drafting: str | int,
    prompt: NDArray[np.int32],
    rows: Rows,
    allowed: Allowed | None = None,
) -> Steps:
    """The steps that a call of `generate` takes. drafting: "auto", "answers", "off", or a number of drafts to force."""
    if drafting == "off" or session.drafter is None or session.drafter_fault is not None:
        return SerialSteps(session, rows)
    answers = drafting == "answers"
    # (Forced drafts say nothing about whether drafting pays.)
    known = session.drafter.costs if isinstance(drafting, str) else None
    admission = Admission(AdmissionConfig(reasoning=not answers), session.block_size, known)
    session.stats.drafter = admission.stats
    think = _think_ids(session) if answers else None
    return DraftingSteps(
        session,
        rows,
        session.proposer(sampler, history, allowed),
        admission,
        limit,
        forced=None if isinstance(drafting, str) else drafting,
        think=think,
        in_reasoning=think is not None and _ends_in_reasoning(prompt, think),
    )


def _think_ids(session: Session) -> tuple[int, int] | None:
    tokenizer = session.model.tokenizer
    opening, closing = tokenizer.find_control("<think>"), tokenizer.find_control("</think>")
    return None if opening is None or closing is None else (opening, closing)


def _ends_in_reasoning(prompt: NDArray[np.int32], think: tuple[int, int]) -> bool:
    at = np.flatnonzero(np.isin(prompt, think))
    return bool(len(at)) and int(prompt[at[-1]]) == think[0]
