"""Hyper-connections: mixing coefficients, collapse and expand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from ds4v41.errors import OptionError
from tests.golden.compare import assert_bf16_close
from tests.golden.load import unit
from tests.ref import hc
from tests.ref.formats import f32

from .support import ISAS, OPS, STYLES, same_on_all_isas, sprinkle, values_of
from .tolerance import (
    GOLDEN_FP32,
    GOLDEN_SINKHORN,
    SINKHORN_ITERATED,
    assert_stored,
    assert_within,
    sigmoid_relative,
    sum_bound,
)

HC_EPS = 1e-6
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("iterations", "key"), [(20, "comb"), (1, "comb_iters1"), (2, "comb_iters2"), (3, "comb_iters3")]
)
def test_golden_coefficients(iterations: int, key: str, isa: str) -> None:
    v = unit("sinkhorn")
    pre, post, comb = OPS.hc_coefficients(isa, v["mixes"], v["scale"], v["base"], 4, iterations, HC_EPS)
    assert_allclose(pre, v["pre"], rtol=GOLDEN_FP32)
    assert_allclose(post, v["post"], rtol=GOLDEN_FP32, atol=1e-30)
    assert_allclose(comb, v[key], rtol=GOLDEN_SINKHORN)


@pytest.mark.parametrize("isa", ISAS)
def test_golden_coefficients_of_three_copies(isa: str) -> None:
    v = unit("sinkhorn")
    got = OPS.hc_coefficients(isa, v["n3.mixes"], np.ones(3, np.float32), np.zeros(15, np.float32), 3, 5, HC_EPS)
    for name, value in zip(("pre", "post", "comb"), got, strict=True):
        assert_allclose(value, v[f"n3.{name}"], rtol=GOLDEN_SINKHORN)


@pytest.mark.parametrize("isa", ISAS)
def test_golden_collapse_and_expand(isa: str) -> None:
    v = unit("norm_and_hc")
    stream = v["hc.stream"]
    assert_bf16_close(OPS.collapse(isa, stream, v["hc.pre"], True), v["hc.collapsed_bf16"])
    got = OPS.expand(isa, v["hc.sublayer_out"], stream, v["hc.post"], v["hc.comb"], True)
    assert_bf16_close(got, v["hc.expanded_bf16"])


@given(
    n=st.integers(1, 5), copies=st.integers(1, 8), iterations=st.integers(1, 20), size=st.floats(0.1, 3.0), seed=SEEDS
)
def test_coefficients_as_the_reference(n: int, copies: int, iterations: int, size: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (2 + copies) * copies
    z = f32(np.clip(rng.normal(size=(n, rows)) * size, -8, 8))
    scale, base = f32(rng.uniform(0.2, 1.2, size=3)), f32(rng.uniform(-2, 2, size=rows))
    pre, post, comb = same_on_all_isas(lambda isa: OPS.hc_coefficients(isa, z, scale, base, copies, iterations, HC_EPS))
    want = hc.split(z, scale, base, copies, iterations, HC_EPS)
    limit = sigmoid_relative(np.abs(z[:, : 2 * copies]) * 1.2 + 2)
    assert_within(pre, want.pre, limit[:, :copies] * want.pre)
    assert_within(post, want.post, limit[:, copies:] * want.post)
    assert_allclose(comb, want.comb, rtol=SINKHORN_ITERATED)


@given(n=st.integers(1, 3), copies=st.integers(1, 8), seed=SEEDS)
def test_odd_mixes_give_the_same_bits(n: int, copies: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (2 + copies) * copies
    z = sprinkle(values_of("wide", (n, rows), rng), rng, 0.02)
    ones, zeros = np.ones(3, np.float32), np.zeros(rows, np.float32)
    same_on_all_isas(lambda isa: OPS.hc_coefficients(isa, z, ones, zeros, copies, 20, HC_EPS))


@given(seed=SEEDS, size=st.sampled_from([0.0, 1.0, 30.0, 1000.0]))
def test_combination_is_nearly_doubly_stochastic(seed: int, size: float) -> None:
    """A column step comes last, so columns sum to 1 up to the eps in every division."""
    z = f32(np.random.default_rng(seed).normal(size=(3, 24)) * size)
    _, _, comb = OPS.hc_coefficients(ISAS[0], z, np.ones(3, np.float32), np.zeros(24, np.float32), 4, 20, HC_EPS)
    assert (comb >= 0).all()
    assert_allclose(comb.sum(axis=1), 1, atol=1e-3)


@given(
    n=st.integers(1, 4),
    copies=st.integers(1, 8),
    width=st.integers(1, 130),
    style=st.sampled_from(STYLES),
    round_=st.booleans(),
    seed=SEEDS,
)
def test_collapse_and_expand_as_defined(n: int, copies: int, width: int, style: str, round_: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stream, y = values_of(style, (n, copies, width), rng), values_of(style, (n, width), rng)
    mix, post = f32(rng.uniform(0, 1, (n, copies))), f32(rng.uniform(0, 2, (n, copies)))
    comb = f32(rng.uniform(0, 1, (n, copies, copies)))
    (got,) = same_on_all_isas(lambda isa: OPS.collapse(isa, stream, mix, round_))
    want, size = (np.einsum("nj,njd->nd", mix, s, dtype=np.float64) for s in (stream, np.abs(stream)))
    assert_stored(got, want, sum_bound(size, copies), rounded=round_)
    (got,) = same_on_all_isas(lambda isa: OPS.expand(isa, y, stream, post, comb, round_))
    want, size = (
        np.einsum("njk,njd->nkd", comb, s, dtype=np.float64) + post.astype(np.float64)[:, :, None] * o[:, None]
        for s, o in ((stream, y), (np.abs(stream), np.abs(y)))
    )
    assert_stored(got, want, sum_bound(size, copies + 1), rounded=round_)


def test_first_index_of_the_combination_is_the_source() -> None:
    """comb[0, 2] = 1 alone copies stream 0 into stream 2."""
    stream = f32(np.arange(1, 9).reshape(1, 4, 2))
    comb = np.zeros((1, 4, 4), np.float32)
    comb[0, 0, 2] = 1
    zero, y = np.zeros((1, 4), np.float32), np.ones((1, 2), np.float32)
    for isa in ISAS:
        got = OPS.expand(isa, y, stream, zero, comb, True)
        assert_array_equal(got[0], [[0, 0], [0, 0], [1, 2], [0, 0]])


@pytest.mark.parametrize("copies", [0, 9])
def test_copies_out_of_range_are_refused(copies: int) -> None:
    rows = (2 + copies) * copies
    z, base = np.zeros((1, rows), np.float32), np.zeros(rows, np.float32)
    with pytest.raises(OptionError, match="shapes"):
        OPS.hc_coefficients(ISAS[0], z, np.ones(3, np.float32), base, copies, 20, HC_EPS)
