"""The attention core: a list of rows per query, each row key and value of all heads, and a sink per head."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .formats import F32, Mode, f32, store

BLOCK = 64
FIRST_MAXIMUM = -1e30


def attend(q: F32, kv: F32, rows: NDArray[np.integer], sink: F32, scale: float, mode: Mode, block: int = BLOCK) -> F32:
    """q [n, H, hd], kv [m, hd], rows [n, k] (indices into kv, -1 = none), sink [H] -> [n, H, hd].

    The list is walked in blocks with a running maximum. Probabilities are rounded for the numerator only; the sink adds
    to the denominator, unscaled, and takes no part in the maximum. An empty list gives zeros.
    """
    n, heads, width = q.shape
    maximum = np.full((n, heads), FIRST_MAXIMUM)
    denominator = np.zeros((n, heads))
    numerator = np.zeros((n, heads, width))
    for start in range(0, rows.shape[1], block):
        listed = rows[:, start : start + block]
        keys = kv[np.maximum(listed, 0)].astype(np.float64)
        scores = f32(np.einsum("nhd,nkd->nhk", q, keys, optimize=True)) * np.float32(scale)
        scores = np.where(listed[:, None, :] < 0, -np.inf, scores).astype(np.float64)
        risen = np.maximum(maximum, scores.max(axis=2))
        rescale = np.exp(maximum - risen)
        probability = f32(np.exp(scores - risen[:, :, None]))
        denominator = denominator * rescale + probability.sum(axis=2, dtype=np.float64)
        rounded = store(probability, mode).astype(np.float64)
        numerator = numerator * rescale[:, :, None] + np.einsum("nhk,nkd->nhd", rounded, keys, optimize=True)
        maximum = risen
    with np.errstate(over="ignore"):  # an empty list: the sink's term is infinite and the result 0
        denominator = denominator + np.exp(sink.astype(np.float64) - maximum)
    return store(numerator / denominator[:, :, None], mode)
