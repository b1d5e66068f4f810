"""Row products of every type, hyper-connections, projections, experts, head: Metal gives the CPU's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ops.support import COLUMN_BLOCK, F32, MODES, f32, random_stored, rope_of, small_shape, values_of

from .both import needs_standin, same_on_metal

pytestmark = needs_standin

ROWS = (1, 2, 3, 4, 5, 6, 7, 8)


def streams(rng: np.random.Generator, n: int, hidden: int, c: int = 4) -> tuple[F32, F32]:
    return values_of("wide", (n, c, hidden), rng), f32(rng.normal(size=(n, c)))


def coefficients(rng: np.random.Generator, n: int, c: int = 4) -> tuple[F32, F32]:
    return f32(rng.normal(size=(n, c))), f32(rng.normal(size=(n, c, c)))


@pytest.mark.parametrize("kind", COLUMN_BLOCK)
def test_row_products_of_every_type(kind: str) -> None:
    """1 to 8 rows on one stream of weights; 19 has more tiles; columns that end within a turn and within a segment."""
    rng = np.random.default_rng(2)
    block = COLUMN_BLOCK[kind]
    for n, cols, vocab in [(n, block * (9 if block == 1 else 3), 11) for n in ROWS] + [
        (1, 2304 - 2304 % block, 5),
        (19, 256, 3),
    ]:
        shape = small_shape(hidden=cols, vocab=vocab)
        matrix = random_stored(kind, vocab, cols, rng)
        stream, mix = streams(rng, n, cols)
        norm = f32(rng.normal(size=cols))
        given = (stream, mix, norm, matrix.argument())
        same_on_metal(shape, "bf16", lambda b, given=given: b.head(*given), checked=n in (3, 8))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "fp8_block"])
@pytest.mark.parametrize("cols", [1, 31, 65, 2049, 2111])
def test_columns_of_any_number(kind: str, cols: int) -> None:
    rng = np.random.default_rng(cols)
    shape = small_shape(hidden=cols, vocab=35)
    matrix, (stream, mix) = random_stored(kind, 35, cols, rng), streams(rng, 2, cols)
    same_on_metal(
        shape,
        "fp32",
        lambda b: b.head(stream, mix, f32(rng.normal(size=cols) * 0 + 1), matrix.argument()),
        checked=cols == 65,
    )


@pytest.mark.parametrize("kind", COLUMN_BLOCK)
def test_embeddings(kind: str) -> None:
    rng = np.random.default_rng(3)
    cols = max(96, COLUMN_BLOCK[kind]) if COLUMN_BLOCK[kind] > 1 else 77
    for mode in ("bf16", "fp32"):
        table = random_stored(kind, 40, cols, rng)
        tokens = np.array([39, 0, 7, 7, 33], np.int32)
        same_on_metal(small_shape(hidden=cols), mode, lambda b, t=table, ids=tokens: b.embed(ids, t.argument()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("n", "hidden", "kind", "c"),
    [
        (1, 128, "f16", 4),
        (2, 75, "f32", 4),
        (6, 1100, "f32", 4),
        (8, 64, "bf16", 2),
        (11, 128, "f16", 4),
        (3, 96, "f32", 5),
    ],
)
def test_hyper_connections(mode: str, n: int, hidden: int, kind: str, c: int) -> None:
    rng = np.random.default_rng(n)
    shape = small_shape(hidden=hidden, n_streams=c)
    m = (2 + c) * c
    stream, mix = streams(rng, n, hidden, c)
    fn = random_stored(kind, m, c * hidden, rng)
    scale, base, norm = (f32(rng.normal(size=k) * 0.1) for k in (3, m, hidden))
    separate = mode == "fp8"
    same_on_metal(
        shape, mode, lambda b: b.hc_read(stream, mix, fn.argument(), scale, base, norm, separate), checked=hidden < 1000
    )
    post, comb = coefficients(rng, n, c)
    same_on_metal(
        shape,
        mode,
        lambda b: b.hc_write(values_of("normal", (n, hidden), np.random.default_rng(1)), post, comb, stream),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("position", "n", "capacity", "hidden", "q_rank", "head_dim"),
    [(0, 1, 4, 128, 96, 64), (30, 6, 7, 75, 70, 96), (3, 9, 40, 64, 33, 64)],
)
def test_projections_into_attention(
    mode: str, position: int, n: int, capacity: int, hidden: int, q_rank: int, head_dim: int
) -> None:
    rng = np.random.default_rng(n)
    shape = small_shape(hidden=hidden, q_rank=q_rank, head_dim=head_dim)
    x = values_of("normal", (n, hidden), rng)
    wq_a, wkv = random_stored("fp8_block", q_rank, hidden, rng), random_stored("bf16", head_dim, hidden, rng)
    q_norm, kv_norm = f32(rng.normal(size=q_rank)), f32(rng.normal(size=head_dim))
    _, cos, sin = rope_of(shape, False, position, n)
    same_on_metal(
        shape,
        mode,
        lambda b: b.attn_in(position, x, wq_a.argument(), wkv.argument(), q_norm, kv_norm, cos, sin, capacity),
    )
    wq_b = random_stored("f16", 4 * head_dim, q_rank, rng)
    qr = values_of("normal", (n, q_rank), rng)
    same_on_metal(shape, mode, lambda b: b.attn_query(qr, wq_b.argument(), cos, sin))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 5, 8, 10])
def test_projections_out_of_attention(mode: str, n: int) -> None:
    """The expand that follows is folded into the second product."""
    rng = np.random.default_rng(n)
    shape = small_shape(hidden=99, o_rank=48)
    o = values_of("normal", (n, 4, 64), rng)
    wo_a, wo_b = random_stored("q8_0", 96, 128, rng), random_stored("fp8_row", 99, 96, rng)
    stream, _ = streams(rng, n, 99)
    post, comb = coefficients(rng, n)
    same_on_metal(shape, mode, lambda b: b.attn_out(o, wo_a.argument(), wo_b.argument(), post, comb, stream))


@pytest.mark.parametrize(
    ("n", "experts", "k", "hidden"), [(1, 16, 3, 128), (5, 7, 7, 33), (9, 70, 6, 64), (2, 1, 1, 32)]
)
def test_router(n: int, experts: int, k: int, hidden: int) -> None:
    rng = np.random.default_rng(experts)
    shape = small_shape(n_experts=experts, top_k=k, hidden=hidden)
    gate, x = random_stored("f32", experts, hidden, rng), values_of("normal", (n, hidden), rng)
    bias = f32(rng.integers(-2, 3, experts))  # many equal scores
    same_on_metal(shape, "bf16", lambda b: b.route(x, gate.argument(), bias))
    for wrong in (np.nan, np.inf, -np.inf):
        x[0, :3] = wrong
        same_on_metal(shape, "fp32", lambda b: b.route(x, gate.argument(), bias))
    x[:] = 0
    same_on_metal(shape, "fp32", lambda b: b.route(x, gate.argument(), bias * 0))


def experts_of(
    kinds: tuple[str, str, str], count: int, f: int, d: int, rng: np.random.Generator
) -> tuple[list[Any], Any]:
    """count routed experts and the shared one; kinds: gate and up, down, all of the shared one."""

    def trio(up: str, down: str) -> tuple[Any, Any, Any]:
        return (
            random_stored(up, f, d, rng).argument(),
            random_stored(down, d, f, rng).argument(),
            random_stored(up, f, d, rng).argument(),
        )

    return [trio(kinds[0], kinds[1]) for _ in range(count)], trio(kinds[2], kinds[2])


def experts_together(mode: str, n: int, chosen: int) -> None:
    """n tokens of ragged sizes: expert 8 is everybody's, two of the first `chosen` are a token's own."""
    rng = np.random.default_rng(n)
    f, d = (96, 64) if mode == "fp8" else (45, 75)
    shape = small_shape(hidden=d, expert_dim=f, n_experts=9, top_k=3)
    experts, shared = experts_of(("bf16", "f16", "f32"), 9, f, d, rng)
    ids = np.sort(np.stack([np.append(rng.permutation(chosen)[:2], 8) for _ in range(n)]), 1).astype(np.int32)
    weights, x = f32(rng.random((n, 3))), values_of("normal", (n, d), rng)
    x[0, :5] = 1e4
    same_on_metal(shape, mode, lambda b: b.moe(x, ids, weights, experts, shared))


@pytest.mark.parametrize("kind", COLUMN_BLOCK)
def test_experts_of_every_type(kind: str) -> None:
    rng = np.random.default_rng(5)
    size = max(64, COLUMN_BLOCK[kind])
    shape = small_shape(hidden=size, expert_dim=size, n_experts=4, top_k=2)
    experts, shared = experts_of((kind, kind, "q8_0"), 4, size, size, rng)
    for n, mode in ((1, "bf16"), (3, "fp8"), (10, "bf16")):
        ids = np.sort(np.stack([rng.permutation(4)[:2] for _ in range(n)]), 1).astype(np.int32)
        weights, x = f32(rng.random((n, 2))), values_of("normal", (n, size), rng)
        same_on_metal(shape, mode, lambda b, v=(x, ids, weights): b.moe(*v, experts, shared), checked=size < 100)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 2, 4, 6, 8, 9, 37])
def test_experts_of_rows_together(mode: str, n: int) -> None:
    """Experts that one, some and all tokens of a tile chose; ragged sizes."""
    experts_together(mode, n, 8)
