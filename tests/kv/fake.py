"""A stand-in for the extension's session: its rows and frontiers are made of its tokens, so that any content can be
checked, and thousands of puts cost nothing."""

from __future__ import annotations

import hashlib
import random

import numpy as np
from numpy.typing import NDArray

from ds4v41.kvstore import KVStore, PutResult
from ds4v41.kvstore.format import FULL, PAGE, Prefixes

ROW = 64
ROOT = b"r" * 32


def rows(ids: NDArray[np.int32], begin: int, end: int) -> NDArray[np.uint8]:
    """Row p depends on all tokens up to p."""
    sums = np.cumsum(ids[:end].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), dtype=np.uint64)[begin:end]
    return np.repeat(sums, ROW // 8).view(np.uint8)


def frontier(ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    return np.frombuffer(hashlib.sha256(ids.astype("<i4").tobytes()).digest() * 40, np.uint8)


def chain(seed: int, n: int) -> NDArray[np.int32]:
    """Chains of few families, so that they share prefixes of several lengths."""
    base = np.random.default_rng(seed % 5).integers(0, 1000, 9000).astype(np.int32)
    own = np.random.default_rng(seed).integers(0, 1000, 9000).astype(np.int32)
    cut = random.Random(seed).randrange(0, 5000)
    return np.concatenate([base[:cut], own])[:n]


class FakeSession:
    ready = True
    draft_context = 0

    def __init__(self, ids: NDArray[np.int32]) -> None:
        self.ids = ids
        self.got: dict[int, tuple[int, bytes]] = {}

    def export_rows(self, begin: int, end: int) -> NDArray[np.uint8]:
        return rows(self.ids, begin, end)

    def export_frontier(self, encoder: bool) -> NDArray[np.uint8]:
        assert not encoder
        return frontier(self.ids)


def put(store: KVStore, ids: NDArray[np.int32]) -> PutResult:
    return store.put(FakeSession(ids), Prefixes(ROOT, ids), "test")  # type: ignore[arg-type]


def check_content(store: KVStore, ids: NDArray[np.int32]) -> int:
    """Everything that the store has of these tokens is right; returns how far that goes."""
    found = store.find(Prefixes(ROOT, ids))
    for page in found.pages:
        stored = store._holder(page.id)._files.tokens(page.id)
        n = min(len(stored), len(ids) - page.begin)
        if page.end <= found.whole:
            np.testing.assert_array_equal(stored[:n], ids[page.begin : page.begin + n])
            payload = store._holder(page.id)._files.payload(page.id, PAGE)
            np.testing.assert_array_equal(payload, rows(ids, page.begin, page.end))
    for position, item in found.frontiers.items():
        np.testing.assert_array_equal(store._holder(item.id)._files.payload(item.id, FULL), frontier(ids[:position]))
    return found.reach
