"""Made-up weights: the bytes of every type on the host are those of the specification, and they are sane numbers."""

from __future__ import annotations

import numpy as np
import pytest

from ds4v41 import _ext
from ds4v41.errors import BackendError, OptionError
from ds4v41.synthetic import Units, key_of, units_of
from tests.ref import synth_units as ref

from .support import stored_ggml

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "MXFP4", "F8_E4M3", "I8", "F8_E8M0 of I8", "row")


def made(dtype: str, nbytes: int = 1 << 16) -> Units:
    return units_of(dtype, 0.0, 0.02, nbytes, 64)


def wanted(units: Units, key: int, first: int, n: int) -> np.ndarray:
    u = units
    return ref.units(u.kind, u.unit_bytes, u.heads, u.codes, key, u.table, first, n)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("first", "n"), [(0, 1), (0, 40_000), (3, 77), ((1 << 32) - 5, 11)])
def test_units_of_every_type(dtype: str, first: int, n: int) -> None:
    """Whole tensors by threads, parts, and past 2^32 units."""
    units = made(dtype)
    memory = _ext.synth.Memory("cpu", n * units.unit_bytes + 3, 2)
    memory.fill(units.for_ext(12345), units.table, first, n)
    want = wanted(units, 12345, first, n)
    array = memory.array()
    np.testing.assert_array_equal(array[: want.size].reshape(want.shape), want)
    assert not array[want.size :].any()
    np.testing.assert_array_equal(memory.read(1, want.size - 1), want.reshape(-1)[1:])


@pytest.mark.parametrize(
    ("dtype", "kind", "columns"), [("Q8_0", "q8_0", 32), ("Q4_K", "q4_k", 256), ("MXFP4", "mxfp4", 32)]
)
def test_blocks_have_the_spread_that_was_asked_for(dtype: str, kind: str, columns: int) -> None:
    rows = wanted(made(dtype), 7, 0, 4000)
    values = stored_ggml(kind, rows).values
    assert values.shape == (4000, columns) and np.isfinite(values).all()
    assert abs(values.mean()) < 0.001 and 0.015 < values.std() < 0.025


def test_numbers_and_their_mean() -> None:
    units = units_of("F32", 1.0, 0.15, 4000)
    values = wanted(units, 7, 0, 50_000).view(np.float32)
    assert abs(values.mean() - 1) < 0.005 and abs(values.std() - 0.15) < 0.005


def test_tensors_of_other_names_and_seeds_differ() -> None:
    keys = {key_of(seed, name) for seed in (0, 1, 1 << 40) for name in ("head.weight", "embed.weight")}
    assert len(keys) == 6
    a, b = (wanted(made("Q8_0"), key_of(1, name), 0, 100) for name in ("head.weight", "embed.weight"))
    assert (a == b).mean() < 0.1


def test_engram_rows_are_those_of_the_specification() -> None:
    units, n_rows = made("row"), 5_000_000_000
    engram = _ext.synth.engram([(n_rows, 64, units.for_ext(key), units.table) for key in (9, 10)], threads=4)
    assert engram.made and engram.n_rows == [n_rows, n_rows] and engram.bytes == 2 * n_rows * 66
    rows = np.array([0, 1, 2, 17, n_rows - 1, 4_294_967_296, 17], np.int64)
    for table, key in ((0, 9), (1, 10)):
        got, _ = engram.request(table, rows).wait()
        np.testing.assert_array_equal(got, np.concatenate([wanted(units, key, int(row), 1) for row in rows]))


def test_wrong_units_are_refused() -> None:
    units = made("Q8_0")
    memory = _ext.synth.Memory("cpu", 3400)
    with pytest.raises(OptionError, match="do not fit"):
        memory.fill(units.for_ext(1), units.table, 0, 101)
    with pytest.raises(OptionError, match="table: expected 512 words"):
        memory.fill(units.for_ext(1), units.table[:-1], 0, 1)
    for wrong in ((9, 34, 2, 32, 1), (1, 33, 2, 32, 1), (2, 40, 16, 24, 1), (0, 3, 0, 0, 1)):
        with pytest.raises(OptionError, match="no unit"):
            memory.fill(wrong, units.table, 0, 1)
    with pytest.raises(OptionError, match="outside"):
        memory.read(3000, 401)
    with pytest.raises(BackendError):
        _ext.synth.Memory("tpu", 10)
