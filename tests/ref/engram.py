"""Engram: n-gram hashing into tables, and the layer that reads them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .formats import F32, Mode, f32, store
from .hc import sigmoid
from .linear import Weight, linear
from .norm import inverse_rms

I64 = NDArray[np.int64]
GATE_FLOOR = 1e-6


class HashPlan(NamedTuple):
    """Hash parameters of one Engram layer; columns are ordered by n-gram size 2..N, then head."""

    multipliers: I64  # [N]
    primes: I64  # [N - 1, heads]
    offsets: I64  # [(N - 1) * heads], first table row of each column
    n_rows: int  # table height, the sum of the primes


def layer_multipliers(layer: int, vocabulary: int, max_ngram: int) -> I64:
    """Odd random multipliers of a layer; `vocabulary` is the number of compressed ids."""
    bound = (2**63 - 1) // vocabulary // 2
    draws = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return 2 * draws + 1


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def hash_plans(layers: list[int], vocabulary: int, table_size: int, max_ngram: int, heads: int) -> list[HashPlan]:
    """Plans of all Engram layers. No prime is used twice; the search restarts at `table_size` for every n-gram size."""
    taken: set[int] = set()
    plans = []
    for layer in layers:
        primes = np.zeros((max_ngram - 1, heads), dtype=np.int64)
        for size in range(max_ngram - 1):
            candidate = table_size
            for head in range(heads):
                while candidate in taken or not _is_prime(candidate):
                    candidate += 1
                taken.add(candidate)
                primes[size, head] = candidate
        ends = np.cumsum(primes.ravel())
        offsets = np.concatenate([[0], ends[:-1]])
        plans.append(HashPlan(layer_multipliers(layer, vocabulary, max_ngram), primes, offsets, int(ends[-1])))
    return plans


def hash_rows(ids: I64, plan: HashPlan, pad: int, alive: NDArray[np.bool_] | None = None) -> I64:
    """Table rows [n, columns] of compressed ids [n] that start at position 0.

    A look-back that leaves the row or meets a dead position (`alive` False) gives `pad`, as do all further ones.
    """
    n = len(ids)
    reach = np.ones(n, dtype=bool) if alive is None else alive.copy()
    mixed = np.where(reach, ids, pad) * plan.multipliers[0]
    columns: list[I64] = []
    for back in range(1, len(plan.multipliers)):
        shifted = np.full(n, pad, dtype=np.int64)
        shifted[back:] = ids[: n - back] if back < n else []
        inside = np.arange(n) >= back
        if alive is not None:
            earlier = np.zeros(n, dtype=bool)
            earlier[back:] = alive[: max(n - back, 0)]
            reach = reach & (earlier | ~inside)
        mixed = mixed ^ (np.where(reach & inside, shifted, pad) * plan.multipliers[back])
        columns.extend(mixed % prime for prime in plan.primes[back - 1])
    return np.stack(columns, axis=1) + plan.offsets


def gates(stream: F32, keys: F32, q_weight: F32, k_weight: F32, eps: float) -> F32:
    """Gate of each copy, [n, C]: stream, keys [n, C, D]; q_weight, k_weight [C, D]."""
    weight = q_weight.astype(np.float64) * k_weight
    dot = (stream.astype(np.float64) * weight * keys).sum(axis=2)
    dot = dot * inverse_rms(stream, eps)[..., 0] * inverse_rms(keys, eps)[..., 0] * stream.shape[2] ** -0.5
    return f32(sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), GATE_FLOOR)), dot)))


def engram(
    stream: F32,
    rows: F32,
    wkv: Weight,
    q_weight: F32,
    k_weight: F32,
    eps: float,
    mode: Mode,
    alive: NDArray[np.bool_] | None = None,
) -> F32:
    """Add gated table content to the stream [n, C, D]; rows [n, columns * row width] are the rows read, side by side.

    The projection gives one key per copy and one value for all; dead positions pass unchanged.
    """
    n, copies, width = stream.shape
    out = linear(rows, wkv, mode).reshape(n, copies + 1, width)
    keys, value = out[:, :copies], out[:, copies:]
    gate = gates(stream, keys, q_weight, k_weight, eps)
    if alive is not None:
        gate = np.where(alive[:, None], gate, np.float32(0))
    return store(stream + gate.astype(np.float64)[:, :, None] * value, mode)
