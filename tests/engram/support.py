"""Tables in files, and what plain positional reads give for them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4v41 import _ext

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """A table on disk. Without `scales`, codes and scales are in one row, as in GGUF."""

    n_rows: int
    dim: int
    codes: Path
    offset: int = 0
    scales: Path | None = None
    scale_offset: int = 0

    @property
    def row_bytes(self) -> int:
        return self.dim + self.dim // 32

    @property
    def spec(self) -> tuple[int, int, str, int, int, str, int, int]:
        """As `_ext.Engram` wants it."""
        if self.scales is None:
            return (self.n_rows, self.dim, str(self.codes), self.offset, self.row_bytes, "", 0, 0)
        scales = (str(self.scales), self.scale_offset, self.dim // 32)
        return (self.n_rows, self.dim, str(self.codes), self.offset, self.dim, *scales)

    def plain(self, rows: I64) -> U8:
        """The rows by one pread each: [n, row bytes]."""
        parts = [_pread(self.codes, self.offset, self.row_bytes if self.scales is None else self.dim, rows)]
        if self.scales is not None:
            parts.append(_pread(self.scales, self.scale_offset, self.dim // 32, rows))
        return np.concatenate(parts, axis=1)


def _pread(path: Path, offset: int, size: int, rows: I64) -> U8:
    with open(path, "rb") as file:
        data = [os.pread(file.fileno(), size, offset + int(row) * size) for row in rows]
    return np.frombuffer(b"".join(data), np.uint8).reshape(len(rows), size)


def values(rng: np.random.Generator, shape: tuple[int, int]) -> U8:
    """Bytes that are numbers both as codes and as scales."""
    return rng.integers(0, 0x7F, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)


def make_table(folder: Path, name: str, n_rows: int, dim: int = 32, *, split: bool = False, offset: int = 0) -> Table:
    """A table of random rows behind `offset` bytes of something else, which are no rows."""
    rng = np.random.default_rng(sum(name.encode()) + n_rows)
    codes, scales = values(rng, (n_rows, dim)), values(rng, (n_rows, dim // 32))
    front, path = b"\xff" * offset, folder / name
    if not split:
        path.write_bytes(front + np.concatenate([codes, scales], axis=1).tobytes())
        return Table(n_rows, dim, path, offset)
    path.write_bytes(front + codes.tobytes())
    path.with_suffix(".scales").write_bytes(front + scales.tobytes())
    return Table(n_rows, dim, path, offset, path.with_suffix(".scales"), offset)


def engram(*tables: Table, **options: Any) -> _ext.Engram:
    """The extension's object for these tables."""
    return _ext.Engram([table.spec for table in tables], **options)


def read(rows_of: _ext.Engram, table: int, rows: Any, urgency: str = "step") -> U8:
    """Ask and wait."""
    got, _ = rows_of.request(table, np.asarray(rows, np.int64), urgency).wait()
    return np.asarray(got)
