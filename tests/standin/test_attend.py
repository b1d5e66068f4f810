"""Attention on Metal, of sessions and of drafts: the CPU's bits for every length of the list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ops.support import F32, ISAS, MODES, OPS, U8, f32, rope_of, small_shape, values_of

from .both import needs_standin, same_on_metal

pytestmark = needs_standin


def cache(kind: str, m: int, dim: int, rng: np.random.Generator) -> U8:
    """Packed rows of all magnitudes, some of them zero."""
    rows = rng.normal(size=(m, dim)) * np.exp2(rng.integers(-12, 4, (m, dim // 16)).repeat(16, axis=1))
    rows[rng.random(m) < 0.1] = 0
    return np.asarray(OPS.pack(ISAS[0], kind, f32(rows)))


def query(n: int, shape: dict[str, Any], rng: np.random.Generator) -> tuple[F32, F32]:
    q = values_of("holes", (n, shape["n_heads"], shape["head_dim"]), rng) * f32(
        np.exp2(rng.integers(-4, 6, (n, shape["n_heads"], 1)))
    )
    return q, f32(rng.normal(size=shape["n_heads"]) * 5)


SHAPES: list[dict[str, Any]] = [
    {"window": 16, "index_topk": 60},  # blocks with window rows and entries
    {"window": 128, "index_topk": 70, "n_heads": 9, "head_dim": 96, "rope_dim": 32},
    {"window": 64, "index_topk": 8, "n_heads": 2, "head_dim": 32, "rope_dim": 32},
    {"window": 5, "index_topk": 130, "n_heads": 8, "head_dim": 160, "rope_dim": 2},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", range(len(SHAPES)))
@pytest.mark.parametrize(("position", "n"), [(0, 1), (3, 2), (140, 3)])
def test_lists_of_every_length(mode: str, which: int, position: int, n: int) -> None:
    rng = np.random.default_rng(position + which)
    shape = small_shape(**SHAPES[which])
    hd, topk, window = shape["head_dim"], shape["index_topk"], shape["window"]
    q, sink = query(n, shape, rng)
    rows, entries = cache("window", position + n, hd, rng), cache("compressed", position + n, hd, rng)
    _, cos, sin = rope_of(shape, True, position, n)
    counts = [min(topk, (position + i + 1)) if i != 1 else min(1, position) for i in range(n)]
    selected = [sorted(rng.choice(position + n, count, replace=False).tolist()) for count in counts]
    ring = window + n + 3 if position > window + n else 0
    for compressed in (entries, None):
        same_on_metal(
            shape,
            mode,
            lambda b, c=compressed: b.attend(
                position, q, rows, c, None if c is None else selected, sink, cos, sin, ring=ring, with_raw=True
            ),
            checked=position < 10,
        )


@pytest.mark.parametrize("n", [1, 5])
def test_a_sink_that_takes_all_and_equal_scores(n: int) -> None:
    rng = np.random.default_rng(n)
    shape = small_shape(window=16, index_topk=20)
    q, _ = query(n, shape, rng)
    rows = cache("window", 30 + n, 64, rng)
    _, cos, sin = rope_of(shape, False, 30, n)
    for sink in (f32([1e4, -1e4, 0, -0.0]), f32([-1e30, 80, -80, 1e30])):
        for factor in (0.0, 1.0, 1e4):
            same_on_metal(
                shape, "bf16", lambda b, s=sink, f=factor: b.attend(30, q * f32(f), rows, None, None, s, cos, sin)
            )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("first", "n_context", "n", "capacity", "window"),
    [
        (0, 1, 1, 16, 16),
        (0, 16, 5, 16, 16),
        (37, 16, 6, 21, 16),
        (3, 9, 2, 64, 128),
        (100, 100, 7, 101, 128),
        (5, 0, 3, 4, 16),
    ],
)
def test_drafts(mode: str, first: int, n_context: int, n: int, capacity: int, window: int) -> None:
    rng = np.random.default_rng(first)
    for more in ({}, {"n_heads": 10, "head_dim": 96}):
        shape = small_shape(window=window, **more)
        hd = shape["head_dim"]
        q, sink = query(n, shape, rng)
        context, block = cache("window", max(1, n_context), hd, rng)[:n_context], cache("window", n, hd, rng)
        _, cos, sin = rope_of(shape, False, first + n_context, n)
        same_on_metal(
            shape,
            mode,
            lambda b, a=(q, context, block, sink, cos, sin): b.draft_attend(first, *a, capacity),
            checked=n_context < 20,
        )


def test_released_sizes() -> None:
    """64 heads of 512, a full window and 512 entries."""
    rng = np.random.default_rng(7)
    shape = small_shape(window=128, index_topk=512, n_heads=64, head_dim=512, rope_dim=64)
    position = 1000
    q, sink = query(1, shape, rng)
    rows, entries = cache("window", position + 1, 512, rng), cache("compressed", 600, 512, rng)
    selected = [sorted(rng.choice(600, 512, replace=False).tolist())]
    _, cos, sin = rope_of(shape, True, position, 1)
    same_on_metal(
        shape, "bf16", lambda b: b.attend(position, q, rows, entries, selected, sink, cos, sin, ring=384), checked=False
    )
