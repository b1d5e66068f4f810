"""Scores, candidate blocks and the best entries on Metal: the CPU's bits, ties and all."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.support import F32, ISAS, MODES, OPS, f32, small_shape
from tests.ops.test_select import SCORED, keys_with_scores

from .both import needs_standin, same_on_metal

pytestmark = needs_standin


def random_keys(m: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    return np.asarray(OPS.pack(ISAS[0], "index", f32(rng.normal(size=(m, dim)) * np.exp2(rng.integers(-3, 3, (m, 1))))))


def random_queries(n: int, heads: int, dim: int, rng: np.random.Generator) -> tuple[np.ndarray, F32, F32]:
    codes = rng.choice([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12], size=(n, heads, dim)).astype(np.int8)
    scales = f32(np.exp2(rng.integers(-6, 3, (n, heads, dim // 32))))
    return codes, scales, f32(rng.normal(size=(n, heads)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("position", "n", "ratio", "heads", "dim"),
    [(0, 1, 2, 8, 32), (9, 3, 2, 5, 64), (300, 2, 1, 17, 128), (70, 3, 1, 33, 96), (599, 1, 2, 8, 32)],
)
def test_random_scores(mode: str, position: int, n: int, ratio: int, heads: int, dim: int) -> None:
    rng = np.random.default_rng(position)
    shape = small_shape(index_heads=heads, index_dim=dim, index_topk=6, candidate_blocks=5, candidate_block_size=4)
    keys = random_keys(max(1, (position + n) // ratio), dim, rng)
    query = random_queries(n, heads, dim, rng)
    for candidates in ("none", "make"):
        for scores in (True, False):
            same_on_metal(
                shape, mode, lambda b, c=candidates, s=scores: b.select(position, ratio, *query, keys, c, with_scores=s)
            )


@pytest.mark.parametrize("seed", range(4))
def test_given_blocks(seed: int) -> None:
    """Rows that may read some blocks only: few, many, none, the newest cut short, sizes that are no power of two."""
    rng = np.random.default_rng(seed)
    size, most = (3, 40) if seed % 2 else (8, 12)
    shape = small_shape(index_heads=3, index_dim=32, index_topk=7, candidate_blocks=most, candidate_block_size=size)
    position, n = 397, 4
    keys, query = random_keys(position + n, 32, rng), random_queries(n, 3, 32, rng)
    blocks = [sorted(rng.choice(position // size, count, replace=False).tolist()) for count in (1, most, 0, most // 2)]
    blocks[1][-1] = (position + 1) // size  # the newest
    for scores in (True, False):
        same_on_metal(
            shape, "bf16", lambda b, s=scores: b.select(position, 1, *query, keys, "use", blocks, with_scores=s)
        )


LISTS = {
    "all equal": lambda m, rng: np.full(m, 7),
    "all zero": lambda m, rng: np.zeros(m, int),
    "two values": lambda m, rng: rng.choice([3, 4], m),
    "rising": lambda m, rng: np.arange(m) * 255 // m,
    "falling": lambda m, rng: 255 - np.arange(m) * 255 // m,
    "few good": lambda m, rng: np.where(rng.random(m) < 0.01, 200, -rng.integers(0, 9, m)),
    "good ones together": lambda m, rng: np.where(abs(np.arange(m) - m // 3) < 9, 100 + np.arange(m) % 50, 1),
    "random": lambda m, rng: rng.integers(-255, 256, m),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("topk", [1, 5, 64])
@pytest.mark.parametrize("m", [4, 33, 700])
def test_adversarial_lists(name: str, topk: int, m: int) -> None:
    scores = np.clip(LISTS[name](m, np.random.default_rng(m)), -255, 255)
    shape = small_shape(**SCORED, index_topk=topk, candidate_blocks=9, candidate_block_size=4)
    codes, scales, weights, keys = keys_with_scores(scores)
    same_on_metal(shape, "bf16", lambda b: b.select(m - 1, 1, codes, scales, weights, keys, "make"), checked=m < 100)


@pytest.mark.parametrize("m", [40, 900])
def test_infinite_tiny_and_signed_zero_scores(m: int) -> None:
    """Minus infinity is never chosen; plus infinity is; subnormals are zero; zeros of both signs are equal."""
    rng = np.random.default_rng(m)
    shape = small_shape(index_heads=3, index_dim=32, index_topk=6, candidate_blocks=4, candidate_block_size=8)
    keys = random_keys(m, 32, rng)
    codes, scales, _ = random_queries(1, 3, 32, rng)
    for weights in (
        [-3e38, -3e38, 1.0],
        [3e38, 3e38, 1e-38],
        [-np.inf, -np.inf, -np.inf],
        [1e-38, -1e-38, 1e-40],
        [0.0, -0.0, -0.0],
    ):
        w, s = f32([weights]), f32(scales * (16 if abs(weights[0]) > 1 else 1))
        same_on_metal(shape, "fp32", lambda b, w=w, s=s: b.select(m - 1, 1, codes, s, w, keys, "make"))


def test_so_many_equal_scores_that_all_are_read() -> None:
    """More sets of 32 reach the bound than the bounded method can list."""
    m = 4097 * 32 + 5
    scores = np.full(m, 3)
    scores[[17, m - 2]] = 5
    shape = small_shape(**SCORED, index_topk=8, candidate_blocks=9, candidate_block_size=4, max_context=m)
    codes, scales, weights, keys = keys_with_scores(scores)
    got = same_on_metal(
        shape, "bf16", lambda b: b.select(m - 1, 1, codes, scales, weights, keys, with_scores=False), checked=False
    )
    assert [17, m - 2] == [int(e) for e in got[4].ravel() if scores[e] == 5]


def test_long_list_by_the_bound() -> None:
    rng = np.random.default_rng(5)
    m = 30_000
    shape = small_shape(
        index_heads=2, index_dim=32, index_topk=64, candidate_blocks=200, candidate_block_size=8, max_context=m
    )
    keys, query = random_keys(m, 32, rng), random_queries(1, 2, 32, rng)
    for mode in ("fp32", "bf16"):
        same_on_metal(shape, mode, lambda b: b.select(m - 1, 1, *query, keys, "make", with_scores=False), checked=False)


def test_released_sizes() -> None:
    """32 heads of 128; the best 512 by the bound; 2,048 blocks of 8 entries, made and used."""
    rng = np.random.default_rng(11)
    shape = small_shape(
        index_heads=32, index_dim=128, index_topk=512, candidate_blocks=2048, candidate_block_size=8, max_context=20_000
    )
    m = 17_001
    keys, query = random_keys(m, 128, rng), random_queries(1, 32, 128, rng)
    got = same_on_metal(
        shape, "bf16", lambda b: b.select(m - 1, 1, *query, keys, "make", with_scores=False), checked=False
    )
    blocks = [got[0][0][: int(got[2][0])].tolist()]
    same_on_metal(
        shape, "bf16", lambda b: b.select(m - 1, 1, *query, keys, "use", blocks, with_scores=False), checked=False
    )
