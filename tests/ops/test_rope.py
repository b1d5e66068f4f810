"""Rotary tables and rotation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from tests.golden.compare import assert_bf16_close
from tests.golden.load import unit
from tests.ref import rope
from tests.ref.formats import F32, f32

from .support import ISAS, OPS, STYLES, rope_of, same_bits, same_on_all_isas, small_shape, sprinkle, values_of
from .tolerance import GOLDEN_FP32, GOLDEN_ROPE, assert_stored, sum_bound

RELEASED = small_shape(head_dim=512, rope_dim=64, yarn_original=65536.0, max_context=1 << 20)
YARN = rope.Yarn(16, 65536, 32, 1)
TABLES = [("window_theta10000", False), ("compress_theta160000_yarn", True)]
LAST = (1 << 20) - 1


def reference_frequencies(yarn: bool) -> F32:
    return rope.frequencies(64, 1.6e5, YARN) if yarn else rope.frequencies(64, 1e4, None)


@pytest.mark.parametrize(("name", "yarn"), TABLES)
def test_golden_tables(name: str, yarn: bool) -> None:
    """Positions 0 to 1048575."""
    v = unit("rope_released")
    for i, position in enumerate(v["positions"]):
        freq, cos, sin = rope_of(RELEASED, yarn, int(position), 1)
        assert_allclose(freq, v[f"{name}.inv_freq"], rtol=GOLDEN_FP32)
        assert_allclose(cos[0], v[f"{name}.cos"][i], rtol=0, atol=GOLDEN_ROPE)
        assert_allclose(sin[0], v[f"{name}.sin"][i], rtol=0, atol=GOLDEN_ROPE)


@pytest.mark.parametrize("yarn", [False, True])
@given(first=st.integers(0, LAST - 40), n=st.integers(1, 40))
def test_tables_are_correctly_rounded(yarn: bool, first: int, n: int) -> None:
    """The fp32 product position * frequency comes first, error included; its cosine and sine are rounded once."""
    freq, cos, sin = rope_of(RELEASED, yarn, first, n)
    same_bits(freq, reference_frequencies(yarn))
    want_cos, want_sin = rope.angles(np.arange(first, first + n), freq)
    same_bits(cos, want_cos)
    same_bits(sin, want_sin)


def test_the_angle_is_a_product_in_fp32() -> None:
    """An angle in double precision would be off by up to 0.03 at the end of the context."""
    freq, cos, _ = rope_of(RELEASED, False, LAST, 1)
    double = np.cos(LAST * freq.astype(np.float64))
    assert np.abs(cos[0] - double).max() > 1e-3


@pytest.mark.parametrize("yarn", [False, True])
def test_a_row_does_not_depend_on_the_first_position(yarn: bool) -> None:
    _, cos, sin = rope_of(RELEASED, yarn, 65500, 100)
    for i in (0, 1, 36, 99):
        _, one_cos, one_sin = rope_of(RELEASED, yarn, 65500 + i, 1)
        same_bits(one_cos, cos[i : i + 1])
        same_bits(one_sin, sin[i : i + 1])


@given(
    dim=st.integers(1, 32).map(lambda i: 2 * i),
    base=st.sampled_from([1e4, 1.6e5, 5e5]),
    factor=st.sampled_from([1.0, 4.0, 16.0]),
    original=st.sampled_from([256.0, 4096.0, 65536.0]),
)
def test_frequencies_of_other_models(dim: int, base: float, factor: float, original: float) -> None:
    """Ramps of any width, empty and cut off at both ends."""
    sizes = {"rope_dim": dim, "rope_base": base, "compress_rope_base": base}
    shape = small_shape(**sizes, yarn_factor=factor, yarn_original=original)
    same_bits(rope_of(shape, False, 0, 1)[0], rope.frequencies(dim, base, None))
    want = rope.frequencies(dim, base, rope.Yarn(factor, int(original), 32, 1))
    same_bits(rope_of(shape, True, 0, 1)[0], want)


@pytest.mark.parametrize("isa", ISAS)
def test_golden_rotation_and_its_inverse(isa: str) -> None:
    v = unit("rope_released")
    x = v["apply.x"]
    n, heads, width = x.shape
    _, cos, sin = rope_of(RELEASED, True, int(v["apply.first_position"][0]), n)
    rows, tables = x.reshape(-1, width), (np.repeat(cos, heads, axis=0), np.repeat(sin, heads, axis=0))
    for inverse, name in ((False, "apply.rotated"), (True, "apply.inverse")):
        got = OPS.rotate(isa, rows, *tables, inverse, True)
        assert_bf16_close(got.reshape(x.shape), v[name])


@given(
    n=st.integers(1, 5),
    pairs=st.integers(1, 20),
    head=st.integers(0, 30),
    style=st.sampled_from(STYLES),
    inverse=st.booleans(),
    round_=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_rotation_as_defined(n: int, pairs: int, head: int, style: str, inverse: bool, round_: bool, seed: int) -> None:
    """Adjacent pairs of the tail turn by the angle, or back; what stands before the tail stays."""
    rng = np.random.default_rng(seed)
    x = values_of(style, (n, head + 2 * pairs), rng)
    angle = rng.uniform(-9, 9, (n, pairs))
    cos, sin = f32(np.cos(angle)), f32(np.sin(angle))
    (got,) = same_on_all_isas(lambda isa: OPS.rotate(isa, x, cos, sin, inverse, round_))
    same_bits(got[:, :head], x[:, :head])
    pair = x[:, head:].astype(np.float64).reshape(n, pairs, 2)
    s = -sin if inverse else sin
    re, im = pair[..., 0] * cos - pair[..., 1] * s, pair[..., 0] * s + pair[..., 1] * cos
    want = np.stack([re, im], axis=-1).reshape(n, -1)
    size = np.stack([np.abs(pair[..., 0] * cos) + np.abs(pair[..., 1] * s)] * 2, axis=-1)
    size[..., 1] = np.abs(pair[..., 0] * s) + np.abs(pair[..., 1] * cos)
    assert_stored(got[:, head:], want, sum_bound(size.reshape(n, -1), 2), rounded=round_)


@given(n=st.integers(1, 3), pairs=st.integers(1, 16), seed=st.integers(0, 2**32 - 1))
def test_odd_values_give_the_same_bits(n: int, pairs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = sprinkle(values_of("wide", (n, 2 * pairs + 3), rng), rng)
    cos, sin = f32(rng.uniform(-1, 1, (n, pairs))), f32(rng.uniform(-1, 1, (n, pairs)))
    same_on_all_isas(lambda isa: OPS.rotate(isa, x, cos, sin, False, True))


def test_position_zero_turns_nothing() -> None:
    _, cos, sin = rope_of(RELEASED, True, 0, 1)
    assert_array_equal(cos, 1)
    assert_array_equal(sin, 0)
