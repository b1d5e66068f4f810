"""When drafting pays: a controller that knows what its cycles cost, and a replay of it on recorded traces.

Pure: it has no clock and no model. The decode loop tells it what each step took, it answers two questions: draft now?
and how many of these drafts shall be verified? Nothing here can change a token, only how fast tokens come.
docs/dspark.md explains the rules and where their numbers come from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal

Gate = Literal["value", "top", "none"]


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """The controller's numbers. Costs are in serial steps, so that they fit any machine."""

    min_serial: int = 16
    """Serial tokens before the first attempt: they show what a serial step costs."""
    samples: int = 9
    """Newest samples whose median counts."""
    window: int = 3
    """Attempts that are judged together."""
    loss_budget: float = 0.5
    """Debt, in serial steps, that a window without gain may leave before it backs off."""
    credit: float = 2.0
    """Most gain of earlier windows, in serial steps, that later losses may use up."""
    lucky_credit: float = 4.0
    """Most gain of earlier calls, in serial steps, that the losses of this one may use up: half of a middling one's."""
    stop_loss: float = 1.0
    """Debt in the middle of a window, in serial steps, that ends it at once."""
    back_off: tuple[int, ...] = (16, 32, 64, 128)
    """Serial tokens after a losing window, by the number of losing windows in a row."""
    loss_share: float = 0.015
    """Share of the time that losing windows may take: a costly window waits longer than `back_off` says."""
    longest_wait: int = 256
    lucky_serial: int = 3
    """The same where drafting won in the calls before: costs are known, and text is often like the text before."""
    unlucky_serial: int = 64
    """The same where drafting lost: short texts are left alone, long ones are tried."""
    hopeless_wait: int = 1024
    """Serial tokens before an attempt where not even certain drafts could pay: costs may change."""
    calibration: float = 4.0
    """Weight, in accepted drafts, of the belief that signals are right; what was accepted outweighs it in time."""
    gate: Gate = "value"
    """value: verify as many drafts as the running costs justify. top: all of them when enough in a row look good.
    none: all of them, always."""
    p_min: float = 0.75
    min_drafts: int = 3
    row_cost: float = 0.3
    """First guess of what one more verify row costs, in serial steps."""
    reasoning: bool = True
    """Draft inside reasoning too."""


@dataclass(slots=True)
class DrafterStats:
    """What drafting did in one call. `net_ms` is time lost (positive) or won (negative) against the serial estimate."""

    cycles: int = 0
    """Verify steps."""
    drafted: int = 0
    """Drafts that were verified."""
    accepted: int = 0
    committed: int = 0
    """Tokens that came out of the cycles: accepted drafts and one own token each."""
    accepted_at: list[int] = field(default_factory=list)
    """By place in the block: how often that draft was accepted."""
    verified_at: list[int] = field(default_factory=list)
    """By place in the block: how often that draft was verified."""
    declines: int = 0
    """Drafts that were made and then not verified."""
    serial_tokens: int = 0
    back_offs: int = 0
    losing_cycles: int = 0
    net_ms: float = 0.0
    entry_ms: float = 0.0
    """Of the lost time, what filling the drafter's windows took."""
    off_reason: str | None = None
    """Why drafting is off for the session, when a fault turned it off."""

    @property
    def tokens_per_cycle(self) -> float | None:
        """Committed tokens per verify step; None without one."""
        return self.committed / self.cycles if self.cycles else None

    def __str__(self) -> str:
        if self.off_reason is not None:
            return f"off: {self.off_reason}"
        rate = "" if self.tokens_per_cycle is None else f" ({self.tokens_per_cycle:.2f} tokens each)"
        sign = "won" if self.net_ms <= 0 else "lost"
        return (
            f"{_counted(self.cycles, 'cycle')}{rate}, {self.accepted} of {self.drafted} drafts accepted, "
            f"{self.declines} declined, {_counted(self.back_offs, 'back-off')}, {abs(self.net_ms):.0f} ms {sign} "
            "against serial"
        )


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


