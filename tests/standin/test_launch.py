"""Right kernels give right numbers: in every order of threads, in the fast and in the checked build."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ds4v41 import _ext
from ds4v41.errors import OptionError

from .both import needs_checked

standin = pytest.importorskip("ds4v41._ext.standin") if hasattr(_ext, "standin") else None
pytestmark = pytest.mark.skipif(standin is None, reason="this build has no stand-in for Metal (DS4_STANDIN=ON)")

ORDERS = ("forward", "reverse", "shuffled")
BUILDS = [False, pytest.param(True, marks=needs_checked)]
MODES = [
    pytest.param(order, checked, marks=[needs_checked] if checked else [])
    for order in ORDERS
    for checked in (False, True)
]


@pytest.mark.parametrize(("order", "checked"), MODES)
@pytest.mark.parametrize(("kernel", "dtype"), [("probe_row_f32", np.float32), ("probe_row_f16", np.float16)])
def test_row_product_sums_in_the_written_order(kernel: str, dtype: type, order: str, checked: bool) -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((7, 96)).astype(dtype)
    x = rng.standard_normal(96).astype(np.float32)
    y = np.zeros(7, np.float32)
    standin.launch(kernel, (7, 1, 1), (32, 1, 1), {0: np.array([7, 96], np.int32), 1: w, 2: x, 3: y},
                   order=order, checked=checked)  # fmt: skip
    sums = np.zeros((7, 32), np.float32)
    for i in range(0, 96, 32):  # one rounding: the products of f32 are exact in f64
        sums = (w[:, i : i + 32].astype(np.float64) * x[i : i + 32] + sums).astype(np.float32)
    for bit in (1, 2, 4, 8, 16):
        sums = sums + sums[:, np.arange(32) ^ bit]
    np.testing.assert_array_equal(y, sums[:, 0])


@pytest.mark.parametrize(("order", "checked"), MODES)
def test_threadgroup_memory_and_barrier(order: str, checked: bool) -> None:
    data = np.arange(5 * 256, dtype=np.uint32)
    out = np.zeros_like(data)
    standin.launch("probe_reverse", (5, 1, 1), (256, 1, 1), {0: data, 1: out}, {0: 1024}, order=order, checked=checked)
    np.testing.assert_array_equal(out, data.reshape(5, 256)[:, ::-1].ravel())


@pytest.mark.parametrize(("order", "checked"), MODES)
def test_function_constants_and_tables(order: str, checked: bool) -> None:
    x = np.zeros(12, np.float32)
    y = np.zeros_like(x)
    standin.launch(
        "probe_flat", (3, 1, 1), (4, 1, 1), {0: x, 1: y}, constants={0: 3, 1: True}, order=order, checked=checked
    )
    np.testing.assert_array_equal(y, -(np.tile([1, 2, 4, 8], 3) + 3).astype(np.float32))


@pytest.mark.parametrize(("order", "checked"), MODES)
def test_votes_sums_and_atomics(order: str, checked: bool) -> None:
    v = np.random.default_rng(2).integers(0, 1000, 4 * 64, dtype=np.uint32)
    counter, out = np.zeros(1, np.uint32), np.zeros((8, 4), np.uint32)
    standin.launch("probe_votes", (4, 1, 1), (64, 1, 1), {0: v, 1: counter, 2: out}, order=order, checked=checked)
    assert counter[0] == v.sum()
    for row, lanes in zip(out, v.reshape(8, 32), strict=True):
        assert row[0] == sum(int(x & 1) << i for i, x in enumerate(lanes))
        assert list(row[1:]) == [lanes.sum(), lanes[:31].sum(), lanes[0]]


def test_signatures_are_known() -> None:
    s = standin.signature("probe_reverse")
    assert s == {"family": "probe", "synchronises": True,
                 "params": [("in", "device const", 0, 4), ("out", "device", 1, 4),
                            ("scratch", "threadgroup", 0, 4)]}  # fmt: skip
    assert not standin.signature("probe_flat")["synchronises"]


def test_no_barrier_is_missed() -> None:
    """Whatever stands in front of a kernel: attributes and macros with parentheses of their own."""
    seen = set()
    for path in sorted((Path(__file__).parents[2] / "metal").glob("*.metal")):
        text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        for name, body in re.findall(r"\bkernel void (\w+)\((.*?\n\}\n)", text, re.DOTALL):
            if "threadgroup_barrier" in body:
                seen.add(name)
                assert standin.signature(name)["synchronises"], name
    assert {"linear_many", "attend_values", "moe_up_many"} <= seen


@pytest.mark.parametrize("checked", BUILDS)
def test_subnormals_are_flushed_as_on_the_cpu(checked: bool) -> None:
    w, x, y = np.zeros((256, 32), np.float32), np.zeros(32, np.float32), np.full(256, 9, np.float32)
    w[:, 0], x[0] = 1e-30, 1e-10  # the product is below the smallest normal
    w[1::2, 0], x[1], w[1::2, 1] = 0, 1.0, 1e-40  # and this is one itself
    args = np.array([256, 32], np.int32)
    standin.launch("probe_row_f32", (256, 1, 1), (32, 1, 1), {0: args, 1: w, 2: x, 3: y}, checked=checked)
    np.testing.assert_array_equal(y, 0)


def test_every_kind_of_half_is_read_exactly() -> None:
    codes = np.concatenate([np.arange(0, 0x7C00, 13), np.arange(0x8000, 0xFC00, 13), np.arange(1024)]).astype(np.uint16)
    w = np.zeros((len(codes), 32), np.float16)
    w[:, 7] = codes.view(np.float16)
    x, y = np.zeros(32, np.float32), np.zeros(len(codes), np.float32)
    x[7] = 1.0
    args = np.array([len(codes), 32], np.int32)
    standin.launch("probe_row_f16", (len(codes), 1, 1), (32, 1, 1), {0: args, 1: w, 2: x, 3: y})
    np.testing.assert_array_equal(y, codes.view(np.float16).astype(np.float32))


def test_a_build_without_checked_kernels_says_so() -> None:
    """Nobody who asks for watched accesses gets the fast build instead."""
    if standin.has_checked:
        standin.set_options(checked=True)
        standin.set_options(checked=False)
        return
    with pytest.raises(OptionError, match="no checked kernels"):
        standin.set_options(checked=True)
    with pytest.raises(OptionError, match="no checked kernels"):
        standin.launch("right_double", (1, 1, 1), (32, 1, 1), {}, checked=True)
