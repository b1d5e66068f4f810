"""Index keys, queries, head weights and scores: which compressed rows a query wants."""

from __future__ import annotations

import numpy as np

from .formats import F32, Mode, f32, quantise_q4i, store
from .linear import Weight, linear
from .norm import rms_norm
from .rope import rotate_tail


def index_keys(latent: F32, wk: Weight, k_norm: F32, cos: F32, sin: F32, eps: float, mode: Mode) -> F32:
    """Keys [m, dim] from un-rotated latents [m, hd]; cos, sin at the first token of each group."""
    key = rms_norm(linear(latent, wk, mode), k_norm, eps, mode)
    return quantise_q4i(rotate_tail(key, cos, sin, mode)).values


def index_queries(q_latent: F32, wq_b: Weight, heads: int, cos: F32, sin: F32, mode: Mode) -> F32:
    """Queries [n, heads, dim] from the attention's low-rank query [n, rank]."""
    query = linear(q_latent, wq_b, mode).reshape(len(q_latent), heads, -1)
    return quantise_q4i(rotate_tail(query, cos, sin, mode)).values


def head_weights(x: F32, projection: Weight, heads: int, dim: int, mode: Mode) -> F32:
    """Weight of each index head, [n, heads]; may be negative."""
    return store(linear(x, projection, mode) * np.float32(dim**-0.5 * heads**-0.5), mode)


def index_scores(q: F32, k: F32, weights: F32, mode: Mode) -> F32:
    """Scores [n, m] of q [n, heads, dim] against k [m, dim].

    Every step is rounded: the dot products, the weighted rectified terms, and the sum over heads.
    """
    dots = store(np.einsum("nhd,md->nhm", q.astype(np.float64), k.astype(np.float64), optimize=True), mode)
    terms = store(np.maximum(dots, 0) * weights[:, :, None], mode)
    return store(terms.sum(axis=1, dtype=np.float64), mode)


def mask_invisible(scores: F32, visible: np.ndarray) -> F32:
    """Scores [n, m] with -inf from entry visible[row] on."""
    hidden = np.arange(scores.shape[1])[None, :] >= np.asarray(visible)[:, None]
    return f32(np.where(hidden, -np.inf, scores))
