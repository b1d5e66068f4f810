"""The drafter's admission controller alone: no model, no clock, milliseconds are made up."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4v41 import OptionError
from ds4v41.admission import LONGEST_REST, Admission, AdmissionConfig, Costs, KnownCosts, TraceStep, replay

# Published figures of the M3 Ultra port: serial step 31.8 ms, six-row verify 108.5 ms, draft and commit about 11 ms.
ULTRA = Costs(31.8, 11.0, (62.0, 85.0, 106.0, 107.0, 108.5))


def warmed(config: AdmissionConfig | None = None, serial: float = 10.0) -> Admission:
    """A controller that saw its first serial tokens."""
    admission = Admission(config)
    for _ in range(admission.config.min_serial):
        assert not admission.admit()
        admission.serial_step(serial)
    return admission


def test_the_first_attempt_comes_when_the_serial_cost_is_known() -> None:
    admission = warmed()
    assert admission.admit()
    assert admission.serial_ms == 10.0


def test_the_serial_cost_is_the_median_of_the_last_nine() -> None:
    admission = Admission()
    for ms in [100.0] * 20 + [10, 11, 12, 13, 14, 15, 16, 17, 900]:
        admission.serial_step(ms)
    assert admission.serial_ms == 14


def test_a_losing_window_backs_off_longer_each_time_and_a_winning_one_forgives() -> None:
    admission = warmed(AdmissionConfig(stop_loss=math.inf, gate="none"))
    waits = []
    for _ in range(8):
        for _ in range(3):
            assert admission.admit()
            admission.verified(2.0, 30.0, 5, 1)
        waited = 0
        while not admission.admit():
            admission.serial_step(10.0)
            waited += 1
        waits.append(waited)
    assert waits == [4, 8, 16, 32, 64, 128, 128, 128]
    assert admission.stats.back_offs == 8
    for _ in range(3):
        admission.verified(2.0, 30.0, 5, 6)
    assert admission.admit()
    for _ in range(3):
        admission.verified(2.0, 30.0, 5, 1)
    waited = 0
    while not admission.admit():
        admission.serial_step(10.0)
        waited += 1
    assert waited == 4


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.3, 0.7, 0.9, 0.97, 1.0]), st.sampled_from([20.0, 40.0, 400.0]))
def test_while_it_rests_it_would_have_said_no(seed: int, floor: float, verify: float) -> None:
    """Told of every token it says no at each of them, also when all tokens of the rest are certain."""
    dice = random.Random(seed)
    known = KnownCosts()
    known.quiet = dice.choice([0, 1000])
    admission, rested, left = Admission(AdmissionConfig(shortest_rest=0), known=known), 0, 0
    for _ in range(400):
        wanted = admission.admit()
        assert not (wanted and left)
        if wanted and admission.choose([dice.random()] * 5):
            admission.verified(5.0, verify, 5, dice.choice([1, 1, 2, 6]))
        elif wanted:
            admission.declined(5.0, 10.0)
        else:
            admission.serial_step(10.0)
        admission.saw(1.0 if left and seed % 2 else dice.choice([None, 1.0, floor, floor * dice.random()]))
        left = left - 1 if left else 0 if wanted else admission.rest()
        rested += left > 0
    assert rested > 0 or floor > 0.9


def test_it_rests_where_the_target_is_unsure() -> None:
    """As long as it takes until the target could look certain again, and not a token longer."""
    admission = warmed()
    for drafts in (1, 2, 3, 4, 5):
        admission.verified(5.0, 10.0 + 4.0 * drafts, drafts, 1 + drafts)
    for _ in range(30):
        admission.saw(0.3)
    assert not admission.admit()
    admission.serial_step(10.0)
    admission.saw(0.3)
    rest = admission.rest()
    assert 4 < rest < LONGEST_REST
    for _ in range(rest):
        assert not admission.admit()
        admission.serial_step(10.0)
        admission.saw(1.0)
    assert admission.admit()
    admission.verified(0.0, 0.0, 5, 1)  # with blocks for nothing every attempt gains
    admission._known.verify = dict.fromkeys(range(2, 7), 0.0)
    admission._known.draft = 0.0
    assert admission.admit() and admission.rest() == 0
    admission.serial_step(math.nan)
    assert admission.rest() == LONGEST_REST  # no more drafts in this call


def test_signals_that_promise_too_much_are_believed_less() -> None:
    admission = warmed(AdmissionConfig(stop_loss=math.inf, loss_budget=math.inf))
    first = admission.choose([0.95] * 5)
    for _ in range(12):
        admission.choose([0.95] * 5)
        admission.verified(0.0, 25.0, 5, 1)
    assert first == 5 and admission.choose([0.95] * 5) == 0


def test_a_small_loss_is_carried_as_debt_before_it_backs_off() -> None:
    admission = warmed()
    for window in range(2):
        for _ in range(3):
            assert admission.admit(), window
            admission.verified(0.0, 31.0, 5, 3)  # one ms lost each time: debt 3, then 6 of the 5 allowed
    assert not admission.admit()


def test_a_large_loss_ends_the_window_at_once() -> None:
    admission = warmed()
    admission.verified(5.0, 30.0, 5, 1)
    assert not admission.admit()


def test_declines_are_priced() -> None:
    admission = warmed()
    for _ in range(3):
        assert admission.admit()
        admission.declined(3.0, 10.0)
    assert not admission.admit()
    assert admission.stats.declines == 3
    assert admission.stats.net_ms == pytest.approx(9.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e9])
def test_an_impossible_time_ends_drafting_for_the_call(bad: float) -> None:
    admission = warmed()
    admission.verified(bad, 10.0, 5, 3)
    assert not admission.admit()
    for _ in range(300):
        admission.serial_step(10.0)
    assert not admission.admit()
    assert math.isfinite(admission.stats.net_ms)


def test_an_uncertain_target_is_left_alone() -> None:
    """Drafts cannot hold where the target itself may say anything: that is known before one is made."""
    admission = warmed()
    for _ in range(40):
        admission.saw(0.3)
    assert not admission.admit()
    for _ in range(40):
        admission.saw(1.0)
    assert admission.admit()


@pytest.mark.parametrize("chance", [None, 0.0, -1.0, 1.5, math.nan, math.inf])
def test_what_is_no_chance_says_nothing_about_certainty(chance: float | None) -> None:
    admission, other = warmed(), warmed()
    for each in (admission, other):
        each.saw(0.9)
    admission.saw(chance)
    assert admission._due() == other._due()


def costly(known: KnownCosts) -> Admission:
    """Its drafts cost 0.7 steps, six rows 3.3; it saw three serial tokens of 10 ms."""
    for rows, price in ((2, 1.7), (3, 2.0), (4, 2.5), (5, 2.9), (6, 3.3)):
        known.add(0.7, price, rows)
    admission = Admission(AdmissionConfig(stop_loss=math.inf, loss_budget=math.inf), known=known)
    for _ in range(3):
        admission.serial_step(10.0)
    return admission


def test_drafts_that_do_not_hold_end_attempts_until_they_are_forgotten() -> None:
    admission, attempts = costly(KnownCosts()), 0
    while admission.admit():
        admission.choose([0.9] * 5)
        admission.verified(7.0, 33.0, 5, 1)
        attempts += 1
    assert 1 <= attempts <= 2
    waited = 0
    while not admission.admit():
        admission.serial_step(10.0)
        waited += 1
    assert 100 < waited <= 1024
    admission.choose([0.9] * 5)
    admission.verified(7.0, 33.0, 5, 6)
    assert admission.admit()


def test_declined_drafts_count_as_what_their_signals_promised() -> None:
    admission, attempts = costly(KnownCosts()), 0
    while admission.admit() and attempts < 10:
        assert admission.choose([0.1] * 5) == 0
        admission.declined(7.0, 10.0)
        attempts += 1
    assert 1 <= attempts <= 3


def test_each_call_learns_about_its_own_text_and_knows_the_costs() -> None:
    """Prices are of the machine; how well drafts hold is of the text, and texts of all kinds share a drafter."""
    known = KnownCosts()
    first = costly(known)
    while first.admit():
        first.choose([0.9] * 5)
        first.verified(7.0, 33.0, 5, 1)
    second = Admission(known=known)
    assert second.serial_ms == 10.0 and second.admit()  # at its first token: nothing has to be measured


def test_where_not_even_certain_drafts_pay_it_hardly_tries() -> None:
    """Six rows cost as much as six steps: then an attempt comes after 1,024 tokens, in this call or the next."""
    known = KnownCosts()
    first = Admission(AdmissionConfig(stop_loss=math.inf), known=known)
    for _ in range(3):
        first.serial_step(10.0)
    while first.admit():
        first.choose([1.0] * 5)
        first.verified(12.0, 60.0, 5, 6)
    assert first.stats.cycles == 1
    waited = 0
    for admission in (first, Admission(known=known)):
        for _ in range(600):
            if admission.admit():
                break
            admission.serial_step(10.0)
            waited += 1
    assert waited == 1024


def test_known_costs_serve_the_next_call() -> None:
    known = KnownCosts()
    for _ in range(9):
        known.add(0.5, 5.5, 6)  # six rows cost five and a half steps
    admission = Admission(known=known)
    for _ in range(16):
        admission.serial_step(2.0)
    assert admission.verify_cost(6) == pytest.approx(11.0)
    assert admission.choose([0.8] * 5) < 5
    assert Admission().choose([0.8] * 5) == 5  # which knows nothing yet


def test_filling_the_windows_is_lost_time_but_no_reason_to_stop() -> None:
    admission = warmed()
    admission.entered(1000.0, 128)
    assert admission.admit() and admission.stats.net_ms == admission.stats.entry_ms == 1000.0
    assert admission.stats.entry_rows == 128


def test_worth_says_how_likely_drafts_must_be_for_another_one() -> None:
    admission = warmed()  # a further row is guessed to cost 0.3 steps
    assert admission.worth(5) == pytest.approx([0.3] * 4)
    assert warmed(AdmissionConfig(gate="top")).worth(5) == [] == Admission().worth(5)


def test_a_price_from_a_bad_moment_is_not_kept_for_ever() -> None:
    known = KnownCosts()
    known.add(0.5, 30.0, 6)
    for _ in range(15):
        known.add(0.5, 2.0, 3)
    assert known.verify == {3: 2.0}
    assert known.table(6, 0.3) == pytest.approx([1.0, 1.5, 2.0, 2.3, 2.6, 2.9])


def test_a_serial_step_now_and_then_tells_what_it_costs() -> None:
    """Where everything comes out of blocks, too: the machine may have become faster or slower."""
    admission = warmed()
    for _ in range(10):
        admission.verified(1.0, 20.0, 5, 6)
        assert admission.admit()
    admission.verified(1.0, 20.0, 5, 6)
    assert not admission.admit()
    admission.declined(1.0, 30.0)
    assert admission.admit()
    for _ in range(8):
        admission.serial_step(30.0)
    assert admission.serial_ms == 30.0


def test_reasoning_is_left_alone_on_demand() -> None:
    admission = warmed(AdmissionConfig(reasoning=False))
    assert not admission.admit(in_reasoning=True)
    assert admission.admit(in_reasoning=False)


def test_the_value_gate_takes_the_length_that_pays() -> None:
    admission = warmed()  # serial 10, a further row is guessed to cost 3
    assert admission.choose([0.2, 0.9, 0.9, 0.9, 0.9]) == 0
    assert admission.choose([0.9, 0.9, 0.1, 0.9, 0.9]) == 2
    assert admission.choose([0.99] * 5) == 5
    for _ in range(9):
        admission.verified(0.0, 60.0, 5, 6)  # six rows cost six steps here: nothing can pay
    assert admission.choose([0.9] * 5) == 0


def test_the_top_gate_is_all_or_nothing() -> None:
    admission = warmed(AdmissionConfig(gate="top"))
    assert admission.choose([0.8, 0.8, 0.8, 0.1, 0.1]) == 5
    assert admission.choose([0.8, 0.8, 0.7, 0.9, 0.9]) == 0
    assert admission.choose([0.8, 0.8, math.nan, 0.9, 0.9]) == 0


@given(st.lists(st.floats(), max_size=5))
def test_any_signals_give_a_length_within_the_block(signals: list[float]) -> None:
    for gate in ("value", "top", "none"):
        assert 0 <= warmed(AdmissionConfig(gate=gate)).choose(signals) <= len(signals)  # type: ignore[arg-type]


@given(st.dictionaries(st.integers(2, 6), st.floats(1, 100), max_size=5), st.integers(1, 6))
def test_the_cost_of_unmeasured_rows_lies_between_its_neighbours(measured: dict[int, float], rows: int) -> None:
    admission = warmed(AdmissionConfig(stop_loss=math.inf))
    for n, ms in measured.items():
        admission.verified(0.0, ms, n - 1, n)
    known = {1: 10.0} | measured
    cost = admission.verify_cost(rows)
    if rows in known:
        assert cost == pytest.approx(known[rows])
    else:
        below = known[max(n for n in known if n < rows)]
        above = [known[min(n for n in known if n > rows)]] if any(n > rows for n in known) else []
        assert min([below, *above]) - 1e-9 <= cost
        assert not above or cost <= max(below, above[0]) + 1e-9


def trace(rng: random.Random, chances: tuple[float, ...], n: int) -> list[TraceStep]:
    """Drafts that hold with these chances, and signals that know it only roughly."""
    steps = []
    for _ in range(n):
        accepted = 0
        while accepted < len(chances) and rng.random() < chances[accepted]:
            accepted += 1
        steps.append(TraceStep(tuple(min(1.0, max(0.0, c + rng.uniform(-0.1, 0.1))) for c in chances), accepted))
    return steps


FIXED = AdmissionConfig(min_serial=0, stop_loss=math.inf, loss_budget=math.inf, gate="none")


def test_published_figures_come_out_of_the_replay() -> None:
    """Six-row cycles that commit 6 ran at 1.60 of serial, 2.71 at 0.74 (without the controller)."""
    rng = random.Random(1)
    perfect = replay(trace(rng, (1.0,) * 5, 3000), ULTRA, FIXED)
    assert perfect.speed == pytest.approx(1.597, abs=0.02)
    spec_bench = trace(rng, (0.70, 0.65, 0.62, 0.6, 0.6), 6000)
    fixed = replay(spec_bench, ULTRA, FIXED)
    assert fixed.stats.tokens_per_cycle == pytest.approx(2.71, abs=0.35)
    assert fixed.speed == pytest.approx(fixed.stats.tokens_per_cycle / 2.714 * 0.739, rel=0.06)


@pytest.mark.parametrize("chances", [(0.0,) * 5, (0.3, 0.2, 0.1, 0.1, 0.1), (0.5,) * 5, (0.7, 0.65, 0.62, 0.6, 0.6)])
@pytest.mark.parametrize("gate", ["value", "top"])
def test_never_much_slower_than_serial(chances: tuple[float, ...], gate: str) -> None:
    steps = trace(random.Random(2), chances, 2000)
    assert replay(steps, ULTRA, AdmissionConfig(gate=gate)).speed > 0.975  # type: ignore[arg-type]


def test_wins_are_kept() -> None:
    steps = trace(random.Random(3), (0.97,) * 5, 2000)
    assert replay(steps, ULTRA, AdmissionConfig()).speed > 0.95 * replay(steps, ULTRA, FIXED).speed


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.lists(st.floats(0, 1), min_size=5, max_size=5), st.integers(0, 5)), max_size=300),
    st.floats(0.1, 2.0),
    st.floats(1.0, 8.0),
)
def test_any_trace_is_within_its_entry_costs(steps: list[tuple[list[float], int]], draft: float, verify: float) -> None:
    """Lost time is bounded by the stop loss and one cycle for each back-off, whatever the drafts do."""
    costs = Costs(1.0, draft, tuple(1 + (verify - 1) * i / 5 for i in range(1, 6)))
    got = replay([TraceStep(tuple(s), a) for s, a in steps], costs, AdmissionConfig())
    lost = got.ms - got.serial_ms
    assert lost == pytest.approx(got.stats.net_ms, abs=1e-6)
    windows = got.stats.back_offs + 1
    assert lost <= windows * (1.0 + 0.5 + draft + verify) + 1e-6
    assert got.stats.back_offs <= 1 + len(steps) / AdmissionConfig().back_off[0]
    assert got.stats.accepted == sum(got.stats.accepted_at) <= got.stats.drafted


@pytest.mark.parametrize(
    "wrong",
    [{"certainty_memory": 0}, {"certainty_memory": -1.0}, {"certainty_memory": math.nan}, {"certainty_memory": 1.0},
     {"prior": math.nan}, {"prior": 1.1}, {"prior_weight": 0}, {"prior_weight": math.inf}, {"memory": math.inf},
     {"forget": 0}, {"forget": math.nan}, {"calibration": 0}, {"calibration": -1}, {"samples": 2.5}, {"samples": 0},
     {"samples": 10**30}, {"samples": True}, {"back_off": ()}, {"back_off": None}, {"back_off": 5},
     {"back_off": (1.5,)}, {"gate": "x"}, {"margin": math.nan}, {"loss_budget": "1"}],
)  # fmt: skip
def test_numbers_that_make_no_controller_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        AdmissionConfig(**wrong)
