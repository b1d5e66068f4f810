"""Top-k of index scores and candidate blocks. Ties go to the lower index; -0 and 0 are equal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .formats import F32


def best(scores: F32, k: int) -> NDArray[np.int64]:
    """Indices of the k best finite-or-+inf scores of one row, best first; fewer when fewer are above -inf."""
    order = np.argsort(-(scores + np.float32(0)), kind="stable")
    return order[scores[order] > -np.inf][:k]


def top_k(scores: F32, k: int) -> NDArray[np.int32]:
    """The k best of each row [n, m], sorted by position and filled up with -1: [n, min(k, m)]."""
    out = np.full((len(scores), min(k, scores.shape[1])), -1, dtype=np.int32)
    for row, line in enumerate(scores):
        chosen = np.sort(best(line, k))
        out[row, : len(chosen)] = chosen
    return out


def candidate_mask(scores: F32, visible: NDArray[np.integer], blocks: int, block_size: int) -> NDArray[np.bool_]:
    """Which entries [n, m] lie in the `blocks` best blocks of each row; scores are -inf where invisible.

    A block counts as its best entry; the block of the newest visible entry is always kept. Kept blocks are whole,
    entries that are not visible yet included.
    """
    n, m = scores.shape
    n_blocks = -(-m // block_size)
    padded = np.full((n, n_blocks * block_size), -np.inf, dtype=np.float32)
    padded[:, :m] = scores
    block_scores = padded.reshape(n, n_blocks, block_size).max(axis=2)
    kept = np.zeros((n, n_blocks), dtype=bool)
    for row in range(n):
        if visible[row] > 0:
            block_scores[row, (visible[row] - 1) // block_size] = np.inf
        kept[row, best(block_scores[row], blocks)] = True
    return np.repeat(kept, block_size, axis=1)[:, :m]
