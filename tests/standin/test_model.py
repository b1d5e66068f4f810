"""Whole models on Metal (run by the stand-in): the CPU's tokens, logits and states, bit for bit; E1 to E3 in short."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ds4v41 import Drafter, Model, _ext
from ds4v41.errors import Cancelled
from tests.model.support import MODES, live, nano, prefill_in, same_bits, stepped, tiny, tokens_of

from .both import ORDERS, STANDIN, needs_checked, needs_standin

pytestmark = needs_standin

N = 26  # tokens of the tiny model, whose window is 16
SEED = 3


@pytest.fixture(autouse=True)
def _as_built() -> Iterator[None]:
    yield
    STANDIN.set_options(order=ORDERS[0], checked=False, execute=True)


def on_metal(mode: str = "bf16") -> Model:
    return tiny(mode, backend="metal")


@pytest.mark.parametrize(
    ("mode", "cuts", "order"), [("bf16", (1, 7, 20), "forward"), ("fp8", (9,), "shuffled"), ("fp32", (25,), "reverse")]
)
def test_any_chunking_has_the_bits_of_the_cpu(mode: str, cuts: tuple[int, ...], order: str) -> None:
    STANDIN.set_options(order=order)
    oracle = stepped(mode, SEED, N)
    with on_metal(mode).session(64) as session:
        assert same_bits(prefill_in(session, oracle.ids, cuts), oracle.rows)
        assert live(session) == oracle.states[N]


@needs_checked
def test_every_access_of_a_run_is_right() -> None:
    """Races within and between dispatches, bounds, memory that nobody wrote: the stand-in watches all of it."""
    oracle = stepped("fp8", SEED, N)
    with on_metal("fp8").session(64) as session:
        session.prefill(oracle.ids[:5], logits=None)
        STANDIN.set_options(order="reverse", checked=True)
        for i in range(5, 9):
            assert same_bits(session.step([int(oracle.ids[i])])[0], oracle.rows[i])
        assert live(session) == oracle.states[9]


def test_going_back_marks_forks_and_files(tmp_path: Any) -> None:
    """E3: truncations, replays, marks, forks and files, with the bits of a session on the CPU that never went back."""
    oracle = stepped("bf16", SEED, N)
    ids = [int(t) for t in oracle.ids]

    def goes_on(session: Any) -> None:
        at = session.position
        assert live(session) == oracle.states[at]
        assert same_bits(session.step([ids[at]])[0], oracle.rows[at])

    with on_metal().session(64, retain=1, chunk=8) as session:
        session.prefill(ids[:9], logits=None)
        mark = session.mark()
        session.prefill(ids[9:20], logits=None)
        fork = session.fork()
        session.truncate(mark)
        goes_on(session)
        goes_on(fork)
        fork.rewind(5)  # out of reach of the rings: a replay
        goes_on(fork)
        session.save(tmp_path / "state")
        with on_metal().load_session(tmp_path / "state") as loaded:
            goes_on(loaded)
        with tiny("bf16").load_session(tmp_path / "state") as loaded:  # the file of one back end for another
            goes_on(loaded)
        fork.close()


def test_the_ledger_counts_the_same_bytes() -> None:
    tables = []
    for backend in ("auto", "metal"):
        with tiny("bf16", backend=backend).session(64) as session:
            session.prefill(tokens_of(1, 6), logits=None)
            session.start_ledger()
            session.step([5, 6])
            ledger = session.ledger()
            assert ledger.complete
            rows = [row for row in ledger.rows if row.op != "engram_io"]  # what the disk gave depends on the cache
            tables.append({(row.op, row.layer): (row.bytes, row.dispatches) for row in rows})
    assert tables[0] == tables[1] and len(tables[0]) > 50


def test_a_stopped_run_leaves_the_session_as_it_was() -> None:
    oracle = stepped("bf16", SEED, N)
    with on_metal().session(64) as session:
        session.prefill(oracle.ids[:3], logits=None)
        timer = threading.Timer(0.05, session.cancel)
        timer.start()
        with pytest.raises(Cancelled):
            while True:
                session.prefill(tokens_of(2, 40), logits=None)
                session.rewind(3)
        timer.join()
        at = session.position
        session.rewind(3)
        assert at >= 3 and live(session) == oracle.states[3]
        assert same_bits(session.step([int(oracle.ids[3])])[0], oracle.rows[3])


def test_a_step_waits_once() -> None:
    with on_metal().session(64) as session:
        session.prefill(tokens_of(1, 3), logits=None)
        before = _ext.metal_counters()
        session.step([5])
        after = _ext.metal_counters()
    n_engram = len(session.model.config.engram_layer_ids)
    assert after["waits"] - before["waits"] == 1
    assert after["command_buffers"] - before["command_buffers"] == 1 + n_engram


@pytest.mark.parametrize("mode", MODES)
def test_names(mode: str) -> None:
    assert on_metal(mode).backend == "metal"
    assert on_metal(mode).numerics_id == tiny(mode).numerics_id


def test_the_plan_counts_what_the_back_end_keeps() -> None:
    """Working memory of a device's operations: never more than planned, for chunks, steps and growing depth; and a
    session that decodes after a long prompt lets go of most of it. Runs are encoded only."""
    STANDIN.set_options(execute=False)
    for model in (on_metal("bf16"), on_metal("fp8"), nano(backend="metal")):
        for context, chunk in ((1, 1), (60, 8), (300, 9), (512, 128)):
            plan, rows = model.plan(context, retain=0, chunk=chunk)
            with model.session(context=context, retain=0, chunk=chunk) as session:
                for n in (1, rows - 1, rows, 1, rows, 3):  # then on, deeper and deeper
                    n = min(n, session.context - session.position)
                    if n > 0:
                        session.prefill([5] * n)
                        assert session._ext.working_bytes > 0
                        assert session._ext.scratch_bytes + session._ext.working_bytes <= plan.scratch
    with nano(backend="metal").session(context=2048, chunk=512) as session:
        session.prefill(range(5, 605), logits=None)
        long = session._ext.working_bytes
        session.step([5])
        assert session._ext.working_bytes < long // 4


def test_the_plan_counts_what_the_drafters_back_end_keeps() -> None:
    STANDIN.set_options(execute=False)
    model = nano(backend="metal")
    drafter = Drafter.open(None, model)
    alone, _ = model.plan(300, chunk=64)
    plan, _ = model.plan(300, chunk=64, drafter=drafter)
    with model.session(context=300, chunk=64, drafter=drafter) as session:
        session.prefill([5] * 150)
        session._ext.draft_start(5, drafter.block_size)
        session._ext.draft_row(0, 5)
        assert 0 < session._ext.draft_working_bytes < plan.scratch - alone.scratch
        assert session._ext.scratch_bytes + session._ext.working_bytes <= alone.scratch
