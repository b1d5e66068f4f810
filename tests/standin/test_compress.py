"""Compressor and index queries on Metal: the CPU's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ops.support import MODES, f32, random_stored, rope_of, small_shape, sprinkle, values_of

from .both import needs_standin, same_on_metal

pytestmark = needs_standin

SHAPES: list[dict[str, Any]] = [
    {},
    {"hidden": 2200, "head_dim": 96, "index_dim": 64, "rope_dim": 32},  # two segments, a ragged last one
    {"hidden": 70, "head_dim": 32, "index_dim": 32, "rope_dim": 4},
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(
    ("position", "n", "capacity"), [(0, 1, 64), (0, 5, 64), (7, 1, 64), (7, 4, 4), (8, 1, 8), (63, 7, 3)]
)
def test_compressed_rows(mode: str, ratio: int, position: int, n: int, capacity: int) -> None:
    rng = np.random.default_rng(position + n)
    for more in SHAPES if mode == "bf16" else SHAPES[:1]:
        shape = small_shape(**more)
        d, hd, dim = shape["hidden"], shape["head_dim"], shape["index_dim"]
        x = values_of("normal", (n, d), rng)
        wkv, wgate, wk = (random_stored("bf16", *size, rng).argument() for size in ((hd, d), (hd, d), (dim, hd)))
        norm, k_norm = f32(rng.normal(size=hd)), f32(rng.normal(size=dim))
        pending = f32(rng.normal(size=2 * hd)) if ratio == 2 and position % 2 else None
        _, cos, sin = rope_of(shape, True, 0, position + n)
        same_on_metal(
            shape,
            mode,
            lambda b, a=(wkv, wgate if ratio == 2 else None, norm, wk, k_norm, cos, sin, pending), x=x: b.compress(
                position, ratio, x, *a, capacity=capacity
            ),
        )


@pytest.mark.parametrize("kind", ["f32", "q8_0", "fp8_block"])
def test_extreme_latents(kind: str) -> None:
    """Zeros, subnormals and format limits reach the quantisers."""
    rng = np.random.default_rng(3)
    shape = small_shape()
    x = np.nan_to_num(sprinkle(values_of("wide", (6, 128), rng), rng, 0.2), nan=0.0, posinf=1e30, neginf=-1e30)
    x[1] = 0
    weights = [random_stored(kind, *size, rng).argument() for size in ((64, 128), (64, 128))]
    key = random_stored("f32", 32, 64, rng).argument()
    norm, k_norm = f32(rng.normal(size=64) * np.exp2(rng.integers(-30, 30, 64))), f32(rng.normal(size=32))
    _, cos, sin = rope_of(shape, True, 0, 6)
    for ratio in (1, 2):
        gate = weights[1] if ratio == 2 else None
        same_on_metal(
            shape, "fp32", lambda b, r=ratio, g=gate: b.compress(0, r, x, weights[0], g, norm, key, k_norm, cos, sin)
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "heads", "dim"), [(1, 8, 32), (3, 5, 64), (2, 17, 96)])
def test_index_queries(mode: str, n: int, heads: int, dim: int) -> None:
    rng = np.random.default_rng(n)
    shape = small_shape(index_heads=heads, index_dim=dim)
    qr, x = values_of("normal", (n, 96), rng), values_of("holes", (n, 128), rng)
    qr[0, :40] = 0
    wq_b, proj = (
        random_stored("q8_0", heads * dim, 96, rng).argument(),
        random_stored("bf16", heads, 128, rng).argument(),
    )
    _, cos, sin = rope_of(shape, True, 5, n)
    same_on_metal(shape, mode, lambda b: b.index_query(qr, x, wq_b, proj, cos, sin))


def test_released_sizes() -> None:
    rng = np.random.default_rng(13)
    shape = small_shape(head_dim=512, index_dim=128, rope_dim=64)
    wkv, wgate, wk = (random_stored("q8_0", *size, rng).argument() for size in ((512, 128), (512, 128), (128, 512)))
    x, norm, k_norm = values_of("normal", (3, 128), rng), f32(rng.normal(size=512)), f32(rng.normal(size=128))
    _, cos, sin = rope_of(shape, True, 0, 3)
    same_on_metal(shape, "bf16", lambda b: b.compress(0, 2, x, wkv, wgate, norm, wk, k_norm, cos, sin), checked=False)
