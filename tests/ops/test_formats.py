"""Number formats: every code decodes, the three group quantisers, packed cache rows, and blocks of the gguf package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from ds4v41.errors import CheckpointError, OptionError
from tests.golden.load import unit
from tests.ref import formats
from tests.ref.formats import F32, U8, f32

from .support import (
    COLUMN_BLOCK,
    GGML_TYPES,
    ISAS,
    OPS,
    STYLES,
    random_stored,
    same_bits,
    same_on_all_isas,
    sprinkle,
    stored_fp4,
    stored_fp8,
    stored_ggml,
    stored_plain,
    values_of,
)

QUANTISERS: dict[str, Any] = {
    "window": formats.quantise_q8,
    "compressed": formats.quantise_q4c,
    "index": formats.quantise_q4i,
}
GOLDEN = {"window": "fp8", "compressed": "fp4_e4m3_b16", "index": "fp4_e8m0_b32"}
CASES = st.tuples(st.integers(1, 4), st.integers(1, 6), st.sampled_from(STYLES), st.integers(0, 2**32 - 1))


def split_row(kind: str, row: U8, width: int) -> tuple[U8, U8]:
    """Codes and scale bytes of packed rows [n, bytes]."""
    codes = width if kind == "window" else width // 2
    return row[:, :codes], row[:, codes:]


def codes_of(kind: str, x: F32) -> tuple[U8, U8]:
    """What the reference packs: codes and scale bytes."""
    q = QUANTISERS[kind](x)
    return (q.codes if kind == "window" else formats.pack_nibbles(q.codes)), q.scale_raw


def pack_and_unpack(isa: str, kind: str, x: F32) -> tuple[U8, F32]:
    packed = OPS.pack(isa, kind, x)
    return packed, OPS.unpack(isa, kind, packed.reshape(-1), x.shape[1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", sorted(QUANTISERS))
def test_golden_rows(kind: str, isa: str) -> None:
    v, name = unit("quant"), GOLDEN[kind]
    x = v["x"]
    packed = OPS.pack(isa, kind, x)
    codes, scale = split_row(kind, packed, x.shape[1])
    assert_array_equal(codes, v.raw("fp8.codes") if kind == "window" else v[f"{name}.packed"])
    assert_array_equal(scale, v["fp8.scale_e8m0"] if kind == "window" else v[f"{name}.scale_raw"])
    assert_array_equal(OPS.unpack(isa, kind, packed.reshape(-1), x.shape[1]), v[f"{name}.dequant_bf16"])


@pytest.mark.parametrize("isa", ISAS)
def test_golden_activation_quantiser(isa: str) -> None:
    v = unit("quant")
    same_bits(OPS.fake_q8(isa, v["x"]), v["fp8.dequant_bf16"])


@pytest.mark.parametrize("kind", sorted(QUANTISERS))
@given(case=CASES)
def test_rows_as_the_reference(kind: str, case: tuple[int, int, str, int]) -> None:
    n, groups, style, seed = case
    x = values_of(style, (n, 32 * groups), np.random.default_rng(seed))
    packed, unpacked = same_on_all_isas(lambda isa: pack_and_unpack(isa, kind, x))
    for got, want in zip(split_row(kind, packed, x.shape[1]), codes_of(kind, x), strict=True):
        assert_array_equal(got, want)
    want = QUANTISERS[kind](x).values
    # Index codes are read as integers, which have one zero.
    same_bits(unpacked, np.where(want == 0, np.float32(0), want) if kind == "index" else want)


@pytest.mark.parametrize("kind", sorted(QUANTISERS))
@given(case=CASES)
def test_odd_values_pack_alike_everywhere(kind: str, case: tuple[int, int, str, int]) -> None:
    n, groups, style, seed = case
    rng = np.random.default_rng(seed)
    x = sprinkle(values_of(style, (n, 32 * groups), rng), rng)
    same_on_all_isas(lambda isa: OPS.pack(isa, kind, x))
    same_on_all_isas(lambda isa: OPS.fake_q8(isa, x))


@given(n=st.integers(1, 3), width=st.integers(1, 130), style=st.sampled_from(STYLES), seed=st.integers(0, 2**32 - 1))
def test_activation_quantiser_of_ragged_rows(n: int, width: int, style: str, seed: int) -> None:
    """The last group may be short: it has a scale of its own."""
    x = values_of(style, (n, width), np.random.default_rng(seed))
    (got,) = same_on_all_isas(lambda isa: OPS.fake_q8(isa, x))
    padded = np.zeros((n, -(-width // 32) * 32), np.float32)
    padded[:, :width] = x
    same_bits(got, formats.quantise_q8(padded).values[:, :width])


@pytest.mark.parametrize("kind", sorted(QUANTISERS))
def test_scales_at_powers_of_two_and_floors(kind: str) -> None:
    """Groups whose largest value stands on, just above and just below every scale boundary."""
    power = np.exp2(np.arange(-20, 21, dtype=np.float64))
    amax = f32(np.concatenate([power * m for m in (1, 1.75, 1.5, 6, 7, 448 / 256)]))
    amax = np.concatenate([amax, np.nextafter(amax, np.float32(0)), np.nextafter(amax, np.float32(1e30)), [0]])
    x = f32(amax)[:, None] * f32(np.linspace(-1, 1, 33))[1:]
    for isa in ISAS:
        got = split_row(kind, OPS.pack(isa, kind, x), 32)
        for a, b in zip(got, codes_of(kind, x), strict=True):
            assert_array_equal(a, b)


def test_every_fp8_code_with_every_scale() -> None:
    """Scales from 2^-117 (the least code is 2^-9) up to where 448 overflows; e4m3's own subnormals included."""
    codes = np.setdiff1d(np.arange(256), [0x7F, 0xFF]).astype(np.uint8)
    codes = np.concatenate([codes, codes[:2]])
    scale = np.arange(10, 247, dtype=np.uint8)
    for kind in ("fp8_row", "fp8_block"):
        rows = len(scale) * (32 if kind == "fp8_block" else 1)
        wide = np.broadcast_to(scale[:, None], (len(scale), 8)).copy()
        m = stored_fp8(np.broadcast_to(codes, (rows, 256)).copy(), wide, kind)
        for isa in ISAS:
            same_bits(m.decode(isa), m.values)


