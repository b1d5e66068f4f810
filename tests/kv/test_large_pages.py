"""Rows of a long session come to lie in large pages as it grows; content and sharing stay as they are."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks.bench_kv import SHAPE

import ds4v41
from ds4v41.synth import tiny_config, write_official

N = 40_000  # 11 MB of compressed rows a source, 2.7 MB of index rows
THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def offered() -> bool:
    """Does the system turn pages of memory files into large ones when it is asked (Linux 6.1 or later)?"""
    if sys.platform != "linux" or not THP.exists() or "[deny]" in THP.read_text():
        return False
    major, minor = (int(i) for i in re.findall(r"\d+", os.uname().release)[:2])
    return (major, minor) >= (6, 1)


pytestmark = pytest.mark.skipif(not offered(), reason="the system has no large pages for memory files")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ds4v41.Model]:
    folder = tmp_path_factory.mktemp("large") / "model"
    write_official(folder, tiny_config(**SHAPE), seed=1)
    with ds4v41.Model.open(folder, threads=1) as opened:
        yield opened


def kilobytes() -> dict[str, int]:
    """What the process has of memory files of states: in all (shared pages by their share), and in large pages."""
    sums, ours = {"Pss": 0, "ShmemPmdMapped": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if "-" in name and not name.endswith(":"):
            ours = "ds4v41-state" in line
        elif ours and name[:-1] in sums:
            sums[name[:-1]] += int(line.split()[1])
    return sums


def test_a_session_that_grows_joins_its_pages(model: ds4v41.Model) -> None:
    with model.session(N + 64, retain=256) as s:
        s._ext.fill_for_benchmark(N, 1)
        live, small = bytes(s._ext.live_bytes()), kilobytes()
        assert small["ShmemPmdMapped"] == 0
        s.step([5])
        joined = kilobytes()
        assert joined["ShmemPmdMapped"] >= 0.5 * small["Pss"]
        assert joined["Pss"] <= small["Pss"] + 2048  # pages that the step wrote, and no part of a large one unused
        s.rewind(N)
        assert bytes(s._ext.live_bytes()) == live


def test_forks_of_large_pages_copy_small_parts(model: ds4v41.Model) -> None:
    with model.session(N + 64, retain=256) as s:
        s._ext.fill_for_benchmark(N, 1)
        first = s.step([5])[0]
        s.rewind(N)
        before, forks = kilobytes(), [s.fork() for _ in range(4)]
        for fork in forks:
            np.testing.assert_array_equal(fork.step([5])[0], first)
        after = kilobytes()
        assert after["Pss"] - before["Pss"] <= 4 * 5 * 1024  # 5 MB each
        assert after["ShmemPmdMapped"] >= before["ShmemPmdMapped"]
        forks.pop().close()
        np.testing.assert_array_equal(s.step([5])[0], first)
        for fork in forks:
            np.testing.assert_array_equal(fork.step([6])[0], s.fork().step([6])[0])
            fork.close()


def test_what_a_fork_writes_anew_is_joined_anew(model: ds4v41.Model) -> None:
    with model.session(N + 64, retain=256) as s:
        s._ext.fill_for_benchmark(N, 1)
        s.step([5])
        with s.fork() as other:
            other.rewind(0)
            before = kilobytes()["ShmemPmdMapped"]
            other._ext.fill_for_benchmark(N, 2)
            assert bytes(other._ext.live_bytes()) != bytes(s._ext.live_bytes())
            other.step([5])
            assert kilobytes()["ShmemPmdMapped"] >= before + 8 * 1024
            s.rewind(N)
            other.rewind(N)
            with model.session(N + 64, retain=256) as fresh:
                fresh._ext.fill_for_benchmark(N, 1)
                assert bytes(fresh._ext.live_bytes()) == bytes(s._ext.live_bytes())
