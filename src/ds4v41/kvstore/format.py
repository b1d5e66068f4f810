"""The files of a store, byte by byte (docs/formats-store.md): header, token ids, payload; and the names of prefixes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .. import _ext
from ..errors import StoreError

MAGIC = b"DS4V41KV"
VERSION = 1
HEADER_BYTES = 256
BLOCK = 2048
"""Pages never cross a multiple of this many tokens."""

PAGE, FULL, ENCODER, SESSION = 1, 2, 3, 4
KIND_NAMES = {PAGE: "page", FULL: "full", ENCODER: "encoder", SESSION: "session"}

FRONTIER_HEADER_BYTES = 64
_DRAFTER_AT, _DRAFTER_HEADER = 40, struct.Struct("<QII")
_HEADER = struct.Struct("<8sIIIIQQQQQ32s32s32s32s40sQQ")
assert _HEADER.size == HEADER_BYTES - 8


def checksum(data: bytes | NDArray[np.uint8]) -> int:
    """XXH64 with seed 0."""
    return int(_ext.xxh64(np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data))


def root_id(weights_id: bytes, numerics_id: str, layout: Sequence[object]) -> bytes:
    """32 bytes that name everything a state depends on besides its tokens: weights, arithmetic, row layout, format."""
    text = f"{VERSION}|{numerics_id}|{'|'.join(map(str, layout))}"
    return hashlib.blake2b(weights_id + text.encode(), digest_size=32, person=b"ds4v41 root").digest()


class Prefixes:
    """Names of the prefixes of a token list: node(p) is 32 bytes that depend on the root and the first p tokens.

    node(0) is the root; within a block of 2,048 tokens, node(p) = BLAKE2b(name of the block's start, its tokens up to
    p). So a name does not depend on how the tokens were cut into pages.
    """

    def __init__(self, root: bytes, tokens: NDArray[np.int32]) -> None:
        self.tokens = np.ascontiguousarray(tokens, dtype="<i4")
        self._starts = [root]
        self._names: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def root(self) -> bytes:
        """The name of the empty prefix."""
        return self._starts[0]

    def start(self, block: int) -> bytes:
        """The name of the prefix in front of this block."""
        while len(self._starts) <= block:
            at = (len(self._starts) - 1) * BLOCK
            self._starts.append(_name(self._starts[-1], self.tokens[at : at + BLOCK]))
        return self._starts[block]

    def node(self, position: int) -> bytes:
        """The name of the first `position` tokens."""
        if position % BLOCK == 0:
            return self.start(position // BLOCK)
        if position not in self._names:
            block = (position - 1) // BLOCK
            self._names[position] = _name(self.start(block), self.tokens[block * BLOCK : position])
        return self._names[position]


def _name(start: bytes, tokens: NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(start + tokens.tobytes(), digest_size=32, person=b"ds4v41 prefix").digest()


def page_id(parent: bytes, node: bytes) -> bytes:
    """The name of a page: where it begins and where it ends."""
    return hashlib.blake2b(parent + node, digest_size=32, person=b"ds4v41 page").digest()


def frontier_id(node: bytes, kind: int) -> bytes:
    """The name of a frontier: where it is, and its kind."""
    return hashlib.blake2b(node + bytes([kind]), digest_size=32, person=b"ds4v41 frontier").digest()


def drafter_rows(read: Callable[[int, int], bytes], payload_bytes: int) -> int:
    """Rows of drafter state in a full frontier. read(offset, n): bytes of its payload."""
    (size,) = struct.unpack("<I", read(_DRAFTER_AT, 4))
    if not _DRAFTER_HEADER.size <= size <= payload_bytes - FRONTIER_HEADER_BYTES:
        return 0
    _, _, rows = _DRAFTER_HEADER.unpack(read(payload_bytes - size, _DRAFTER_HEADER.size))
    return int(rows)


@dataclass(frozen=True, slots=True)
class Header:
    """The first 256 bytes of a file."""

    kind: int
    begin: int
    end: int
    n_tokens: int
    payload_bytes: int
    payload_sum: int
    tokens_sum: int
    root: bytes
    parent: bytes
    block: bytes
    """Name of the prefix in front of the block that the end lies in."""
    node: bytes
    numerics: str
    created: int = 0
    extra: int = 0
    """session files: bytes of the rows in front of the frontier."""
    source: str = field(default="", compare=False)

    @property
    def id(self) -> bytes:
        """The name that the file has in a store."""
        return page_id(self.parent, self.node) if self.kind == PAGE else frontier_id(self.node, self.kind)

    @property
    def payload_offset(self) -> int:
        """Where the payload begins."""
        return HEADER_BYTES + 4 * self.n_tokens

    @property
    def file_bytes(self) -> int:
        """Exact size of the file."""
        return self.payload_offset + self.payload_bytes

    def pack(self) -> bytes:
        """256 bytes, the last 8 their checksum."""
        numerics = self.numerics.encode()
        if len(numerics) > 40:
            raise StoreError(f"numerics id {self.numerics!r}: expected at most 40 bytes")
        body = _HEADER.pack(
            MAGIC, VERSION, self.kind, HEADER_BYTES, self.n_tokens, self.begin, self.end, self.payload_bytes,
            self.payload_sum, self.tokens_sum, self.root, self.parent, self.block, self.node, numerics, self.created,
            self.extra,
        )  # fmt: skip
        return body + struct.pack("<Q", checksum(body))

    @classmethod
    def unpack(cls, data: bytes, source: str) -> Self:
        """Raises StoreError, naming `source`, for anything but a header of this version."""
        if len(data) < HEADER_BYTES:
            raise StoreError(f"{source}: expected a header of {HEADER_BYTES} bytes, found {len(data)}")
        body, (total,) = data[: _HEADER.size], struct.unpack("<Q", data[_HEADER.size : HEADER_BYTES])
        magic, version, kind, size, n, begin, end, payload, psum, tsum, root, parent, block, node, num, made, extra = (
            _HEADER.unpack(body)
        )
        if magic != MAGIC:
            raise StoreError(f"{source}: not a file of a store (it begins with {magic!r})")
        if checksum(body) != total:
            raise StoreError(f"{source}: the header is damaged (checksum)")
        if version != VERSION or size != HEADER_BYTES or kind not in KIND_NAMES:
            raise StoreError(f"{source}: version {version}, kind {kind}; this program reads version {VERSION}")
        return cls(
            kind, begin, end, n, payload, psum, tsum, root, parent, block, node, num.rstrip(b"\0").decode(), made,
            extra, source,
        )  # fmt: skip