def test_every_fp4_pair_with_every_scale() -> None:
    """All bytes, and all scale bytes whose products are normal; byte 0 means a scale of zero (2^-127 is flushed)."""
    scale = np.arange(2, 252, dtype=np.uint8)
    packed = np.broadcast_to(np.arange(256, dtype=np.uint8), (len(scale), 256)).copy()
    m = stored_fp4(packed, np.broadcast_to(scale[:, None], (len(scale), 16)).copy())
    zero = stored_fp4(packed[:1], np.zeros((1, 16), np.uint8))
    for isa in ISAS:
        same_bits(m.decode(isa), m.values)
        assert_array_equal(zero.decode(isa), 0)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_every_half_float(kind: str) -> None:
    """All 65536 patterns, subnormal halves too (they are normal float32 values); NaN stays NaN."""
    raw = np.arange(65536, dtype=np.uint16).reshape(64, 1024)
    with np.errstate(invalid="ignore"):
        values = raw.view(np.float16).astype(np.float32) if kind == "f16" else formats.bf16_decode(raw)
    for isa in ISAS:
        got = OPS.decode(isa, kind, 64, 1024, raw.view(np.uint8).reshape(-1), None)
        same_bits(got, values)


@pytest.mark.parametrize("kind", sorted(GGML_TYPES))
@given(rows=st.integers(1, 5), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_ggml_blocks_decode_as_in_the_gguf_package(kind: str, rows: int, blocks: int, seed: int) -> None:
    """Exact: code times scale fits in fp32, so the only rounding is that of the difference in the K types."""
    m = random_stored(kind, rows, blocks * COLUMN_BLOCK[kind], np.random.default_rng(seed))
    for isa in ISAS:
        assert_array_equal(m.decode(isa), m.values)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "q2_k", "iq2_xxs"])
def test_ggml_blocks_with_extreme_scales(kind: str) -> None:
    """Half-precision scales at their limits: largest, smallest normal, smallest subnormal, negative, zero."""
    rng = np.random.default_rng(5)
    limits = np.array([65504, -65504, 2.0**-14, -(2.0**-24), 0, -0.0], np.float16)
    base = random_stored(kind, 36, COLUMN_BLOCK[kind], rng).data.reshape(36, -1)
    first, second = {"q8_0": (0, None), "q4_k": (0, 2), "q2_k": (80, 82), "iq2_xxs": (0, None)}[kind]
    base[:, first : first + 2] = np.repeat(limits, 6)[:, None].view(np.uint8)
    if second is not None:
        base[:, second : second + 2] = np.tile(limits, 6)[:, None].view(np.uint8)
    m = stored_ggml(kind, base)
    for isa in ISAS:
        assert_array_equal(m.decode(isa), m.values)


@pytest.mark.parametrize("isa", ISAS)
def test_golden_ragged_blocks(isa: str) -> None:
    v = unit("gemm")
    m = stored_fp8(v.raw("w_ragged_fp8"), v.raw("w_ragged_scale"))
    assert m.values.shape == (70, 100)
    same_bits(m.decode(isa), v["w_ragged_dequant_f32"])


@given(cols=st.integers(1, 300), rows=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_ragged_rows_decode_exactly(cols: int, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for kind in ("f32", "f16", "bf16", "fp8_block"):
        m = random_stored(kind, rows, cols, rng)
        (got,) = same_on_all_isas(m.decode)
        same_bits(got, m.values)


def test_sizes_that_do_not_fit_are_refused() -> None:
    m = stored_plain(np.ones((3, 8), np.float32))
    with pytest.raises(OptionError, match="do not fit"):
        OPS.decode(ISAS[0], "bf16", 3, 8, m.data[:-1].copy(), None)
    with pytest.raises(CheckpointError, match="multiple of 32"):
        OPS.decode(ISAS[0], "q8_0", 1, 33, np.zeros(34, np.uint8), None)
