"""States of conversations on disk and in memory, found again by their tokens."""

from .results import PruneResult, PutResult, StoreStats, VerifyResult
from .store import KVStore

__all__ = ["KVStore", "PruneResult", "PutResult", "StoreStats", "VerifyResult"]
