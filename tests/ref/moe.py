"""Router, experts and their sum."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .formats import F32, Mode, f32, store
from .hc import sigmoid
from .linear import Weight, linear, product_fp32

ROUTE_SUM_EPS = 1e-20


class Expert(NamedTuple):
    """The three matrices of one expert: gate w1, down w2, up w3."""

    w1: Weight
    w2: Weight
    w3: Weight


def route(x: F32, gate: F32, bias: F32, k: int, scale: float) -> tuple[NDArray[np.int64], F32]:
    """Chosen experts and their weights, [n, k] each, best first.

    x [n, D], gate [experts, D]; bias [experts] or [n, experts] takes part in the choice but not in the weights.
    """
    logits = product_fp32(x, gate).astype(np.float64)
    scores = f32(np.sqrt(np.logaddexp(0, logits)))
    chosen = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :k]
    picked = np.take_along_axis(scores, chosen, axis=1).astype(np.float64)
    return chosen, f32(picked / (picked.sum(axis=1, keepdims=True) + ROUTE_SUM_EPS) * scale)


def expert(x: F32, weights: Expert, limit: float, mode: Mode, routing: F32 | None = None) -> F32:
    """One expert on x [n, D]; `routing` [n] scales the inner activation before the down projection.

    The gate is clipped from above only, the up branch on both sides.
    """
    gate = np.minimum(linear(x, weights.w1, mode), np.float32(limit))
    up = np.clip(linear(x, weights.w3, mode), np.float32(-limit), np.float32(limit))
    inner = f32(gate * sigmoid(gate) * up)
    if routing is not None:
        inner = inner * routing[:, None]
    return linear(store(inner, mode), weights.w2, mode)


def moe(
    x: F32,
    chosen: NDArray[np.integer],
    routing: F32,
    experts: list[Expert],
    shared: Expert,
    limit: float,
    mode: Mode,
) -> F32:
    """Routed experts in ascending id, then the shared one, summed in fp32: x [n, D] -> [n, D]."""
    total = np.zeros_like(x)
    for number, weights in enumerate(experts):
        row, place = np.nonzero(chosen == number)
        if len(row):
            total[row] += expert(x[row], weights, limit, mode, routing[row, place])
    return store(total + expert(x, shared, limit, mode), mode)
