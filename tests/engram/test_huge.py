"""Two tables of the released size in a sparse file: offsets far past 2^32, opened at once, in constant memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.engram.support import Table, engram, read, values

ROWS, DIM = (384_006_168, 384_016_682), 256  # 203 GB
START = 303_000_000_000  # in the released file the tables lie behind the weights


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
@pytest.mark.parametrize("split", [False, True])
def test_marked_rows_of_a_table_of_the_released_size(tmp_path: Path, split: bool) -> None:
    rng = np.random.default_rng(3)
    tables, marks = [], []
    at = START
    for i, n_rows in enumerate(ROWS):
        path = tmp_path / "sparse"
        scales = path if split else None
        size = DIM if split else DIM + DIM // 32
        table = Table(n_rows, DIM, path, at, scales, at + n_rows * DIM)
        tables.append(table)
        at += n_rows * (DIM + DIM // 32) + 4096
        rows = np.unique(np.concatenate([[0, 1, n_rows - 2, n_rows - 1], rng.integers(0, n_rows, 300)]))
        content = values(rng, (len(rows), DIM + DIM // 32))
        try:
            with open(path, "r+b" if path.exists() else "w+b") as file:
                file.truncate(at)
                for row, data in zip(rows.tolist(), content, strict=True):
                    os.pwrite(file.fileno(), data[:size].tobytes(), table.offset + row * size)
                    if split:
                        os.pwrite(file.fileno(), data[DIM:].tobytes(), table.scale_offset + row * 8)
        except OSError as error:
            pytest.skip(f"no sparse file of this size here: {error}")
        marks.append((rows, content))
        assert i < 2
    before, begin = resident(), time.perf_counter()
    rows_of = engram(*tables, cache_bytes=1 << 20, threads=8)
    assert time.perf_counter() - begin < 0.5
    for _ in range(3):
        for table, (rows, content) in enumerate(marks):
            order = rng.permutation(len(rows))
            assert_array_equal(read(rows_of, table, rows[order]), content[order])
    empty = read(rows_of, 0, rng.integers(0, ROWS[0], 2000), "chunk")
    assert (empty == 0).mean() > 0.99
    assert resident() - before < 16 << 20
    assert os.stat(tmp_path / "sparse").st_blocks * 512 < 100 << 20
