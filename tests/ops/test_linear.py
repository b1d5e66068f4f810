"""Row products: every row type, ragged sizes, and one order of summation whatever the batch and the instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from tests.golden.compare import assert_bf16_close
from tests.golden.load import unit
from tests.ref import formats, linear
from tests.ref.formats import f32

from .support import (
    COLUMN_BLOCK,
    ISAS,
    OPS,
    STYLES,
    Stored,
    random_stored,
    same_bits,
    same_on_all_isas,
    sprinkle,
    stored_fp4,
    stored_fp8,
    stored_plain,
    values_of,
)
from .tolerance import GOLDEN_FP32, assert_within, product_bound, quantised_bound

KINDS = sorted(COLUMN_BLOCK)
SEEDS = st.integers(0, 2**32 - 1)


def golden_weight(kind: str) -> Stored:
    v = unit("gemm")
    if kind == "fp8":
        return stored_fp8(v.raw("w_fp8"), v.raw("w_fp8_scale"))
    return stored_fp4(v.raw("w_fp4_packed"), v.raw("w_fp4_scale"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_golden_products(kind: str, isa: str) -> None:
    v = unit("gemm")
    got = golden_weight(kind).product(isa, OPS.fake_q8(isa, v["a"]))
    assert_allclose(got, v[f"out_{kind}_f32"], rtol=GOLDEN_FP32)
    assert_bf16_close(OPS.unary(isa, "bf16", got.ravel()).reshape(got.shape), v[f"out_{kind}_bf16"])


def test_ragged_fp8_blocks() -> None:
    """70 x 100: the last blocks of both directions are short."""
    v = unit("gemm")
    m = stored_fp8(v.raw("w_ragged_fp8"), v.raw("w_ragged_scale"))
    x = values_of("normal", (9, 100), np.random.default_rng(0))
    (got,) = same_on_all_isas(lambda isa: m.product(isa, x))
    want = x.astype(np.float64) @ v["w_ragged_dequant_f32"].T.astype(np.float64)
    assert_within(got, want, product_bound(x, m.values))


@pytest.mark.parametrize(("kind", "cols"), [("fp8_block", 100), ("fp8_block", 2100), ("fp8_row", 96), ("fp4_row", 224)])
def test_quantised_activations_as_the_reference(kind: str, cols: int) -> None:
    rng = np.random.default_rng(cols)
    m = random_stored(kind, 37, cols, rng)
    x = formats.bf16_round(rng.normal(size=(7, cols)))
    missing = ((0, 0), (0, -cols % 32))
    want = linear.product_quantised(np.pad(x, missing), np.pad(m.values, missing))
    (got,) = same_on_all_isas(lambda isa: m.product(isa, OPS.fake_q8(isa, x)))
    assert_within(got, want.astype(np.float64), quantised_bound(x, m.values))


@pytest.mark.parametrize("kind", KINDS)
@given(
    rows=st.integers(1, 9), n=st.integers(1, 14), width=st.integers(1, 400), style=st.sampled_from(STYLES), seed=SEEDS
)
def test_any_size_within_the_rounding_bound(kind: str, rows: int, n: int, width: int, style: str, seed: int) -> None:
    block = COLUMN_BLOCK[kind]
    rng = np.random.default_rng(seed)
    m = random_stored(kind, rows, -(-width // block) * block, rng)
    x = values_of(style, (n, m.cols), rng)
    (got,) = same_on_all_isas(lambda isa: m.product(isa, x))
    assert_within(got, x.astype(np.float64) @ m.values.T.astype(np.float64), product_bound(x, m.values))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("cols", [1, 3, 15, 17, 127, 128, 129, 1000, 2047, 2048, 2049, 2176, 4096, 4099, 6145])
def test_integers_are_exact_in_any_order(cols: int, n: int) -> None:
    """Sizes around lane and segment boundaries, each element with its own weight: none is lost or misplaced."""
    rng = np.random.default_rng(cols)
    m = stored_plain(f32(rng.integers(-9, 10, size=(6, cols))), "f32")
    x = f32(rng.integers(-99, 100, size=(n, cols)))
    (got,) = same_on_all_isas(lambda isa: m.product(isa, x))
    assert_array_equal(got, x @ m.values.T)


@given(cols=st.integers(1, 300), n=st.integers(1, 9), data=st.data())
def test_single_elements_meet_their_weight(cols: int, n: int, data: st.DataObject) -> None:
    """One nonzero activation picks one column of the matrix, exactly."""
    column = data.draw(st.integers(0, cols - 1))
    m = random_stored("fp8_block", 5, cols, np.random.default_rng(cols))
    x = np.zeros((n, cols), np.float32)
    x[:, column] = 1
    for isa in ISAS:
        assert_array_equal(m.product(isa, x), np.broadcast_to(m.values[:, column], (n, 5)))


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(2, 15), rows=st.integers(1, 9), width=st.integers(1, 300), seed=SEEDS)
def test_a_row_does_not_depend_on_its_batch(kind: str, n: int, rows: int, width: int, seed: int) -> None:
    """Row i of an n-row product is the 1-row product of row i; the same for any run of rows."""
    block = COLUMN_BLOCK[kind]
    rng = np.random.default_rng(seed)
    m = random_stored(kind, rows, -(-width // block) * block, rng)
    x = values_of("wide", (n, m.cols), rng)
    for isa in ISAS:
        whole = m.product(isa, x)
        same_bits(np.concatenate([m.product(isa, x[i : i + 1]) for i in range(n)]), whole)
        cut = int(rng.integers(1, n))
        same_bits(np.concatenate([m.product(isa, x[:cut]), m.product(isa, x[cut:])]), whole)


@pytest.mark.parametrize("cols", [2049, 4096, 5000])
def test_long_rows_do_not_depend_on_their_batch(cols: int) -> None:
    """More than one segment of the sum."""
    rng = np.random.default_rng(cols)
    m = random_stored("bf16", 7, cols, rng)
    x = values_of("wide", (9, cols), rng)
    (whole,) = same_on_all_isas(lambda isa: m.product(isa, x))
    for isa in ISAS:
        for n in (1, 2, 3, 4, 5, 6, 8):
            parts = [m.product(isa, x[i : i + n]) for i in range(0, 9, n)]
            same_bits(np.concatenate(parts), whole)


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(1, 6), seed=SEEDS)
def test_a_weight_row_does_not_depend_on_its_neighbours(kind: str, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = random_stored(kind, rows, 256, rng)
    plain = stored_plain(m.values, "f32")
    for n in (1, 6):
        x = values_of("wide", (n, 256), rng)
        for isa in ISAS:
            whole = m.product(isa, x)
            for r in range(rows):
                one = stored_plain(m.values[r : r + 1], "f32")
                same_bits(one.product(isa, x), whole[:, r : r + 1])
            same_bits(plain.product(isa, x), whole)


@given(n=st.integers(1, 9), cols=st.integers(1, 200), seed=SEEDS)
def test_odd_values_give_the_same_bits(n: int, cols: int, seed: int) -> None:
    """Infinities, NaN, subnormals (flushed) and zeros of both signs, in weights and activations."""
    rng = np.random.default_rng(seed)
    m = stored_plain(sprinkle(values_of("wide", (5, cols), rng), rng, 0.02), "f32")
    x = sprinkle(values_of("wide", (n, cols), rng), rng, 0.02)
    (whole,) = same_on_all_isas(lambda isa: m.product(isa, x))
    for i in range(n):
        same_bits(m.product(ISAS[0], x[i : i + 1]), whole[i : i + 1])


def test_subnormal_products_are_flushed() -> None:
    m = stored_plain(f32([[2.0**-100]]), "f32")
    for isa in ISAS:
        same_bits(m.product(isa, f32([[2.0**-40]])), f32([[0]]))


@pytest.mark.parametrize("n", [1, 2, 4, 5, 9])
def test_zero_rows_and_no_rows(n: int) -> None:
    m = random_stored("bf16", 3, 65, np.random.default_rng(1))
    for isa in ISAS:
        assert_array_equal(m.product(isa, np.zeros((n, 65), np.float32)), 0)
        assert m.product(isa, np.zeros((0, 65), np.float32)).shape == (0, 3)
