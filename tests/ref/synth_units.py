"""Made-up weights in plain numpy: which bytes the units of a tensor have (`metal/synth_units.h`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

VALUES, BLOCK, Q4_K, ROW = range(4)
HEAD_WORDS = 65536

U32 = NDArray[np.uint32]


def mix(x: U32) -> U32:
    """A hash of 32 bits, one to one."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return np.asarray(x ^ (x >> np.uint32(16)), np.uint32)


def words(key: int, units: NDArray[np.uint64], which: NDArray[np.int64]) -> U32:
    """Random words [units, words]."""
    low, high = (units & np.uint64(0xFFFFFFFF)).astype(np.uint32), (units >> np.uint64(32)).astype(np.uint32)
    base = mix(mix(high ^ np.uint32(key)) + low)
    step = np.uint32(0x9E3779B9) * (which.astype(np.uint32) + np.uint32(1))
    return mix(base[:, None] + step[None, :])


def as_bytes(values: U32, n: int) -> NDArray[np.uint8]:
    """The low n bytes of every word, lowest first, side by side."""
    return np.ascontiguousarray(values.astype("<u4")).view(np.uint8).reshape(*values.shape, 4)[..., :n]


def units(
    kind: int, unit_bytes: int, heads: int, codes: int, key: int, table: U32, first: int, n: int
) -> NDArray[np.uint8]:
    """Units first .. first + n - 1, [n, unit_bytes]."""
    number = np.arange(first, first + n, dtype=np.uint64)
    if kind == VALUES:
        return as_bytes(table[words(key, number, np.arange(1))[:, 0] >> np.uint32(20)], unit_bytes)
    random = as_bytes(words(key, number, np.arange(-(-codes // 4))), 4).reshape(n, -1)[:, :codes]
    body = table[256:][random].astype(np.uint8)
    if kind == ROW:
        tail = table[words(key, number, HEAD_WORDS + np.arange(heads)) >> np.uint32(24)]
        return np.concatenate([body, tail.astype(np.uint8)], axis=1)
    head = words(key, number, HEAD_WORDS + np.arange(3))
    chosen = table[head[:, 0] >> np.uint32(24)]
    if kind == BLOCK:
        return np.concatenate([as_bytes(chosen, heads), body], axis=1)
    low, high = (40 + (as_bytes(head[:, i], 4).astype(np.uint32) * 17 >> 8) for i in (1, 2))
    both, rest = low | high >> 4 << 6, (high & 15) | (high & 15) << 4
    scales = np.concatenate([both, both, rest], axis=1).astype(np.uint8)
    return np.concatenate([as_bytes(chosen, 4), scales, body], axis=1)
