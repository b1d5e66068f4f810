"""Products of many rows in tiles (metal/tiles.h): Metal gives the CPU's bits, whatever the type and the sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4v41 import OptionError
from tests.ops.support import COLUMN_BLOCK, MODES, f32, random_stored, rope_of, small_shape, values_of

from .both import CUDA, ORDERS, needs_standin, same_on_metal
from .test_layer_ops import coefficients, experts_of, experts_together, streams

pytestmark = needs_standin


@pytest.fixture(autouse=True)
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are too few of them to be worth it."""
    monkeypatch.setenv("DS4_METAL_TILES", "always")


@pytest.mark.parametrize("kind", COLUMN_BLOCK)
def test_row_products_of_every_type(kind: str) -> None:
    """Whole tiles and ragged ones; columns that end within a turn, a chunk and a segment, and after one segment."""
    rng = np.random.default_rng(2)
    block = COLUMN_BLOCK[kind]
    for n, cols, vocab in ((9, 97, 35), (33, 256, 33), (40, 2304, 5), (9, 4096, 3)):
        cols = -(-cols // block) * block
        matrix = random_stored(kind, vocab, cols, rng)
        stream, mix = streams(rng, n, cols)
        arguments = (stream, mix, f32(rng.normal(size=cols)), matrix.argument())
        same_on_metal(
            small_shape(hidden=cols, vocab=vocab),
            "bf16",
            lambda b, a=arguments: b.head(*a),
            checked=n == 33 and cols == 256,
        )


@given(
    st.sampled_from([k for k, block in COLUMN_BLOCK.items() if block == 1]),
    st.integers(9, 70),
    st.integers(1, 70),
    st.integers(1, 600),
    st.sampled_from(("zero", "normal", "wide")),
)
@settings(deadline=None, max_examples=12)
def test_any_size(kind: str, n: int, vocab: int, cols: int, values: str) -> None:
    rng = np.random.default_rng(n)
    matrix = random_stored(kind, vocab, cols, rng)
    stream = values_of("wide", (n, 4, cols), rng) * (0 if values == "zero" else 1)
    if values == "normal":
        stream = values_of("normal", (n, 4, cols), rng)
    mix, norm = f32(rng.normal(size=(n, 4))), f32(rng.normal(size=cols))
    same_on_metal(
        small_shape(hidden=cols, vocab=vocab),
        "fp32",
        lambda b: b.head(stream, mix, norm, matrix.argument()),
        checked=False,
    )


@pytest.mark.parametrize("cols", [1, 31, 65, 255, 2049, 2111])
def test_columns_of_any_number(cols: int) -> None:
    rng = np.random.default_rng(cols)
    matrix, (stream, mix) = random_stored("bf16", 35, cols, rng), streams(rng, 11, cols)
    norm = f32(rng.normal(size=cols))
    shape = small_shape(hidden=cols, vocab=35)
    same_on_metal(shape, "fp32", lambda b: b.head(stream, mix, norm, matrix.argument()), checked=cols == 65)


def test_values_that_are_no_numbers_stay_in_their_row() -> None:
    rng = np.random.default_rng(1)
    matrix, (stream, mix) = random_stored("f32", 34, 70, rng), streams(rng, 12, 70)
    stream[3], stream[7, 0, 5], stream[11, 1, 69] = np.nan, np.inf, -np.inf
    shape = small_shape(hidden=70, vocab=34)
    (logits, *_) = same_on_metal(shape, "fp32", lambda b: b.head(stream, mix, f32(np.ones(70)), matrix.argument()))
    finite = np.isfinite(logits).reshape(12, -1).all(1)
    assert not finite[[3, 7, 11]].any() and finite[[0, 1, 2, 4, 5, 6, 8, 9, 10]].all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("position", "n", "hidden", "q_rank", "head_dim"), [(3, 9, 64, 33, 64), (30, 34, 75, 70, 96)])
def test_projections_into_attention(mode: str, position: int, n: int, hidden: int, q_rank: int, head_dim: int) -> None:
    """The query is rotated in the tile."""
    rng = np.random.default_rng(n)
    shape = small_shape(hidden=hidden, q_rank=q_rank, head_dim=head_dim)
    x = values_of("normal", (n, hidden), rng)
    wq_a, wkv = random_stored("fp8_block", q_rank, hidden, rng), random_stored("bf16", head_dim, hidden, rng)
    q_norm, kv_norm = f32(rng.normal(size=q_rank)), f32(rng.normal(size=head_dim))
    _, cos, sin = rope_of(shape, False, position, n)
    same_on_metal(
        shape,
        mode,
        lambda b: b.attn_in(position, x, wq_a.argument(), wkv.argument(), q_norm, kv_norm, cos, sin, 40),
    )
    wq_b = random_stored("f16", 4 * head_dim, q_rank, rng)
    qr = values_of("normal", (n, q_rank), rng)
    same_on_metal(shape, mode, lambda b: b.attn_query(qr, wq_b.argument(), cos, sin))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "o_rank"), [(10, 48), (33, 64)])
