"""Products of the matrix class: the numpy definition, the emulation of every instruction set and the instruction itself
have the same bits, whatever the number of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4v41 import _ext
from tests.ref import linear
from tests.ref.formats import F32, bf16_round, f32

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
    stored_plain,
    values_of,
)
from .tolerance import assert_within, product_bound

KINDS = sorted(COLUMN_BLOCK)
SEEDS = st.integers(0, 2**32 - 1)


def product(isa: str, m: Stored, x: F32) -> F32:
    return np.asarray(OPS.matrix_product(isa, m.kind, m.rows, m.data, m.scale, x))


def on_all(m: Stored, x: F32) -> F32:
    """The same bits on every instruction set, which it returns."""
    (got,) = same_on_all_isas(lambda isa: product(isa, m, x))
    return got


def columns(kind: str, width: int) -> int:
    block = COLUMN_BLOCK[kind]
    return -(-width // block) * block


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 31, 33, 95, 256, 544, 1280])
def test_the_definition(kind: str, width: int) -> None:
    """tests/ref/linear.py, bit for bit; activations that are no bfloat16 numbers are rounded."""
    rng = np.random.default_rng(width)
    m = random_stored(kind, 9, columns(kind, width), rng)
    for x in (f32(rng.normal(size=(7, m.cols))), bf16_round(rng.normal(size=(7, m.cols)))):
        same_bits(on_all(m, x), linear.product_matrix(x, m.values))


def test_the_definition_is_a_product() -> None:
    """Against float64: what it loses beside the rounding to bfloat16 is within the bound of f32 sums."""
    rng = np.random.default_rng(1)
    w, x = bf16_round(rng.normal(size=(5, 2304))), bf16_round(rng.normal(size=(6, 2304)))
    got = linear.product_matrix(x, w)
    assert_within(got, x.astype(np.float64) @ w.T.astype(np.float64), product_bound(x, w))
    assert (got != f32(x.astype(np.float64) @ w.T.astype(np.float64))).any()  # and the order shows


def test_one_pair_in_its_order() -> None:
    """2^24 + 1 (second product) is lost before -2^24 (first product) comes; the other way it would stay."""
    m = stored_plain(f32([[-(2.0**24), 1.0]]), "f32")
    big = stored_plain(f32([[1.0, -(2.0**24)]]), "f32")
    start = f32([[1.0, 1.0]])
    same_bits(on_all(m, start), f32([[1 - 2.0**24]]))
    same_bits(on_all(big, start), f32([[1 - 2.0**24]]))
    # Pairs 0 and 16 share an accumulator: 2^24, then + 1 (lost), then - 2^24.
    w = np.zeros((1, 64), np.float32)
    w[0, 1], w[0, 33], w[0, 32] = 2.0**24, 1.0, -(2.0**24)
    same_bits(on_all(stored_plain(w, "f32"), np.ones((1, 64), np.float32)), f32([[0]]))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(
    rows=st.integers(1, 37), n=st.integers(1, 20), width=st.integers(1, 700), style=st.sampled_from(STYLES), seed=SEEDS
)
def test_any_size_has_the_same_bits_everywhere(kind: str, rows: int, n: int, width: int, style: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = random_stored(kind, rows, columns(kind, width), rng)
    on_all(m, values_of(style, (n, m.cols), rng))


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(1, 18), n=st.integers(2, 15), width=st.integers(1, 300), seed=SEEDS)
def test_a_row_does_not_depend_on_its_batch(kind: str, rows: int, n: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = random_stored(kind, rows, columns(kind, width), rng)
    x = values_of("wide", (n, m.cols), rng)
    cut = int(rng.integers(1, n))
    for isa in ISAS:
        whole = product(isa, m, x)
        same_bits(np.concatenate([product(isa, m, x[i : i + 1]) for i in range(n)]), whole)
        same_bits(np.concatenate([product(isa, m, x[:cut]), product(isa, m, x[cut:])]), whole)


@pytest.mark.parametrize("n", [191, 192, 193, 385])
def test_more_rows_than_a_batch(n: int) -> None:
    rng = np.random.default_rng(n)
    m = random_stored("q4_k", 21, 512, rng)
    x = values_of("normal", (n, 512), rng)
    whole = on_all(m, x)
    for i in (0, 1, 95, 190, n - 1):
        same_bits(product(ISAS[0], m, x[i : i + 1]), whole[i : i + 1])


@given(n=st.integers(1, 9), cols=st.integers(1, 200), seed=SEEDS)
def test_odd_values_give_the_same_bits(n: int, cols: int, seed: int) -> None:
    """Infinities, NaN, subnormals (flushed) and zeros of both signs, in weights and activations."""
    rng = np.random.default_rng(seed)
    m = stored_plain(sprinkle(values_of("wide", (5, cols), rng), rng, 0.02), "f32")
    on_all(m, sprinkle(values_of("wide", (n, cols), rng), rng, 0.02))


@pytest.mark.parametrize("kind", ["mxfp4", "fp4_row", "fp8_row", "fp8_block"])
def test_every_scale(kind: str) -> None:
    """All 256 scale bytes, also those whose products leave the range of f32."""
    rng = np.random.default_rng(9)
    m = random_stored(kind, 32, 256, rng)
    scale = np.arange(256, dtype=np.uint8)
    if kind == "mxfp4":
        blocks = np.array(m.data).reshape(-1, 17)
        blocks[:, 0] = scale
        m = m._replace(data=blocks.reshape(-1))
    else:
        m = m._replace(scale=scale if kind != "fp8_block" else scale[3::32].copy())
    on_all(m, values_of("normal", (6, 256), rng))


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_odd_half_scales(kind: str) -> None:
    rng = np.random.default_rng(4)
    m = random_stored(kind, 9, 512, rng)
    block_bytes, where = {"q8_0": (34, (0,)), "q4_k": (144, (0, 2))}[kind]
    blocks = np.array(m.data).reshape(-1, block_bytes)
    odd = np.array([0x8000, 0x0000, 0x0001, 0x8001, 0x03FF, 0x7C00, 0xFC00, 0x7E00, 0xBC00, 0x3C00], np.uint16)
    for at in where:
        blocks[:, at : at + 2] = rng.choice(odd, len(blocks))[:, None].view(np.uint8)
    on_all(m._replace(data=blocks.reshape(-1)), values_of("wide", (4, 512), rng))


def test_no_rows() -> None:
    m = random_stored("bf16", 3, 65, np.random.default_rng(1))
    for isa in ISAS:
        assert product(isa, m, np.zeros((0, 65), np.float32)).shape == (0, 3)


def test_what_is_missing_is_said() -> None:
    """By name where there is no instruction; nothing where there is one that computes what the class is defined by."""
    for isa in ISAS:
        assert (_ext.matrix_missing(isa) == "") is OPS.matrix_native(isa)
    assert "plain" in _ext.matrix_missing("plain")
