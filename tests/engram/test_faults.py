"""What goes wrong with files and disks: a clear error that names file and offset, and nothing hangs."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ds4v41.errors import CheckpointError, EngramError, OptionError
from tests.engram.support import Table, engram, make_table, read


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return make_table(tmp_path, "table", 1000, 64, offset=100)


def test_a_file_that_is_too_short_is_refused_when_it_is_opened(table: Table) -> None:
    end = 100 + 1000 * 66
    os.truncate(table.codes, end - 1)
    with pytest.raises(EngramError, match=rf"table is truncated: expected 1000 rows of 66 bytes up to offset {end}"):
        engram(table)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match=r"cannot open .*/none: No such file"):
        engram(Table(10, 32, tmp_path / "none"))
    with pytest.raises(EngramError, match="is not a file"):
        engram(Table(10, 32, tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(table: Table) -> None:
    table.codes.chmod(0)
    with pytest.raises(EngramError, match="Permission denied"):
        engram(table)


@pytest.mark.parametrize("row", [-1, 1000, 2**40])
def test_a_row_that_is_not_there(table: Table, row: int) -> None:
    rows_of = engram(table, cache_bytes=1 << 20)
    with pytest.raises(EngramError, match=rf"row {row} of .*table is out of range \(1000 rows\)"):
        read(rows_of, 0, [3, row])
    assert_array_equal(read(rows_of, 0, [3]), table.plain(np.array([3])))


def test_a_file_that_is_cut_while_it_is_open(table: Table) -> None:
    rows_of = engram(table)
    os.truncate(table.codes, 100 + 500 * 66 + 10)
    assert_array_equal(read(rows_of, 0, [499]), table.plain(np.array([499])))
    with pytest.raises(EngramError, match=rf"table, offset {100 + 500 * 66 + 10}, row 500: the file ends inside"):
        read(rows_of, 0, [500])


def test_a_file_that_is_replaced_while_it_is_open(table: Table, tmp_path: Path) -> None:
    """What was opened goes on to be read; an error says that the path leads elsewhere now."""
    rows = np.arange(0, 1000, 99)
    want = table.plain(rows)
    rows_of = engram(table)
    kept = os.open(table.codes, os.O_RDWR)
    os.replace(make_table(tmp_path, "other", 1000, 64).codes, table.codes)
    assert_array_equal(read(rows_of, 0, rows), want)
    os.ftruncate(kept, 0)
    os.close(kept)
    with pytest.raises(EngramError, match=r"row 5: .*\(the file was replaced after it was opened\)"):
        read(rows_of, 0, [5])


@pytest.mark.parametrize(("what", "offset"), [("code", 40), ("scale", 65)])
def test_a_value_that_is_not_a_number(table: Table, what: str, offset: int) -> None:
    at = 100 + 7 * 66 + offset
    with open(table.codes, "r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    for options in ({}, {"ram": True}, {"cache_bytes": 1 << 20}):
        rows_of = engram(table, **options)
        # Its neighbours are fine, even if one read brings all three.
        assert_array_equal(read(rows_of, 0, [6, 8]), table.plain(np.array([6, 8])))
        with pytest.raises(EngramError, match=f"offset {at}, row 7: a {what} is not a number"):
            read(rows_of, 0, [6, 7])


def test_a_bad_scale_in_a_file_of_its_own(tmp_path: Path) -> None:
    table = make_table(tmp_path, "split", 100, 64, split=True, offset=10)
    assert table.scales is not None
    with open(table.scales, "r+b") as file:
        file.seek(10 + 7 * 2 + 1)
        file.write(b"\xff")
    with pytest.raises(EngramError, match=r"split.scales, offset 25, row 7: a scale"):
        read(engram(table), 0, [7])


@pytest.mark.parametrize("code", [errno.EIO, errno.ENXIO])
def test_a_disk_error(table: Table, code: int) -> None:
    rows_of = engram(table, threads=4, faults={"fail_after": 3, "fail_errno": code})
    for _ in range(3):
        with pytest.raises(EngramError, match=rf"table, offset \d+, row \d+: read failed: {os.strerror(code)}"):
            read(rows_of, 0, np.arange(0, 1000, 90))


def test_an_exception_in_a_reading_thread(table: Table) -> None:
    rows_of = engram(table, threads=4, faults={"fail_after": 3, "fail_errno": 0})
    with pytest.raises(EngramError, match=r"a reading thread failed on .*table: injected exception"):
        read(rows_of, 0, np.arange(0, 1000, 90))
    with pytest.raises(EngramError, match="injected exception"):
        read(rows_of, 0, np.arange(600), "chunk")


def test_loading_into_memory_fails_with_the_disk(table: Table) -> None:
    with pytest.raises(EngramError, match="read failed"):
        engram(table, ram=True, faults={"fail_after": 0})


def test_letting_go_does_not_wait_for_the_disk(table: Table) -> None:
    rows_of = engram(table, threads=2, faults={"delay": 1.0})
    begin = time.perf_counter()
    ticket = rows_of.request(0, np.arange(0, 1000, 90))
    ticket.abandon()
    del ticket
    assert time.perf_counter() - begin < 0.66


def test_closing_with_reads_in_flight_waits_only_for_those(table: Table) -> None:
    rows_of = engram(table, threads=2, faults={"delay": 0.4})
    ticket = rows_of.request(0, np.arange(0, 1000, 90))  # 12 reads: 2.4 s
    time.sleep(0.02)
    begin = time.perf_counter()
    del ticket, rows_of
    assert time.perf_counter() - begin < 1.6


def test_options_that_make_no_sense(table: Table) -> None:
    with pytest.raises(OptionError, match="at least one reading thread"):
        engram(table, threads=0)
    with pytest.raises(OptionError, match="0 bytes or more"):
        engram(table, cache_bytes=-1)
    with pytest.raises(OptionError, match="urgency"):
        read(engram(table), 0, [1], "soon")
    with pytest.raises(CheckpointError, match="expected 66 bytes, got 60"):
        from ds4v41 import _ext

        _ext.Engram([(10, 64, str(table.codes), 0, 60, "", 0, 0)])
