"""RMSNorm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from tests.golden.compare import assert_bf16_close
from tests.golden.load import unit
from tests.ref import norm
from tests.ref.formats import bf16_round, f32

from .support import ISAS, OPS, STYLES, same_on_all_isas, sprinkle, values_of
from .tolerance import GOLDEN_FP32, SMALLEST_NORMAL, assert_stored, norm_relative

EPS = 1e-20


@pytest.mark.parametrize("isa", ISAS)
def test_golden_rows_down_to_tiny_sizes(isa: str) -> None:
    """Rows of size 1 to 6e-11 come out at full size: eps is 1e-20, not 1e-6."""
    v = unit("norm_and_hc")
    assert_allclose(OPS.norm(isa, v["x"], v["weight"], EPS, False), v["out_f32"], rtol=GOLDEN_FP32, atol=0)
    assert_bf16_close(OPS.norm(isa, v["x"], v["weight"], EPS, True), v["out_bf16"])


@given(
    n=st.integers(1, 4),
    width=st.integers(1, 700),
    style=st.sampled_from(STYLES),
    scale=st.sampled_from([1.0, 1e-8, 1e6]),
    round_=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_width_within_the_rounding_bound(
    n: int, width: int, style: str, scale: float, round_: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = f32(values_of(style, (n, width), rng) * np.float32(scale))
    weight = bf16_round(rng.normal(size=width))
    (got,) = same_on_all_isas(lambda isa: OPS.norm(isa, x, weight, EPS, round_))
    wide = x.astype(np.float64)
    want = weight * wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + np.float64(np.float32(EPS)))
    assert_stored(got, want, norm_relative(width) * np.abs(want) + SMALLEST_NORMAL, rounded=round_)


@given(n=st.integers(1, 3), width=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
def test_odd_values_give_the_same_bits(n: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = sprinkle(values_of("wide", (n, width), rng), rng)
    same_on_all_isas(lambda isa: OPS.norm(isa, x, np.ones(width, np.float32), EPS, True))


def test_zero_row_stays_zero() -> None:
    x = np.zeros((1, 40), np.float32)
    for isa in ISAS:
        assert_array_equal(OPS.norm(isa, x, np.ones(40, np.float32), EPS, True), 0)


def test_eps_counts() -> None:
    """A row of size 1e-10 is as large as the root of eps."""
    x = np.full((1, 64), 1e-10, np.float32)
    for isa in ISAS:
        got = OPS.norm(isa, x, np.ones(64, np.float32), EPS, False)
        assert_allclose(got, norm.rms_norm(x, np.ones(64, np.float32), EPS, "fp32"), rtol=GOLDEN_FP32)
        assert_allclose(got, np.sqrt(0.5), rtol=1e-5)
