"""Scalar functions of the shared arithmetic: accuracy, special values, and equal bits on every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ref import formats
from tests.ref.formats import F32, f32

from .support import ISAS, OPS, same_bits, same_on_all_isas
from .tolerance import ULPS, ulps

NAMES = ("exp", "log", "sigmoid", "softplus", "silu", "bf16", "to_e4m3", "rsqrt")
ANY_FLOAT = st.lists(st.floats(width=32), min_size=1, max_size=70).map(f32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


EXACT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "log": np.log,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": sigmoid,
    "softplus": lambda x: np.where(x > 20, x, np.logaddexp(0, x)),
    "silu": lambda x: x * sigmoid(x),
}


def sample(name: str) -> F32:
    """Arguments over the whole range that has a normal result, dense around 0 (or 1 where only positive ones count)."""
    rng = np.random.default_rng(20)
    if name in ("log", "rsqrt"):
        near_one = np.float32(1) + np.arange(-20_000, 20_000, dtype=np.float32) * np.float32(2.0**-23)
        return np.concatenate([f32(np.exp(rng.uniform(-87, 88, 60_000))), near_one])
    low, high = (-87.3, 88.7) if name == "exp" else (-80, 88.7)
    return f32(np.concatenate([rng.uniform(low, high, 60_000), rng.normal(size=30_000), np.linspace(-1, 1, 10_001)]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", sorted(EXACT))
def test_accuracy(name: str, isa: str) -> None:
    x = sample(name)
    assert ulps(OPS.unary(isa, name, x), EXACT[name](x.astype(np.float64))).max() <= ULPS[name]


INF, NAN = np.inf, np.nan
VALUES = {
    "exp": [(0, 1), (-0.0, 1), (INF, INF), (-INF, 0), (NAN, NAN), (88.73, INF), (-87.4, 0), (1e-40, 1)],
    "log": [(1, 0), (0, -INF), (-0.0, -INF), (INF, INF), (-1, NAN), (-INF, NAN), (NAN, NAN), (1e-40, -INF)],
    "sigmoid": [(0, 0.5), (INF, 1), (-INF, 0), (NAN, NAN), (100, 1), (-100, 0)],
    "softplus": [(INF, INF), (-INF, 0), (NAN, NAN), (20.5, 20.5), (-100, 0)],
    "silu": [(0, 0), (-0.0, -0.0), (INF, INF), (NAN, NAN), (-100, -0.0)],
    "rsqrt": [(1, 1), (4, 0.5), (0, INF), (INF, 0), (-1, NAN), (NAN, NAN)],
    "bf16": [(1.00390625, 1), (1.01171875, 1.015625), (3.4e38, INF), (-0.0, -0.0), (-INF, -INF), (NAN, NAN)],
    "to_e4m3": [(464, 448), (-1e9, -448), (INF, 448), (-0.0, -0.0), (2.0**-10, 0), (3 * 2.0**-10, 2.0**-8)],
}


@pytest.mark.parametrize("name", NAMES)
def test_special_values(name: str) -> None:
    x, want = f32(VALUES[name]).T
    for isa in ISAS:
        same_bits(OPS.unary(isa, name, np.ascontiguousarray(x)), np.ascontiguousarray(want))


@pytest.mark.parametrize("name", NAMES)
@given(x=ANY_FLOAT)
def test_same_bits_on_all_instruction_sets(name: str, x: F32) -> None:
    same_on_all_isas(lambda isa: OPS.unary(isa, name, x))


@given(x=ANY_FLOAT)
def test_bf16_rounds_as_the_reference(x: F32) -> None:
    same_bits(OPS.unary(ISAS[0], "bf16", x), formats.bf16_round(x))


@given(x=st.lists(st.floats(width=32, allow_nan=False, allow_subnormal=False), min_size=1, max_size=70).map(f32))
def test_e4m3_rounds_as_the_reference(x: F32) -> None:
    same_bits(OPS.unary(ISAS[0], "to_e4m3", x), formats.e4m3_decode(formats.e4m3_encode(x)))


def test_bf16_and_e4m3_at_every_middle() -> None:
    """Both sides of each rounding boundary, and the boundary itself: ties go to even."""
    table = formats.E4M3_MAGNITUDES[:127]
    middle = (table[1:] + table[:-1]) / 2
    x = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    x = np.concatenate([x, -x])
    top = np.arange(0x0080, 0x7F80, dtype=np.uint32) << 16
    patterns = np.concatenate([top | 0x7FFF, top | 0x8000, top | 0x8001]).view(np.float32)
    for isa in ISAS:
        same_bits(OPS.unary(isa, "to_e4m3", x), formats.e4m3_decode(formats.e4m3_encode(x)))
        same_bits(OPS.unary(isa, "bf16", patterns), formats.bf16_round(patterns))
