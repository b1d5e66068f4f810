"""What measurements need of a device: made-up weights written by a kernel, copies, row products with their times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4v41 import _ext
from ds4v41.errors import OptionError
from tests.ops.test_synth_units import TYPES, made, wanted

from .both import CHECKED, ORDERS, STANDIN, needs_standin

pytestmark = needs_standin
PLACE = "metal" if STANDIN is not None else "cuda"
Probe: Any = getattr(_ext.bench, "DeviceProbe", None)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_device_writes_the_bytes_of_the_host(dtype: str) -> None:
    units = made(dtype)
    for first, n in ((0, 1), (5, 1000), ((1 << 32) - 100, 300)):
        memory = _ext.synth.Memory(PLACE, n * units.unit_bytes + 5)
        memory.fill(units.for_ext(99), units.table, first, n)
        want = wanted(units, 99, first, n).reshape(-1)
        np.testing.assert_array_equal(memory.read(0, want.size), want)
        np.testing.assert_array_equal(
            memory.read(want.size // 2, want.size // 3), want[want.size // 2 :][: want.size // 3]
        )


@pytest.mark.skipif(STANDIN is None, reason="the stand-in's own check")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["F16", "Q4_K", "row"])
def test_every_access_of_the_kernel(dtype: str, order: str) -> None:
    """Neither races nor bytes outside, in any order of threads; a last threadgroup that is not full."""
    units, n = made(dtype), 300
    out = np.zeros(n * units.unit_bytes, np.uint8)
    args = np.zeros(10, np.uint32)
    args[:4] = 7, 0, n, 0
    args[4:9] = units.for_ext(99)
    STANDIN.launch("synth_fill", (2, 1, 1), (256, 1, 1), {0: args, 1: out, 2: units.table}, {}, order=order,
                   checked=CHECKED)  # fmt: skip
    np.testing.assert_array_equal(out, wanted(units, 99, 7, n).reshape(-1))
    words = np.arange(4 * 2100, dtype=np.uint32)
    copy = np.zeros_like(words)
    STANDIN.launch("copy_words", (2, 1, 1), (256, 1, 1), {0: np.array([2100], np.uint64), 1: words, 2: copy}, {},
                   order=order, checked=CHECKED)  # fmt: skip
    np.testing.assert_array_equal(copy, words)


def test_what_does_not_fit_is_refused() -> None:
    units = made("Q8_0")
    memory = _ext.synth.Memory(PLACE, 340)
    for call in (lambda: memory.fill(units.for_ext(1), units.table, 0, 11), lambda: memory.read(300, 41)):
        with pytest.raises(OptionError):
            call()
    probe = Probe(1 << 20)
    calls = (
        lambda: Probe(1 << 10),
        lambda: probe.copy(1 << 20, 1),
        lambda: probe.copy(1 << 10, 0),
        lambda: probe.product("q8_0", 8192, 5120, 1, 1),
        lambda: probe.product("q8_0", 0, 5120, 1, 1),
    )
    for call in calls:
        with pytest.raises(OptionError):
            call()


def test_times_of_the_device() -> None:
    """They are there, within the time that passed, and grow with the work."""
    probe = Probe(4 << 20)
    for wall, device in (probe.copy(2 << 20, 2), probe.empty(3), probe.product("q8_0", 64, 256, 1, 2),
                         probe.product("fp8_block", 64, 256, 3, 2), probe.product("q4_k", 64, 256, 6, 1)):  # fmt: skip
        assert 0 < device <= wall < 60
    assert probe.copy(2 << 20, 8)[1] > probe.copy(1 << 10, 1)[1]