def test_projections_out_of_attention(mode: str, n: int, o_rank: int) -> None:
    """Groups that end within a tile; the expand that follows is folded into the second product."""
    rng = np.random.default_rng(n)
    shape = small_shape(hidden=99, o_rank=o_rank)
    o = values_of("normal", (n, 4, 64), rng)
    wo_a, wo_b = random_stored("q8_0", 2 * o_rank, 128, rng), random_stored("fp8_row", 99, 2 * o_rank, rng)
    stream, _ = streams(rng, n, 99)
    post, comb = coefficients(rng, n)
    same_on_metal(shape, mode, lambda b: b.attn_out(o, wo_a.argument(), wo_b.argument(), post, comb, stream))


def test_router_and_mixer() -> None:
    rng = np.random.default_rng(4)
    shape = small_shape(n_experts=37, top_k=3, hidden=64)
    gate, x = random_stored("f32", 37, 64, rng), values_of("normal", (12, 64), rng)
    bias = f32(rng.integers(-2, 3, 37))
    same_on_metal(shape, "bf16", lambda b: b.route(x, gate.argument(), bias))
    stream, mix = streams(rng, 12, 64)
    fn, scale, base, norm = random_stored("f16", 24, 256, rng), *(f32(rng.normal(size=k) * 0.1) for k in (3, 24, 64))
    same_on_metal(shape, "bf16", lambda b: b.hc_read(stream, mix, fn.argument(), scale, base, norm, False))


@pytest.mark.parametrize("kind", COLUMN_BLOCK)
def test_experts_of_every_type(kind: str) -> None:
    rng = np.random.default_rng(5)
    size = max(64, COLUMN_BLOCK[kind])
    shape = small_shape(hidden=size, expert_dim=size, n_experts=3, top_k=2)
    experts, shared = experts_of((kind, kind, "q8_0"), 3, size, size, rng)
    ids = np.sort(np.stack([rng.permutation(3)[:2] for _ in range(13)]), 1).astype(np.int32)
    weights, x = f32(rng.random((13, 2))), values_of("normal", (13, size), rng)
    for mode in ("bf16", "fp8"):
        same_on_metal(shape, mode, lambda b: b.moe(x, ids, weights, experts, shared), checked=size < 100)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [25, 70])
def test_experts_of_rows_together(mode: str, n: int) -> None:
    """An expert of all tokens, experts of some, one of none; ragged sizes."""
    experts_together(mode, n, 7)


def test_a_prompt_takes_tiles_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the override: enough tiles use them, few do not."""
    from ds4v41 import _ext

    monkeypatch.delenv("DS4_METAL_TILES")
    rng = np.random.default_rng(6)
    for n, vocab, used in ((33, 1024, 1), (33, 64, 0)):
        matrix, (stream, mix) = random_stored("q8_0", vocab, 64, rng), streams(rng, n, 64)
        shape, norm = small_shape(hidden=64, vocab=vocab), f32(np.ones(64))
        arguments = (stream, mix, norm, matrix.argument())
        before = _ext.metal_counters()["kernels"].get("linear_many", (0, 0))[0]
        same_on_metal(shape, "bf16", lambda b, a=arguments: b.head(*a), checked=False)
        after = _ext.metal_counters()["kernels"].get("linear_many", (0, 0))[0]
        assert after - before == (1 if CUDA else len(ORDERS)) * used


@pytest.mark.parametrize("name", ["DS4_METAL_TILES", "DS4_METAL_WIDE"])
def test_an_override_that_means_nothing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_METAL_TILES", "never")  # else nothing asks for the other
    monkeypatch.setenv(name, "Always")
    rng = np.random.default_rng(7)
    matrix, (stream, mix) = random_stored("q8_0", 64, 64, rng), streams(rng, 9, 64)
    with pytest.raises(OptionError, match=rf"{name}: expected always or never, found 'Always'"):
        same_on_metal(
            small_shape(hidden=64, vocab=64),
            "bf16",
            lambda b: b.head(stream, mix, f32(np.ones(64)), matrix.argument()),
            checked=False,
        )
