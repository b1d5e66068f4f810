"""The objects of a store that lives in memory only: the same interface as `Files`, without a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreError
from .format import Header, drafter_rows

Stored = tuple[Header, NDArray[np.int32], NDArray[np.uint8]]


class MemoryFiles:
    """Objects as arrays."""

    def __init__(self) -> None:
        self._objects: dict[bytes, Stored] = {}
        self._aside: dict[Path, Stored] = {}
        self.written = 0

    def create(self) -> None:
        """Nothing to make."""

    def why_not_writable(self) -> str:
        """Memory can be written to."""
        return ""

    def write(self, header: Header, tokens: NDArray[np.int32], payload: NDArray[np.uint8]) -> Path:
        """Keep a copy aside."""
        key = Path(f"{len(self._aside)}-{header.id.hex()}")
        self._aside[key] = (header, tokens.copy(), payload)
        self.written += header.file_bytes
        return key

    def publish(self, aside: Path, header: Header) -> None:
        """Make it visible."""
        self._objects[header.id] = self._aside.pop(aside)

    def sync(self) -> None:
        """Nothing to wait for."""

    def folder_bytes(self) -> int:
        """No folders."""
        return 0

    def discard(self, aside: Path) -> None:
        """Forget what was written aside."""
        self._aside.pop(aside, None)

    def get(self, name: bytes) -> Stored:
        """Raises StoreError when it is gone."""
        try:
            return self._objects[name]
        except KeyError:
            raise StoreError(f"{name.hex()[:16]}: no longer in memory") from None

    def tokens(self, name: bytes) -> NDArray[np.int32]:
        """The token ids of a page."""
        return self.get(name)[1]

    def payload(self, name: bytes, kind: int) -> NDArray[np.uint8]:
        """The payload of an object."""
        return self.get(name)[2]

    def drafter_rows(self, name: bytes) -> int:
        """Rows of drafter state that a full frontier holds."""
        payload = self.get(name)[2]
        return drafter_rows(lambda at, n: payload[at : at + n].tobytes(), len(payload))

    def both(self, name: bytes, kind: int) -> tuple[Header, NDArray[np.uint8]]:
        """Header and payload of an object."""
        header, _, payload = self.get(name)
        return header, payload

    def remove(self, name: bytes, kind: int) -> None:
        """Forget an object."""
        self._objects.pop(name, None)

    def walk(self) -> Iterator[tuple[Path, object]]:
        """Nothing on disk."""
        return iter(())

    def stale(self) -> Iterator[Path]:
        """Nothing is left behind."""
        return iter(())
