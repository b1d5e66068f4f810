"""Objects as they are written: pages and frontiers made of a session's state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .format import BLOCK, ENCODER, FULL, PAGE, Header, Prefixes, checksum

if TYPE_CHECKING:
    from .. import _ext
    from .files import Files
    from .memory_files import MemoryFiles

Object = tuple[Header, NDArray[np.int32], NDArray[np.uint8]]
"""Header, token ids, payload."""


def new_pages(session: _ext.Session, prefixes: Prefixes, numerics: str, begin: int) -> Iterator[Object]:
    """The rows of all tokens from `begin` on."""
    while begin < len(prefixes):
        end = min(len(prefixes), (begin // BLOCK + 1) * BLOCK)
        yield _object(PAGE, begin, end, session.export_rows(begin, end), prefixes, numerics)
        begin = end


def new_frontier(session: _ext.Session, prefixes: Prefixes, numerics: str) -> Object:
    """What the session needs to go on from where it is, beside the rows."""
    at = len(prefixes)
    kind = FULL if session.ready else ENCODER
    return _object(kind, at, at, session.export_frontier(kind == ENCODER), prefixes, numerics)


def read_object(files: Files | MemoryFiles, name: bytes, kind: int) -> Object:
    """A stored object as it is now, checked."""
    header, payload = files.both(name, kind)
    return header, files.tokens(name) if kind == PAGE else np.zeros(0, np.int32), payload


def _object(
    kind: int, begin: int, end: int, payload: NDArray[np.uint8], prefixes: Prefixes, numerics: str
) -> Object:
    tokens = prefixes.tokens[begin:end]
    raw = np.frombuffer(tokens.tobytes(), np.uint8)
    header = Header(
        kind, begin, end, len(tokens), len(payload), checksum(payload), checksum(raw), prefixes.root,
        prefixes.node(begin), prefixes.start((end - 1) // BLOCK), prefixes.node(end), numerics, int(time.time()),
    )  # fmt: skip
    return header, tokens, payload