class KnownCosts:
    """What drafts and verify steps cost on this machine, in serial steps, and whether the last calls won.

    Kept from call to call. Each call still finds out for itself how well drafts hold in its text.
    """

    def __init__(self, samples: int = 9) -> None:
        self._draft: deque[float] = deque(maxlen=samples)
        self._verify: dict[int, deque[float]] = {}
        self._samples = samples
        self._calls: deque[list[float]] = deque(maxlen=5)

    def begin_call(self) -> list[float]:
        """Where a call that has begun to draft keeps what its cycles lost so far, in serial steps (one number)."""
        lost = [0.0]
        self._calls.append(lost)
        return lost

    @property
    def luck(self) -> float:
        """What the cycles of a middling one of the last calls won, in serial steps. Of a single call only a clear gain
        counts."""
        lost = [call[0] for call in list(self._calls)]
        if len(lost) == 1:
            return -lost[0] if lost[0] < -2.0 else 0.0
        return -median(lost) if lost else 0.0

    def add(self, draft: float, verify: float, rows: int) -> None:
        """One cycle."""
        self._draft.append(draft)
        self._verify.setdefault(rows, deque(maxlen=self._samples)).append(verify)

    @property
    def draft(self) -> float | None:
        """Median price of a draft."""
        return median(list(self._draft)) if self._draft else None

    def verify(self) -> dict[int, float]:
        """Median price of the row counts that were measured."""
        return {rows: median(list(samples)) for rows, samples in list(self._verify.items())}

    def hopeless(self, block: int, least: int = 3) -> bool:
        """Would drafting lose even if every draft held? False until enough was measured to say so."""
        verify = self.verify()
        if len(self._draft) < least or block + 1 not in verify:
            return False
        draft = self.draft or 0.0
        return all(draft + price >= rows for rows, price in verify.items())


