"""Engram rows that the device waits for itself: the same bits, and every way in which rows do not come.

A step is issued as a whole while its rows are on their way; the layer that needs them runs behind a shared event.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import ds4v41
from ds4v41 import _ext
from ds4v41.engram import EngramOptions, open_engram
from ds4v41.errors import BackendError, Cancelled, EngramError
from ds4v41.session import Session
from ds4v41.weights import build, default_activations
from tests.engram.test_session import CHECKPOINT, TOKENS
from tests.model.support import live

from .both import ORDERS, STANDIN, needs_standin

pytestmark = [
    needs_standin,
    pytest.mark.skipif(
        STANDIN is None and os.environ.get("DS4_CUDA_JOIN") != "1", reason="on a GPU the host waits unless asked"
    ),
]
DEVICE = "metal" if STANDIN is not None else "cuda"
TABLES = len(CHECKPOINT.config.engram_layer_ids)
N = 12


@pytest.fixture(autouse=True)
def _as_built() -> Iterator[None]:
    yield
    if STANDIN is not None:
        STANDIN.set_options(order=ORDERS[0], checked=False, execute=True, patience=300.0)


def nano(faults: dict[str, Any] | None = None, backend: str = DEVICE, **options: Any) -> ds4v41.Model:
    """The nano model whose disk misbehaves; nothing is cached."""
    rows = open_engram(CHECKPOINT, EngramOptions(**{"cache": 0, **options}), faults=faults)
    mode = default_activations(CHECKPOINT.config, CHECKPOINT.dialect)
    return ds4v41.Model(CHECKPOINT, build(CHECKPOINT, mode, backend, 2, rows), mode, 0, rows)


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    """Logits of the CPU with tables in memory."""
    with nano(backend="auto", mode="ram", cache=None) as model, model.session(64) as session:
        return session.prefill(TOKENS[: 3 * N], logits="all")


def joined(session: Session) -> int:
    return int(session._ext.engram_counters()["joined"])


@pytest.mark.parametrize("order", ORDERS)
def test_late_rows_give_the_same_bits(plain: np.ndarray, order: str) -> None:
    """Also in parts of up to 16 rows, as verifications are, and when the tables' rows come in any order."""
    if STANDIN is not None:
        STANDIN.set_options(order=order)
    # Much later than the stand-in needs for the layers before: a device that does not wait gives other bits.
    with nano({"delay": 0.15, "jitter": 0.05, "seed": 4}, threads=300) as model, model.session(64) as session:
        at = 0
        for n in (1, 6, 16, 1):
            before, counts = joined(session), _ext.metal_counters()
            assert_array_equal(session.prefill(TOKENS[at : at + n], logits="all"), plain[at : at + n])
            at += n
            assert joined(session) - before == TABLES
            after = _ext.metal_counters()
            assert [after[k] - counts[k] for k in ("command_buffers", "waits", "latches")] == [TABLES + 1, 1, TABLES]


def test_rows_that_are_there_need_no_event(plain: np.ndarray) -> None:
    with nano(mode="ram", cache=None) as model, model.session(64) as session:
        for i in range(4):
            assert_array_equal(session.step([TOKENS[i]])[0], plain[i])
        assert joined(session) == 0


def test_the_whole_step_is_issued_before_its_rows_are_there() -> None:
    with nano({"delay": 0.8}, threads=64) as model, model.session(64) as session:
        session.step([TOKENS[0]])
        before = _ext.metal_counters()["dispatches"]
        ended: list[float] = []
        began = time.perf_counter()
        thread = threading.Thread(target=lambda: (session.step([TOKENS[1]]), ended.append(time.perf_counter())))
        thread.start()
        time.sleep(0.4)
        issued = _ext.metal_counters()["dispatches"]
        thread.join()
        assert issued == _ext.metal_counters()["dispatches"] > before
        assert ended[0] - began > 0.75
        assert session._ext.engram_counters()["wait_seconds"] > 0


@pytest.mark.parametrize("code", [errno.EIO, 0])
def test_a_disk_error_is_told_at_the_end_and_the_session_is_as_it_was(plain: np.ndarray, code: int) -> None:
    faults = {"fail_after": 400, "fail_errno": code, "delay": 1e-3}
    with nano(faults) as model, model.session(64) as session:
        failed = 0
        position = 0
        while failed < 3:  # and again, at the same place
            try:
                assert_array_equal(session.step([TOKENS[position]])[0], plain[position])
                position += 1
            except EngramError:
                failed += 1
            assert session.position == position
        assert 4 < position < 3 * N and joined(session) > 0
        with nano(backend="auto", mode="ram", cache=None) as sound, sound.session(64) as never_failed:
            never_failed.prefill(TOKENS[:position], logits=None)
            assert live(session) == live(never_failed)


def test_a_cancel_ends_a_step_that_waits_for_the_disk(plain: np.ndarray) -> None:
    with nano({"delay": 1.5}, threads=64) as model, model.session(64) as session:
        for _ in range(2):
            timer = threading.Timer(0.2, session.cancel)
            timer.start()
            began = time.perf_counter()
            with pytest.raises(Cancelled):
                session.step([TOKENS[0]])
            assert time.perf_counter() - began < 1.2
            timer.join()
            assert session.position == 0
        assert_array_equal(session.step([TOKENS[0]])[0], plain[0])  # what was abandoned disturbs nothing


def test_a_session_that_waits_holds_up_no_other(plain: np.ndarray) -> None:
    slow, fast = nano({"delay": 1.0}, threads=64), nano(mode="ram", cache=None)
    with slow, fast, slow.session(64) as a, fast.session(64) as b:
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append((a.step([TOKENS[0]])[0], time.perf_counter())))
        thread.start()
        time.sleep(0.1)
        assert_array_equal(b.step([TOKENS[0]])[0], plain[0])
        ended = time.perf_counter()
        thread.join()
        assert_array_equal(got[0][0], plain[0])
        assert ended < got[0][1]


def test_a_trace_and_the_ledger_wait_themselves(plain: np.ndarray) -> None:
    """They look at every operation's result, so nothing may stand behind an event."""
    with nano({"delay": 2e-3}) as model, model.session(64) as session:
        session._ext.trace_run(TOKENS[:1], "all")
        session.start_ledger()
        assert_array_equal(session.step([TOKENS[1]])[0], plain[1])
        assert joined(session) == 0
        assert session.ledger().complete


@pytest.mark.skipif(STANDIN is None, reason="a real device waits for ever")
def test_an_event_that_nobody_signals_is_reported() -> None:
    """The host waits for the rows before it waits for the device, so this is a fault of the host: planted here."""
    STANDIN.set_options(patience=0.05)
    with nano({"delay": 0.6}, threads=64) as model, model.session(64) as session:
        with pytest.raises(BackendError, match=r"a shared event did not reach \d+ within 0\.05"):
            session.step([TOKENS[0]])
        assert session.position == 0
        STANDIN.set_options(patience=300.0)
        session.step([TOKENS[0]])
