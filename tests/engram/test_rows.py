"""Rows from disk, memory and cache, by any number of threads, always the bytes that a plain pread gives."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from ds4v41.engram import EngramOptions
from tests.engram.support import Table, engram, make_table, read

FOLDERS: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Table]:
    folder = tmp_path_factory.mktemp("tables")
    FOLDERS["tables"] = folder
    return _tables()


def _tables() -> list[Table]:
    folder = FOLDERS["tables"]
    return [
        make_table(folder, "joined", 3000, 64, offset=777),
        make_table(folder, "split", 2500, 64, split=True, offset=13),
    ]


FAULTS = st.none() | st.fixed_dictionaries(
    {
        "delay": st.sampled_from([0.0, 1e-4]),
        "jitter": st.sampled_from([0.0, 1e-3]),
        "short_reads": st.booleans(),
        "interrupt_every": st.sampled_from([0, 2, 5]),
        "seed": st.integers(0, 100),
    }
)
# Far apart, in runs, and again and again.
ROWS = st.lists(
    st.integers(0, 2499) | st.integers(0, 40) | st.integers(2490, 2499), min_size=0, max_size=120
) | st.builds(lambda first, n: list(range(first, first + n)), st.integers(0, 1500), st.integers(0, 1000))


@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(st.integers(0, 1), ROWS, st.sampled_from(["step", "chunk", "ahead"])), max_size=6),
    threads=st.sampled_from([1, 2, 7, 48]),
    cache=st.sampled_from([0, 3000, 20_000, 1_000_000]),
    ram=st.booleans(),
    faults=FAULTS,
    together=st.booleans(),
)
def test_any_options_give_the_plain_bytes(
    requests: list[tuple[int, list[int], str]],
    threads: int,
    cache: int,
    ram: bool,
    faults: dict[str, Any] | None,
    together: bool,
) -> None:
    tables = _tables()
    rows_of = engram(*tables, threads=threads, cache_bytes=cache, ram=ram, faults=faults)
    tickets = []
    for table, rows, urgency in requests:
        ids = np.array(rows, np.int64)
        tickets.append((table, ids, rows_of.request(table, ids, urgency)))
        if not together:
            tickets[-1][2].wait()
    for table, ids, ticket in tickets:
        assert_array_equal(ticket.wait()[0], tables[table].plain(ids))


def test_a_large_request_is_looked_up_by_the_threads(tables: list[Table]) -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 3000, 20_000)
    for cache in (0, 50_000):
        rows_of = engram(tables[0], threads=4, cache_bytes=cache)
        for _ in range(3):
            assert_array_equal(read(rows_of, 0, rows, "chunk"), tables[0].plain(rows))


def test_duplicates_are_read_once_and_neighbours_together(tables: list[Table]) -> None:
    rows_of = engram(tables[0], threads=3)
    rows = [5, 6, 7, 5, 5, 2000, 6]
    assert_array_equal(read(rows_of, 0, rows), tables[0].plain(np.array(rows)))
    counters = rows_of.counters()
    assert (counters["rows"], counters["unique"], counters["reads"]) == (7, 4, 2)
    assert counters["bytes"] == 4 * 66
    assert sum(counters["latency"]) == 2


def test_the_cache_answers_without_threads(tables: list[Table]) -> None:
    rows_of = engram(tables[0], cache_bytes=1 << 20)
    rows = np.arange(0, 3000, 100)
    read(rows_of, 0, rows)
    before, threads = rows_of.counters(), rows_of.threads
    assert threads >= 1
    for _ in range(5):
        ticket = rows_of.request(0, rows)
        assert ticket.done  # at once
        assert_array_equal(ticket.wait()[0], tables[0].plain(rows))
    after = rows_of.counters()
    assert after["reads"] == before["reads"]
    assert after["hits"] - before["hits"] == 5 * len(rows)
    assert rows_of.threads == threads


def test_tables_do_not_share_rows_in_the_cache(tables: list[Table]) -> None:
    rows_of = engram(*tables, cache_bytes=1 << 20)
    for _ in range(2):
        for table in (0, 1):
            assert_array_equal(read(rows_of, table, [7, 9]), tables[table].plain(np.array([7, 9])))


def test_memory_needs_no_threads_for_a_step(tables: list[Table]) -> None:
    rows_of = engram(tables[1], ram=True, cache_bytes=1 << 20)
    assert rows_of.in_memory
    assert rows_of.cache_bytes == 0  # nothing would be faster
    ticket = rows_of.request(0, np.arange(48))
    assert ticket.done
    assert_array_equal(ticket.wait()[0], tables[1].plain(np.arange(48)))
    assert rows_of.counters()["reads"] == 0


def test_reads_of_a_step_overlap(tables: list[Table]) -> None:
    """48 rows of two tables at 300 ms a read take about one read, not 48."""
    rows_of = engram(*tables, threads=96, faults={"delay": 0.3})
    rows = np.arange(0, 2400, 100)
    begin = time.perf_counter()
    tickets = [rows_of.request(table, rows) for table in (0, 1)]
    assert time.perf_counter() - begin < 0.3  # asking does not wait
    seconds = sum(ticket.wait()[1] for ticket in tickets)
    assert 0.15 < seconds < 3 * 0.3
    assert rows_of.counters()["read_seconds"] > 48 * 0.3


def test_a_step_overtakes_a_chunk_that_is_read_ahead(tables: list[Table]) -> None:
    rows_of = engram(tables[0], threads=1, faults={"delay": 0.002})
    ahead = rows_of.request(0, np.arange(0, 3000, 70), "ahead")
    step = rows_of.request(0, np.array([2999]), "step")
    step.wait()
    assert not ahead.done
    assert_array_equal(ahead.wait()[0], tables[0].plain(np.arange(0, 3000, 70)))


def test_direct_reads(tables: list[Table], tmp_path: Path) -> None:
    from ds4v41.errors import EngramError

    try:
        rows_of = engram(*tables, direct=True, threads=4, faults={"short_reads": True, "interrupt_every": 3})
    except EngramError as error:
        pytest.skip(str(error))
    rows = np.array([0, 1, 2, 61, 62, 63, 1500, 2499])
    for table in (0, 1):
        assert_array_equal(read(rows_of, table, rows), tables[table].plain(rows))


def test_a_scan_does_not_push_out_hot_rows(tables: list[Table]) -> None:
    hot, room = np.arange(0, 200), 600 * 66 * 2
    rows_of = engram(tables[0], cache_bytes=room)
    for _ in range(3):
        read(rows_of, 0, hot)
    read(rows_of, 0, np.arange(400, 3000), "chunk")  # more than four times the cache
    before = rows_of.counters()["hits"]
    read(rows_of, 0, hot)
    assert rows_of.counters()["hits"] - before > 0.9 * len(hot)
    assert rows_of.cached <= rows_of.cache_rows
    assert rows_of.cache_bytes <= room


def test_the_rows_of_a_token_take_as_long_as_one_read(tables: list[Table]) -> None:
    """48 reads, as a token of the released model: on 16 threads they would take three times as long."""
    delay, took = 0.03, []
    rows_of = engram(*tables, threads=EngramOptions().n_threads(), faults={"delay": delay})
    for i in range(7):
        begin = time.perf_counter()
        tickets = [rows_of.request(table, np.arange(24) * 100 + i) for table in (0, 0)]
        for ticket in tickets:
            ticket.wait()
        took.append(time.perf_counter() - begin)
    assert delay <= min(took) < 1.9 * delay


def test_rows_that_the_system_has_do_not_hide_those_it_has_not(tables: list[Table]) -> None:
    """One read in fifteen comes from the disk: still one of its latencies, not two or three in a row on one thread."""
    delay, took = 0.02, []
    rows_of = engram(tables[0], threads=EngramOptions().n_threads(), faults={"delay": delay, "delay_share": 0.07})
    rng = np.random.default_rng(2)
    for i in range(60):
        rows = np.sort(rng.choice(47, 24, replace=False)) * 63 + i
        begin = time.perf_counter()
        tickets = [rows_of.request(0, rows), rows_of.request(0, rows + 1)]
        for ticket in tickets:
            ticket.wait()
        took.append(time.perf_counter() - begin)
    assert delay <= max(took)
    assert np.quantile(took[10:], 0.8) < 1.9 * delay


def test_a_step_finds_a_thread_while_a_chunk_is_read(tables: list[Table]) -> None:
    delay, took = 0.03, []
    rows_of = engram(*tables, threads=8, faults={"delay": delay})
    chunk = rows_of.request(0, np.arange(29) * 100, "chunk")
    ahead = rows_of.request(1, np.arange(48) * 52, "ahead")  # halves: 96 reads on 4 threads
    time.sleep(delay / 2)
    for i in range(3):
        begin = time.perf_counter()
        rows_of.request(0, np.array([900 * i + 5]), "step").wait()
        took.append(time.perf_counter() - begin)
    assert not ahead.done and min(took) < 1.9 * delay
    chunk.wait()
    ahead.abandon()
