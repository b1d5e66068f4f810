"""Products in which four lanes share a matrix row (metal/wide_rows.h): Metal gives the CPU's bits."""

from __future__ import annotations

import numpy as np
import pytest

from ds4v41 import _ext
from tests.ops.support import MODES, f32, random_stored, rope_of, small_shape, values_of

from .both import CUDA, needs_standin, same_on_metal
from .test_layer_ops import coefficients, experts_of, streams

pytestmark = needs_standin
KINDS = ("q8_0", "q4_k", "mxfp4")


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_METAL_WIDE", "always")


def used(kernel: str) -> int:
    return int(_ext.metal_counters()["kernels"].get(kernel, (0, 0))[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "cols", "vocab"), [(1, 256, 33), (1, 2304, 9), (2, 1280, 40), (1, 5120, 17)])
def test_row_products(kind: str, n: int, cols: int, vocab: int) -> None:
    """One segment and several, whole tiles and ragged ones; not in use where threadgroup memory does not suffice."""
    rng = np.random.default_rng(cols)
    matrix, (stream, mix) = random_stored(kind, vocab, cols, rng), streams(rng, n, cols)
    arguments = (stream, mix, f32(rng.normal(size=cols)), matrix.argument())
    before = used("linear_wide")
    same_on_metal(small_shape(hidden=cols, vocab=vocab), "bf16", lambda b: b.head(*arguments), checked=cols == 256)
    assert (used("linear_wide") > before) == (CUDA or not (kind == "q8_0" and cols == 5120))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [3, 4, 5, 6, 7, 8])
def test_more_activation_rows(kind: str, n: int) -> None:
    rng = np.random.default_rng(n)
    matrix, (stream, mix) = random_stored(kind, 21, 256, rng), streams(rng, n, 256)
    arguments = (stream, mix, f32(rng.normal(size=256)), matrix.argument())
    same_on_metal(small_shape(hidden=256, vocab=21), "fp32", lambda b: b.head(*arguments), checked=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 2, 6])
def test_projections_around_attention(mode: str, n: int) -> None:
    """The rotation, groups of rows, and the expand are folded in."""
    rng = np.random.default_rng(n)
    shape = small_shape(hidden=72, q_rank=256, head_dim=128, o_rank=128, o_groups=2)
    qr, wq_b = values_of("normal", (n, 256), rng), random_stored("q8_0", 4 * 128, 256, rng)
    _, cos, sin = rope_of(shape, False, 9, n)
    same_on_metal(shape, mode, lambda b: b.attn_query(qr, wq_b.argument(), cos, sin))
    o = values_of("normal", (n, 4, 128), rng)
    wo_a, wo_b = random_stored("q8_0", 2 * 128, 256, rng), random_stored("q4_k", 72, 256, rng)
    (stream, _), (post, comb) = streams(rng, n, 72), coefficients(rng, n)
    same_on_metal(shape, mode, lambda b: b.attn_out(o, wo_a.argument(), wo_b.argument(), post, comb, stream))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "size"), [(1, 256), (1, 2304), (2, 256), (6, 256), (8, 256)])
def test_experts(kind: str, n: int, size: int) -> None:
    """Experts of one token and of several; elements of more than one segment."""
    rng = np.random.default_rng(n)
    shape = small_shape(hidden=256, expert_dim=size, n_experts=5, top_k=2)
    experts, shared = experts_of((kind, kind, "q8_0"), 5, size, 256, rng)
    ids = np.sort(np.stack([rng.permutation(5)[:2] for _ in range(n)]), 1).astype(np.int32)
    weights, x = f32(rng.random((n, 2))), values_of("normal", (n, 256), rng)
    same_on_metal(shape, "bf16", lambda b: b.moe(x, ids, weights, experts, shared), checked=n == 2)
