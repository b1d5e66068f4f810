"""The kernels for 1 to 8 rows against the plain instruction set, which has none of them: the same bits, always."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ref import formats

from .support import (
    COLUMN_BLOCK,
    ISAS,
    OPS,
    Stored,
    flat,
    random_stored,
    same_bits,
    same_on_all_isas,
    sprinkle,
    values_of,
)

KINDS = sorted(COLUMN_BLOCK)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [256, 2048, 2304, 5120])
def test_released_widths(kind: str, cols: int) -> None:
    rng = np.random.default_rng(cols)
    m = random_stored(kind, 11, cols, rng)  # whole tiles of 2, 3 and 4 rows, and what is left
    x = values_of("wide", (8, cols), rng)
    for n in range(1, 9):
        same_on_all_isas(lambda isa, n=n: m.product(isa, x[:n]))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(rows=st.integers(1, 13), n=st.integers(1, 8), chunks=st.integers(1, 10), seed=st.integers(0, 2**32 - 1))
def test_any_rows(kind: str, rows: int, n: int, chunks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = random_stored(kind, rows, 256 * chunks, rng)
    same_on_all_isas(lambda isa: m.product(isa, values_of("normal", (n, m.cols), np.random.default_rng(seed))))


@pytest.mark.parametrize("kind", ["mxfp4", "fp4_row", "fp8_row", "fp8_block"])
def test_every_scale(kind: str) -> None:
    """All 256 scale bytes, also those whose products leave the range of f32."""
    rng = np.random.default_rng(9)
    rows, cols = 32, 256
    m = random_stored(kind, rows, cols, rng)
    scale = np.arange(rows * cols // 32, dtype=np.uint8)
    if kind == "mxfp4":
        blocks = np.array(m.data).reshape(-1, 17)
        blocks[:, 0] = scale
        m = m._replace(data=flat(blocks))
    else:
        m = m._replace(scale=scale if kind != "fp8_block" else scale[3::32].copy())
    for x in (values_of("normal", (6, cols), rng), values_of("bf16", (6, cols), rng)):
        for n in (1, 2, 6):
            same_on_all_isas(lambda isa, n=n, x=x: m.product(isa, x[:n]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [256, 2304, 5120])
def test_bfloat16_activations(kind: str, cols: int) -> None:
    """Both are bfloat16 numbers: two products in one instruction, where there is one (cpu/pairs.h)."""
    rng = np.random.default_rng(cols + 1)
    m = random_stored(kind, 11, cols, rng)
    wide = formats.bf16_round(values_of("wide", (8, cols), rng))
    odd = formats.bf16_round(sprinkle(values_of("normal", (8, cols), rng), rng, 0.01))
    flushed = formats.bf16_round(values_of("normal", (8, cols), rng) * np.exp2(rng.integers(-140, -110, (8, cols))))
    almost = wide.copy()
    almost[2, cols - 1] += np.float32(2.0**-12) * np.abs(almost[2, cols - 1])  # one number is none
    for x in (wide, odd, flushed, almost):
        for n in range(1, 9):
            same_on_all_isas(lambda isa, n=n, x=x: m.product(isa, x[:n]))


@pytest.mark.parametrize("kind", ["bf16", "fp4_row", "mxfp4"])
def test_bytes_beside_a_matrix(kind: str) -> None:
    """Each row by itself, in memory that ends with it: wide loads stay inside."""
    rng = np.random.default_rng(5)
    m = random_stored(kind, 5, 256, rng)
    x = values_of("bf16", (2, 256), rng)
    (whole,) = same_on_all_isas(lambda isa: m.product(isa, x))
    for r in range(5):
        data = m.data.reshape(5, -1)[r].copy()
        row = m._replace(rows=1, data=data, scale=None if m.scale is None else m.scale.reshape(5, -1)[r].copy())
        same_bits(row.product(ISAS[0], x), np.ascontiguousarray(whole[:, r : r + 1]))


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_odd_half_scales(kind: str) -> None:
    """Negative, zero, subnormal, infinite and NaN half-precision scales."""
    rng = np.random.default_rng(4)
    m: Stored = random_stored(kind, 9, 512, rng)
    block_bytes, where = {"q8_0": (34, (0,)), "q4_k": (144, (0, 2))}[kind]
    blocks = np.array(m.data).reshape(-1, block_bytes)
    odd = np.array([0x8000, 0x0000, 0x0001, 0x8001, 0x03FF, 0x7C00, 0xFC00, 0x7E00, 0xBC00, 0x3C00], np.uint16)
    for at in where:
        blocks[:, at : at + 2] = rng.choice(odd, len(blocks))[:, None].view(np.uint8)
    m = m._replace(data=flat(blocks))
    x = values_of("wide", (4, 512), rng)
    for n in (1, 3, 4):
        same_on_all_isas(lambda isa, n=n: m.product(isa, x[:n]))


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """By a sort: higher first, then the lower index; -0 is 0; NaN and minus infinity never."""
    key = np.where(np.isnan(scores), -np.inf, scores + 0.0)
    order = np.lexsort((np.arange(len(scores)), -key))
    return np.sort(order[: min(k, int((key > -np.inf).sum()))])


def _cases(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n).astype(np.float32)
    tiny = (rng.integers(-4, 5, n) * np.float32(2.0**-140)).astype(np.float32)
    half_inf = normal.copy()
    half_inf[rng.random(n) < 0.999] = -np.inf
    nans = normal.copy()
    nans[rng.random(n) < 0.5] = np.nan
    one_bin = (1.0 + rng.integers(0, 1000, n) * 2.0**-23).astype(np.float32)
    last = np.full(n, -1.0, np.float32)
    last[-5:] = 1.0
    return {
        "normal": normal,
        "equal": np.full(n, 3.0, np.float32),
        "zeros of both signs": np.where(rng.random(n) < 0.5, 0.0, -0.0).astype(np.float32),
        "few values": rng.integers(0, 3, n).astype(np.float32),
        "one bin": one_bin,
        "subnormal": tiny,
        "mostly minus infinity": half_inf,
        "NaN": nans,
        "all minus infinity": np.full(n, -np.inf, np.float32),
        "ascending": np.sort(normal),
        "descending": np.sort(normal)[::-1].copy(),
        "best at the end": last,
        "infinite": np.where(rng.random(n) < 0.01, np.inf, normal).astype(np.float32),
    }


@pytest.mark.parametrize("n", [1, 511, 512, 513, 4096, 20_000, 70_001])
@pytest.mark.parametrize("k", [1, 512, 2048])
def test_top_k_of_hard_lists(n: int, k: int) -> None:
    for name, scores in _cases(n).items():
        flushed = np.where(np.abs(scores) < 2.0**-126, np.copysign(0.0, scores), scores).astype(np.float32)
        for isa in ISAS:
            got = np.asarray(OPS.top_k(isa, scores, k))
            np.testing.assert_array_equal(got, _best(flushed, k), err_msg=f"{name}, {isa}")


def test_ties_at_the_cut_take_the_lowest_index() -> None:
    scores = np.zeros(50_000, np.float32)
    scores[[49_999, 7, 30_000]] = 5.0
    want = np.sort([*range(7), *range(8, 510), 7, 30_000, 49_999])
    for isa in ISAS:
        same_bits(np.asarray(OPS.top_k(isa, scores, 512)), want.astype(np.int32))
