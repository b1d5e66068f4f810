"""Constants of the Engram n-gram hash: bucket primes and hash multipliers.

They follow from a handful of config keys and are part of the trained model: another prime or multiplier reads
other table rows.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_SMALL_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_INT64_MAX = 2**63 - 1
_SEED_PER_LAYER = 10007


def is_prime(n: int) -> bool:
    """Exact for n < 3.2e23 (Miller-Rabin with the first twelve primes as witnesses)."""
    if n < 2:
        return False
    for p in _SMALL_PRIMES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(n, witness, odd, twos) for witness in _SMALL_PRIMES)


def _passes(n: int, witness: int, odd: int, twos: int) -> bool:
    x = pow(witness, odd, n)
    if x in (1, n - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % n
        if x == n - 1:
            return True
    return False


@lru_cache(maxsize=64)
def bucket_primes(start: int, n_layers: int, n_columns: int) -> tuple[tuple[int, ...], ...]:
    """The prime of every column of every Engram layer, `[n_layers][n_columns]`.

    Columns run through n-gram sizes, then heads. Every (layer, size) looks for primes from `start` upwards and skips
    those taken before, which is the same as one ascending run of consecutive primes over all layers.
    """
    primes: list[int] = []
    candidate = start
    while len(primes) < n_layers * n_columns:
        if is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return tuple(tuple(primes[i * n_columns : (i + 1) * n_columns]) for i in range(n_layers))


@lru_cache(maxsize=1024)
def hash_multipliers(layer: int, n: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """`n` odd multipliers of one layer, drawn so that (compressed id * multiplier) stays below 2^63."""
    bound = _INT64_MAX // compressed_vocab_size // 2
    draws = np.random.default_rng(_SEED_PER_LAYER * layer).integers(0, bound, size=n, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)
