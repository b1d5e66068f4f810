"""Hyper-connections: the residual stream of C copies and its mixing coefficients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .formats import F32, Mode, f32, store
from .norm import inverse_rms


class Coefficients(NamedTuple):
    """Mixing coefficients of n rows."""

    pre: F32  # [n, C] weights of the copies in the NEXT collapse
    post: F32  # [n, C] weight of the sub-layer's output in each copy
    comb: F32  # [n, C, C] comb[row, source copy, target copy]


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Logistic function in float64, without overflow."""
    return np.exp(-np.logaddexp(0, -x.astype(np.float64)))


def sinkhorn(m: np.ndarray, iterations: int, hc_eps: float) -> F32:
    """Make [n, C, C] matrices nearly doubly stochastic: softmax of rows first, a column step last."""
    wide = np.exp(m.astype(np.float64) - m.max(axis=-1, keepdims=True))
    comb = wide / wide.sum(axis=-1, keepdims=True) + hc_eps
    comb /= comb.sum(axis=-2, keepdims=True) + hc_eps
    for _ in range(iterations - 1):
        comb /= comb.sum(axis=-1, keepdims=True) + hc_eps
        comb /= comb.sum(axis=-2, keepdims=True) + hc_eps
    return f32(comb)


def split(z: F32, scale: F32, base: F32, copies: int, iterations: int, hc_eps: float) -> Coefficients:
    """Coefficients from the normalised mixer outputs z [n, (2 + C) * C]; scale [3], base [(2 + C) * C]."""
    c = copies
    scaled = z.astype(np.float64) * np.repeat(scale, [c, c, c * c]) + base
    pre = f32(sigmoid(scaled[:, :c]) + hc_eps)
    post = f32(2 * sigmoid(scaled[:, c : 2 * c]))
    return Coefficients(pre, post, sinkhorn(f32(scaled[:, 2 * c :]).reshape(-1, c, c), iterations, hc_eps))


def coefficients(
    stream: F32, fn: F32, scale: F32, base: F32, *, eps: float, iterations: int, hc_eps: float
) -> Coefficients:
    """Coefficients of stream [n, C, D] with mixer fn [(2 + C) * C, C * D].

    The product is taken on the un-normalised values; one over their root mean square is applied to its result.
    """
    flat = stream.reshape(len(stream), -1)
    z = f32((flat.astype(np.float64) @ fn.T.astype(np.float64)) * inverse_rms(flat, eps))
    return split(z, scale, base, stream.shape[1], iterations, hc_eps)


def collapse(stream: F32, mix: F32, mode: Mode) -> F32:
    """Weighted sum of the copies: stream [n, C, D], mix [n, C] -> [n, D]."""
    return store(np.einsum("nj,njd->nd", mix, stream, dtype=np.float64), mode)


def expand(y: F32, stream: F32, post: F32, comb: F32, mode: Mode) -> F32:
    """Sub-layer output y [n, D] and the mixed old copies -> new stream [n, C, D]."""
    mixed = np.einsum("njk,njd->nkd", comb, stream, dtype=np.float64)
    return store(post.astype(np.float64)[:, :, None] * y[:, None, :] + mixed, mode)
