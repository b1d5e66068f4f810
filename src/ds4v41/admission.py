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
from itertools import accumulate, pairwise
from operator import mul
from statistics import median
from typing import Literal

from .errors import OptionError, shown

Gate = Literal["value", "top", "none"]


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """The controller's numbers. Costs are in serial steps, so that they fit any machine."""

    min_serial: int = 3
    """Serial tokens before the first attempt of the first call: they show what a serial step costs."""
    samples: int = 9
    """Newest samples whose median counts."""
    window: int = 3
    """Attempts that are judged together."""
    loss_budget: float = 0.5
    """Debt, in serial steps, that a window without gain may leave before it backs off."""
    credit: float = 2.0
    """Most gain of earlier windows, in serial steps, that later losses may use up."""
    stop_loss: float = 1.0
    """Debt in the middle of a window, in serial steps, that ends it at once."""
    back_off: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    """Serial tokens after a losing window, by the number of losing windows in a row."""
    prior: float = 0.97
    """Chance of a draft where the target is certain, before anything was seen of the text."""
    prior_weight: float = 8.0
    """Weight of the prior, in drafts."""
    memory: float = 0.98
    """What an attempt leaves of the weight of those before it."""
    forget: float = 512.0
    """Serial tokens after which half of what was seen is forgotten: text changes."""
    certainty_memory: float = 0.9
    """The certainty of the target is a running mean with this memory a token."""
    longest_unmeasured: int = 64
    """Tokens out of blocks after which one serial step is taken, to know what it costs now."""
    longest_quiet: int = 1024
    """Tokens without an attempt, in all calls together, after which one is made: costs may have changed."""
    calibration: float = 4.0
    """Weight, in accepted drafts, of the belief that signals are right; what was accepted outweighs it in time."""
    margin: float = 0.2
    """Expected gain of an attempt, in serial steps, above which it is made: not all that a cycle costs is timed."""
    shortest_rest: int = 3
    """Tokens after a no of the gate at which it is not asked again: looking costs time as well."""
    gate: Gate = "value"
    """value: verify as many drafts as the running costs justify. top: all of them when enough in a row look good.
    none: all of them, always."""
    p_min: float = 0.75
    min_drafts: int = 3
    row_cost: float = 0.3
    """First guess of what one more verify row costs, in serial steps."""
    draft_cost: float = 0.5
    """First guess of what a draft costs, in serial steps."""
    reasoning: bool = True
    """Draft inside reasoning too."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            whole = name in _WHOLE
            kind = int if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
                a = "a whole number" if whole else "a number"
                raise OptionError(f"{name}: expected {a} from {low} to {high}, found {shown(value)}")
        steps = self.back_off
        if not isinstance(steps, tuple) or not steps or not all(type(n) is int and n >= 0 for n in steps):
            raise OptionError(f"back_off: expected at least one whole number of tokens, found {shown(steps)}")
        if self.gate not in ("value", "top", "none"):
            raise OptionError(f"gate: expected value, top or none, found {shown(self.gate)}")


_MUCH, _INF = 1e9, math.inf
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("min_serial", 0, _MUCH), ("samples", 1, 4096), ("window", 1, _MUCH), ("loss_budget", -_INF, _INF),
    ("credit", -_INF, _INF), ("stop_loss", -_INF, _INF), ("prior", 0, 1), ("prior_weight", 1e-9, _MUCH),
    ("memory", 0, 1), ("forget", 1e-3, _MUCH), ("certainty_memory", 1e-6, 1 - 1e-6), ("longest_unmeasured", 1, _MUCH),
    ("longest_quiet", 0, _MUCH), ("calibration", 1e-9, _MUCH), ("margin", -_INF, _INF), ("shortest_rest", 0, _MUCH),
    ("p_min", 0, 1), ("min_drafts", 0, _MUCH), ("row_cost", 0, _MUCH), ("draft_cost", 0, _MUCH),
)  # fmt: skip
_WHOLE = frozenset(
    {"min_serial", "samples", "window", "longest_unmeasured", "longest_quiet", "shortest_rest", "min_drafts"}
)


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
    entry_rows: int = 0
    """Rows that were put into them then."""
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


LONGEST_REST = 32
"""Tokens that the decode loop takes at most without asking; the statistics lag so far behind."""
_STALE = 16
"""Cycles after which the oldest price of every other row count is forgotten."""


class KnownCosts:
    """What drafts and verify steps cost on this machine, in serial steps.

    Kept from call to call, where how well drafts hold is found out by each call for its own text.
    """

    def __init__(self, samples: int = 9) -> None:
        self._drafts: deque[float] = deque(maxlen=samples)
        self._cycles: dict[int, deque[float]] = {}
        self._n_cycles = 0
        self._samples = samples
        self.draft: float | None = None
        """Median price of a draft."""
        self.verify: dict[int, float] = {}
        """Median price of the row counts that were measured. Replaced, never changed: other threads read it."""
        self.quiet = 0
        """Tokens since the last attempt."""
        self._serial: deque[float] = deque(maxlen=samples)
        self._serial_ms: float | None = None  # their median, once somebody asked for it

    def add_serial(self, ms: float) -> None:
        """One serial step."""
        self._serial.append(ms)
        self._serial_ms = None

    @property
    def serial_ms(self) -> float | None:
        """Median time of a serial step."""
        middle = self._serial_ms
        if middle is None and self._serial:
            middle = self._serial_ms = median(list(self._serial))
        return middle

    def add_draft(self, draft: float) -> None:
        """One draft, whatever became of it."""
        self._drafts.append(draft)
        self.draft = median(list(self._drafts))

    def add(self, draft: float, verify: float, rows: int) -> None:
        """One cycle."""
        self.add_draft(draft)
        samples = self._cycles.setdefault(rows, deque(maxlen=self._samples))
        samples.append(verify)
        self._n_cycles += 1
        if self._n_cycles % _STALE == 0:
            self._age(rows)
        self.verify = {**self.verify, rows: median(list(samples))}

    def _age(self, rows: int) -> None:
        """What was measured once in a bad moment, and is not tried since, is forgotten a sample at a time."""
        for n, samples in list(self._cycles.items()):
            if n != rows and samples:
                samples.popleft()
        self.verify = {n: median(list(of)) for n, of in list(self._cycles.items()) if of}

    def table(self, rows: int, row_cost: float) -> list[float]:
        """Prices of 1, 2 .. `rows` rows: medians, or a line from the neighbours of a count that was not measured."""
        known = {1: 1.0} | self.verify
        return [known[n] if n in known else _between(known, n, row_cost) for n in range(1, rows + 1)]


def _between(known: dict[int, float], rows: int, row_cost: float) -> float:
    below = max(n for n in known if n < rows)
    above = min((n for n in known if n > rows), default=None)
    if above is not None:
        return known[below] + (rows - below) / (above - below) * (known[above] - known[below])
    # Hopeful: what is thought too dear is never measured. (The second row costs more than those behind it.)
    slope = row_cost if below == 1 else min(row_cost, (known[below] - 1) / (below - 1))
    return known[below] + (rows - below) * max(0.0, slope)


class Admission:
    """The controller of one call of `generate`.

    Order of calls: `saw(chance)` for every token that was drawn; `admit()`; when it says yes and drafts were made,
    `choose(signals)`; then one of `serial_step`, `declined` or `verified` for what happened.
    """

    def __init__(self, config: AdmissionConfig | None = None, block: int = 5, known: KnownCosts | None = None) -> None:
        """known: what earlier calls measured; this one adds to it."""
        self.config = config or AdmissionConfig()
        self._known = KnownCosts(self.config.samples) if known is None else known
        self._block = block
        self.stats = DrafterStats(accepted_at=[0] * block, verified_at=[0] * block)
        self._table: list[float] = []  # prices of row counts; empty: to be asked for
        self._least_chance = math.inf  # that makes an attempt worth its price, by this table
        self._n_serial = self._unmeasured = 0
        self._calls = 0
        self._net = 0.0
        self._debt = 0.0
        self._bad_windows = 0
        self._skip = 0
        self._invalid = False
        self._expected = self._held = 0.0  # drafts that were expected to be accepted, and that were
        self._hoped = 0.0  # expected of the cycle at hand
        self._log_certainty = self._certainty_weight = 0.0  # a weighted sum, and the sum of the weights
        self._seen_held = self._seen_due = 0.0  # drafts that held, and that should have by the target's certainty
        self._keep = 0.5 ** (1 / self.config.forget)
        self._asked: tuple[float, list[float]] = (1.0, [])  # certainty and signals of the attempt at hand

    # ---- questions -----------------------------------------------------------------------------------------------

    @property
    def serial_ms(self) -> float | None:
        """Median cost of the last serial steps, also of earlier calls; None before the first."""
        return self._known.serial_ms

    def admit(self, in_reasoning: bool = False) -> bool:
        """Shall a draft be made now?"""
        if self._invalid or self._skip > 0 or (in_reasoning and not self.config.reasoning):
            return False
        if self._n_serial < self.config.min_serial and (self._known.serial_ms is None or not self._known.verify):
            return False
        if self._unmeasured >= self.config.longest_unmeasured:
            return False
        if self.config.gate != "value" or self._known.quiet >= self.config.longest_quiet:
            return True
        if not self._table:
            self._ask_prices()
        return self._due() * self._quality() >= self._least_chance

    def rest(self) -> int:
        """At how many plain tokens from now on nobody shall ask: admit() would say no whatever they are, or has just
        said it. They are told afterwards, in their order."""
        if self._invalid:
            return LONGEST_REST
        gated = 0
        if self.config.gate == "value" and self._table:
            gated = self._below_gate()
            if gated > 0:
                gated = min(max(gated, self.config.shortest_rest), self.config.longest_quiet - self._known.quiet)
        return max(0, min(LONGEST_REST, max(gated, self._skip)))

    def _below_gate(self) -> int:
        """So many times, from now on, the target cannot look certain enough, even if every token from now on is."""
        quality = max(self._quality(), self.config.prior)  # it drifts to the prior, token by token
        if self._least_chance > 1.001 * quality:
            return LONGEST_REST
        if self._least_chance <= 0.0:
            return 0
        memory, wanted = self.config.certainty_memory, 2 * math.log(self._least_chance / quality)
        # After k certain tokens the sum of the weights is  weight u + (1 - u) / (1 - memory)  with  u = memory ** k,
        # and what the gate compares is  sum u / that.
        most = wanted / (1 - memory)
        left = self._log_certainty - wanted * self._certainty_weight + most
        if left >= most or most >= 0:  # (both are negative where the gate is shut)
            return 0
        return int(math.log(most / left) / math.log(memory) - 1e-6) + 1

    def _due(self) -> float:
        """How likely a draft should hold by the target's certainty. (Its likeliest token is right more often than it
        is certain, hence the root; docs/dspark.md has the numbers.)"""
        return math.exp(0.5 * self._log_certainty / self._certainty_weight) if self._certainty_weight else 1.0

    def _quality(self) -> float:
        """Drafts that held over drafts that should have."""
        weight = self.config.prior_weight
        return (weight * self.config.prior + self._seen_held) / (weight + self._seen_due)

    def _expected_gain(self, chance: float) -> float:
        """Of an attempt whose drafts each hold with this chance if those before did, in serial steps."""
        survival, tokens, best = 1.0, 1.0, 0.0
        chance = min(0.99, chance)
        for price in self._table[1:]:
            survival *= chance
            tokens += survival
            if tokens - price > best:
                best = tokens - price
        return best - (self.config.draft_cost if self._known.draft is None else self._known.draft)

    def choose(self, signals: Sequence[float]) -> int:
        """How many drafts to verify, 0 to decline. `signals`: chance of each draft given that those before it hold.

        A signal that is no number ends the list.
        """
        chances = []
        for chance in signals:
            if not math.isfinite(chance):
                break
            chances.append(min(1.0, max(0.0, chance)))
        self._hoped, self._asked = 0.0, (self._due(), chances)
        if self.config.gate == "none":
            return len(signals)
        if self.config.gate == "top":
            run = next((i for i, chance in enumerate(chances) if chance < self.config.p_min), len(chances))
            return 0 if run < self.config.min_drafts else len(signals)
        return self._best_length(chances)

    def _best_length(self, chances: Sequence[float]) -> int:
        """The length with the largest expected gain over serial steps; the draft itself is paid for already."""
        if self.serial_ms is None:
            return len(chances)
        best, best_gain, survival, expected = 0, 0.0, 1.0, 0.0
        trust = self._trust()
        for i, chance in enumerate(chances):
            survival *= chance
            expected += survival
            gain = 1 + trust * expected - self._price(i + 2)
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
        if self.config.gate != "value" or self.serial_ms is None:
            return []
        prices, trust = [self._price(rows) for rows in range(2, most + 2)], self._trust()
        return [(more - price) / trust for price, more in pairwise(prices)]

    def verify_cost(self, rows: int) -> float:
        """Expected milliseconds of a verify step."""
        return self._price(rows) * (self.serial_ms or 0.0)

    def _price(self, rows: int) -> float:
        """In serial steps."""
        if not self._table:
            self._ask_prices()
        return self._table[rows - 1]

    def _ask_prices(self) -> None:
        """Once after every attempt: a token that is not drafted should cost next to nothing."""
        self._table = self._known.table(self._block + 1, self.config.row_cost)
        low, high, gain, margin = 0.0, 1.0, self._expected_gain, self.config.margin
        if gain(high) <= margin:
            low = math.inf
        else:
            for _ in range(12):  # the gain rises with the chance
                middle = (low + high) / 2
                if gain(middle) > margin:
                    high = middle
                else:
                    low = middle
        self._least_chance = low

    # ---- what happened -------------------------------------------------------------------------------------------

    def saw(self, chance: float | None) -> None:
        """A token was drawn; chance: of the target's likeliest token there. None and what is no chance say nothing."""
        if chance is None or not 0.0 < chance <= 1.0:
            return
        memory = self.config.certainty_memory
        self._log_certainty = memory * self._log_certainty + math.log(chance)
        self._certainty_weight = memory * self._certainty_weight + 1

    def serial_step(self, ms: float) -> None:
        """One token by a plain step."""
        if not 0 <= ms <= 6e7 or self._invalid:
            self._invalid = True
            return
        self._known.add_serial(ms)
        self._n_serial += 1
        self._unmeasured = 0
        self._known.quiet += 1
        self._seen_held *= self._keep
        self._seen_due *= self._keep
        self.stats.serial_tokens += 1
        if self._skip > 0:
            self._skip -= 1

    def entered(self, ms: float, rows: int) -> None:
        """The drafter's windows were filled with so many rows: paid once, and no reason to stop."""
        if not self._refuse(ms):
            self.stats.net_ms += ms
            self.stats.entry_ms += ms
            self.stats.entry_rows += rows

    def declined(self, draft_ms: float, serial_ms: float) -> None:
        """A draft was made but not verified; the token came by a plain step."""
        if self._refuse(draft_ms, serial_ms):
            return
        if self.serial_ms:
            self._known.add_draft(draft_ms / self.serial_ms)
        self._known.add_serial(serial_ms)
        self._n_serial += 1
        self._unmeasured = 0
        self.stats.declines += 1
        survivals = [1.0, *accumulate(self._asked[1], mul)]
        self._learn(sum(survivals[1:]), sum(survivals[:-1]))
        self._judge(draft_ms + serial_ms, 1, verified=False)

    def verified(self, draft_ms: float, verify_ms: float, drafts: int, committed: int) -> None:
        """`drafts` drafts were verified and `committed` tokens came out (1 .. drafts + 1)."""
        if self._refuse(draft_ms, verify_ms):
            return
        if self.serial_ms:
            self._known.add(draft_ms / self.serial_ms, verify_ms / self.serial_ms, drafts + 1)
        self._unmeasured += committed
        stats, hits = self.stats, committed - 1
        self._learn(hits, hits + (hits < drafts))
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

    def _learn(self, held: float, tried: float) -> None:
        """Of `tried` drafts `held` were right; of drafts that were not verified both are expected numbers."""
        memory = self.config.memory
        self._seen_held = memory * self._seen_held + held
        self._seen_due = memory * self._seen_due + tried * self._asked[0]
        self._known.quiet = 0
        self._table = []

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
        self.stats.losing_cycles += verified and net >= 0
        self._net += net
        self._calls += 1
        if self._calls == self.config.window or self._debt + self._net > self.config.stop_loss * serial:
            self._close_window(serial)

    def _close_window(self, serial: float) -> None:
        self._debt = max(-self.config.credit * serial, self._debt + self._net)
        if self._net < 0:
            self._bad_windows = self._skip = 0
        elif self._debt > self.config.loss_budget * serial:
            steps = self.config.back_off
            self._skip = steps[min(self._bad_windows, len(steps) - 1)]
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
    certainty: float | None = None
    """How likely the target's likeliest token was where the token in front of the drafts was drawn."""


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
    at, ms, rest, refused = 0, 0.0, 0, False
    while at < len(trace):
        step = trace[at]
        if at > 0 and trace[at - 1].in_reasoning and not step.in_reasoning:
            admission.left_reasoning()
        admission.saw(step.certainty)
        if refused and config.reasoning:
            rest = admission.rest()
        refused = rest == 0 and not admission.admit(step.in_reasoning)
        if rest > 0 or refused:
            rest -= rest > 0
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
        for passed in trace[at + 1 : at + committed]:
            admission.saw(passed.certainty)
        at += committed
    return Replay(at, ms, at * costs.serial_ms, admission.stats)