class Admission:
    """The controller of one call of `generate`.

    Order of calls: `admit()`; when it says yes and drafts were made, `choose(signals)`; then one of `serial_step`,
    `declined` or `verified` for what happened.
    """

    def __init__(
        self, config: AdmissionConfig | None = None, block: int = 5, known: KnownCosts | None = None
    ) -> None:
        """known: what earlier calls measured; this one adds to it."""
        self.config = config or AdmissionConfig()
        self._known = KnownCosts(self.config.samples) if known is None else known
        self._block = block
        self.stats = DrafterStats(accepted_at=[0] * block, verified_at=[0] * block)
        self._serial: deque[float] = deque(maxlen=self.config.samples)
        self._verify: dict[int, deque[float]] = {}
        self._n_serial = 0
        self._calls = 0
        self._net = 0.0
        self._debt = 0.0
        self._bad_windows = 0
        self._skip = 0
        self._attempted = False
        self._invalid = False
        self._expected = self._held = 0.0  # drafts that were expected to be accepted, and that were
        self._hoped = 0.0  # expected of the cycle at hand
        self._lost: list[float] | None = None
        self._credit = min(self.config.lucky_credit, max(0.0, self._known.luck) / 2)
        self._entry = self._choose_entry()

    # ---- questions -----------------------------------------------------------------------------------------------

    @property
    def serial_ms(self) -> float | None:
        """Median cost of a serial step; None before the first."""
        return median(self._serial) if self._serial else None

    def admit(self, in_reasoning: bool = False) -> bool:
        """Shall a draft be made now?"""
        if self._invalid or self._skip > 0 or (in_reasoning and not self.config.reasoning):
            return False
        return self._attempted or self._n_serial >= self._entry

    def _choose_entry(self) -> int:
        """Serial tokens before the first attempt."""
        if self._known.hopeless(self._block):
            return self.config.hopeless_wait
        luck = self._known.luck
        if luck == 0.0:
            return self.config.min_serial
        return self.config.lucky_serial if luck > 0 else self.config.unlucky_serial

    def choose(self, signals: Sequence[float]) -> int:
        """How many drafts to verify, 0 to decline. `signals`: chance of each draft given that those before it hold.

        A signal that is no number ends the list.
        """
        chances = []
        for chance in signals:
            if not math.isfinite(chance):
                break
            chances.append(min(1.0, max(0.0, chance)))
        self._hoped = 0.0
        if self.config.gate == "none":
            return len(signals)
        if self.config.gate == "top":
            run = next((i for i, chance in enumerate(chances) if chance < self.config.p_min), len(chances))
            return 0 if run < self.config.min_drafts else len(signals)
        return self._best_length(chances)

    def _best_length(self, chances: Sequence[float]) -> int:
        """The length with the largest expected gain over serial steps; the draft itself is paid for already."""
        serial = self.serial_ms
        if serial is None:
            return len(chances)
        best, best_gain, survival, expected = 0, 0.0, 1.0, 0.0
        trust = self._trust()
        for i, chance in enumerate(chances):
            survival *= chance
            expected += survival
            gain = serial * (1 + trust * expected) - self.verify_cost(i + 2)
            if gain > best_gain:
                best, best_gain, self._hoped = i + 1, gain, expected
        return best

    def _trust(self) -> float:
        """How far signals held what they promised in this call; 1 at first, never more."""
        weight = self.config.calibration
        return min(1.0, (self._held + weight) / (self._expected + weight))

    def worth(self, most: int) -> list[float]:
        """How likely the first 1, 2, ... of `most` drafts must be together, at least, for a further one to pay even if
        it were certain. (Making one costs little, not nothing.)"""
        serial = self.serial_ms
        if self.config.gate != "value" or not serial:
            return []
        costs = [self.verify_cost(rows) for rows in range(2, most + 2)]
        return [(more - cost) / (serial * self._trust()) for cost, more in pairwise(costs)]

    def verify_cost(self, rows: int) -> float:
        """Expected milliseconds of a verify step: the median of this row count, or a line through its neighbours."""
        serial = self.serial_ms or 0.0
        known = {1: serial} | {n: price * serial for n, price in self._known.verify().items()}
        known |= {n: median(samples) for n, samples in self._verify.items()}
        if rows in known:
            return known[rows]
        below = max(n for n in known if n < rows)
        above = min((n for n in known if n > rows), default=None)
        if above is not None:
            share = (rows - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        slope = (known[below] - serial) / (below - 1) if below > 1 else self.config.row_cost * serial
        return known[below] + (rows - below) * max(0.0, slope)

    # ---- what happened -------------------------------------------------------------------------------------------

    def serial_step(self, ms: float) -> None:
        """One token by a plain step."""
        if not 0 <= ms <= 6e7 or self._invalid:
            self._invalid = True
            return
        self._serial.append(ms)
        self._n_serial += 1
        self.stats.serial_tokens += 1
        if self._skip > 0:
            self._skip -= 1

    def entered(self, ms: float) -> None:
        """The drafter's windows were filled: a price that is paid once, and says nothing about the next cycles."""
        if not self._refuse(ms):
            self.stats.net_ms += ms
            self.stats.entry_ms += ms

    def declined(self, draft_ms: float, serial_ms: float) -> None:
        """A draft was made but not verified; the token came by a plain step."""
        if self._refuse(draft_ms, serial_ms):
            return
        self._attempted = True
        self._n_serial += 1
        self.stats.declines += 1
        self._judge(draft_ms + serial_ms, 1, verified=False)

    def verified(self, draft_ms: float, verify_ms: float, drafts: int, committed: int) -> None:
        """`drafts` drafts were verified and `committed` tokens came out (1 .. drafts + 1)."""
        if self._refuse(draft_ms, verify_ms):
            return
        self._attempted = True
        if self.serial_ms:
            self._known.add(draft_ms / self.serial_ms, verify_ms / self.serial_ms, drafts + 1)
        self._verify.setdefault(drafts + 1, deque(maxlen=self.config.samples)).append(verify_ms)
        stats, hits = self.stats, committed - 1
        self._expected = 0.95 * self._expected + self._hoped
        self._held = 0.95 * self._held + (hits if self._hoped > 0 else 0)
        stats.cycles += 1
        stats.drafted += drafts
        stats.accepted += hits
        stats.committed += committed
        for i in range(drafts):
            stats.verified_at[i] += 1
            stats.accepted_at[i] += i < hits
        self._judge(draft_ms + verify_ms, committed, verified=True)

    def _refuse(self, *times: float) -> bool:
        if not all(math.isfinite(ms) and 0 <= ms <= 6e7 for ms in times):
            self._invalid = True  # a clock that cannot be: no more drafts in this call
        return self._invalid

    def _judge(self, ms: float, rows: int, *, verified: bool) -> None:
        serial = self.serial_ms
        if serial is None:
            return
        net = ms - rows * serial
        self.stats.net_ms += net
        if self._lost is None:
            self._lost = self._known.begin_call()
            self._debt = -self._credit * serial
        self._lost[0] = (self.stats.net_ms - self.stats.entry_ms) / serial if serial > 0 else 0.0
        self.stats.losing_cycles += verified and net >= 0
        self._net += net
        self._calls += 1
        if self._calls == self.config.window or self._debt + self._net > self.config.stop_loss * serial:
            self._close_window(serial)

    def _close_window(self, serial: float) -> None:
        self._debt = max(-max(self.config.credit, self._credit) * serial, self._debt + self._net)
        if self._net < 0:
            self._bad_windows = self._skip = 0
        elif self._debt > self.config.loss_budget * serial:
            steps = self.config.back_off
            priced = self._debt / (serial * self.config.loss_share) if serial > 0 else 0.0
            self._skip = max(steps[min(self._bad_windows, len(steps) - 1)], min(self.config.longest_wait, int(priced)))
            if self._known.hopeless(self._block):
                self._skip = self.config.hopeless_wait
            self._bad_windows += 1
            self._debt = 0.0
            self.stats.back_offs += 1
        self._calls, self._net = 0, 0.0

    def left_reasoning(self) -> None:
        """What was learnt about reasoning text says nothing about the answer."""
        self._calls, self._net, self._debt = 0, 0.0, 0.0


# ---- replay ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of a machine. `verify_ms[rows - 2]` for 2, 3, ... rows."""

    serial_ms: float
    draft_ms: float
    verify_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TraceStep:
    """What a draft at one position would have been: signals of its places, and how many drafts would have held."""

    signals: tuple[float, ...]
    accepted: int
    in_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """What a policy makes of a trace."""

    tokens: int
    ms: float
    serial_ms: float
    stats: DrafterStats

    @property
    def speed(self) -> float:
        """Times as fast as serial."""
        return self.serial_ms / self.ms if self.ms else 1.0


def replay(trace: Sequence[TraceStep], costs: Costs, config: AdmissionConfig) -> Replay:
    """Run the controller over a trace with given costs, one trace step a token."""
    admission = Admission(config, len(costs.verify_ms))
    at, ms = 0, 0.0
    while at < len(trace):
        step = trace[at]
        if at > 0 and trace[at - 1].in_reasoning and not step.in_reasoning:
            admission.left_reasoning()
        if not admission.admit(step.in_reasoning):
            admission.serial_step(costs.serial_ms)
            ms += costs.serial_ms
            at += 1
            continue
        drafts = admission.choose(step.signals)
        if drafts == 0:
            admission.declined(costs.draft_ms, costs.serial_ms)
            ms += costs.draft_ms + costs.serial_ms
            at += 1
            continue
        committed = 1 + min(step.accepted, drafts)
        admission.verified(costs.draft_ms, costs.verify_ms[drafts - 1], drafts, committed)
        ms += costs.draft_ms + costs.verify_ms[drafts - 1]
        at += committed
    return Replay(at, ms, at * costs.serial_ms, admission.stats)
