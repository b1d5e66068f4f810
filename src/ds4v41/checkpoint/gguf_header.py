"""The GGUF container: a bounded, lazy parser of the header, and nothing about any model.

Only version 3, little endian. The parser reads the file from the front in pieces, never more than the header needs,
and touches no tensor data, so a file of hundreds of gigabytes opens at once. Everything that a header claims is
checked against the file size before it is believed: counts, lengths, shapes, offsets. A header whose structure is
broken stops the parser with one CheckpointError; faults of single tensors are collected.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .files import open_error, require_file

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 256 << 20
MAX_METADATA = 65_536
MAX_TENSORS = 65_536
MAX_STRINGS = 1 << 22
MAX_NAME_BYTES = 1024
MAX_DIMS = 4

_READ_PIECE = 1 << 20
# Value types of metadata, as the container defines them: struct format and numpy type of the fixed-size ones.
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, tuple[str, str]] = {
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    _BOOL: ("<B", "u1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}


@lru_cache(maxsize=1)
def type_table() -> dict[int, tuple[str, int, int]]:
    """Tensor types: id -> (name, elements of a block, bytes of it). From the `gguf` package, loaded when needed."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise CheckpointError("GGUF files need the Python package `gguf`: pip install 'ds4v41[gguf]'") from error
    return {int(kind): (kind.name, block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()}


@lru_cache(maxsize=1)
def type_ids() -> dict[str, int]:
    """Tensor types: name -> id."""
    return {name: kind for kind, (name, _, _) in type_table().items()}


def row_bytes(type_name: str, n_columns: int) -> int:
    """Bytes of a row of `n_columns` elements; the caller has checked that it is a multiple of the block."""
    _, block, size = type_table()[type_ids()[type_name]]
    return n_columns // block * size


class StringArray:
    """An array of strings in a header, decoded when it is asked for. `tolist()` decodes all of it."""

    def __init__(self, raw: bytes, count: int) -> None:
        self._raw, self._count = raw, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        position, raw = 0, self._raw
        for _ in range(self._count):
            (length,) = struct.unpack_from("<Q", raw, position)
            position += 8
            yield raw[position : position + length].decode("utf-8")
            position += length

    def tolist(self) -> list[str]:
        """All strings. Raises UnicodeDecodeError when one is not UTF-8."""
        return list(self)

    def __repr__(self) -> str:
        return f"StringArray({self._count} strings, {len(self._raw)} bytes)"


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """One metadata value: `value` is an int, float, bool, str, numpy array or StringArray."""

    value: Any
    kind: int
    """Value type id; for arrays that of the elements."""
    is_array: bool
    offset: int
    """Where the value begins in the file."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the header; `offset` is absolute, `shape` outermost first (the file has it the other way round)."""

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    header_offset: int


@dataclass(slots=True)
class GgufHeader:
    """What a header says, checked against the file. `problems` are the faults of single tensors and keys."""

    path: Path
    stat: os.stat_result
    """State of the file when the header was read."""
    alignment: int
    data_start: int
    metadata: dict[str, MetadataValue]
    tensors: list[TensorInfo]
    problems: list[str] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """The bare value of a key."""
        found = self.metadata.get(key)
        return default if found is None else found.value

    @property
    def architecture(self) -> str:
        """`general.architecture`, "" when absent."""
        value = self.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.stat.st_size

    @property
    def data_end(self) -> int:
        """End of the last tensor, without padding."""
        return max((t.offset + t.nbytes for t in self.tensors), default=self.data_start)


class _Cursor:
    """Reads the front of the file piece by piece and refuses to run past the end."""

    def __init__(self, path: Path, descriptor: int, file_bytes: int) -> None:
        self.path, self.position = path, 0
        self._descriptor, self._file_bytes = descriptor, file_bytes
        self._buffer = bytearray()

    def fail(self, what: str, offset: int | None = None) -> CheckpointError:
        where = self.position if offset is None else offset
        text = f"{self.path}: byte {where}: {what}. The file is damaged or not complete: download or convert it again."
        return CheckpointError(text, [text])

    def need(self, n_bytes: int, what: str) -> int:
        """Makes `n_bytes` available and steps over them; returns where they begin in `buffer`."""
        start, end = self.position, self.position + n_bytes
        if n_bytes > self._file_bytes - start:
            raise self.fail(f"{what} needs {n_bytes} bytes, but the file ends after {self._file_bytes - start} more")
        if end > MAX_HEADER_BYTES:
            raise self.fail(f"{what} would make the header larger than {MAX_HEADER_BYTES} bytes")
        while len(self._buffer) < end:
            piece = os.pread(self._descriptor, max(_READ_PIECE, end - len(self._buffer)), len(self._buffer))
            if not piece:
                raise self.fail(f"{what}: the file became shorter while it was read", len(self._buffer))
            self._buffer += piece
        self.position = end
        return start

    def unpack(self, form: str, what: str) -> Any:
        start = self.need(struct.calcsize(form), what)
        return struct.unpack_from(form, self._buffer, start)[0]

    def raw(self, n_bytes: int, what: str) -> bytes:
        start = self.need(n_bytes, what)
        return bytes(memoryview(self._buffer)[start : start + n_bytes])

    def text(self, limit: int, what: str) -> str:
        start = self.position
        length = self.unpack("<Q", f"length of {what}")
        if length > limit:
            raise self.fail(f"{what} claims {length} bytes, at most {limit} are allowed", start)
        try:
            return self.raw(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 ({error.reason})", start) from None

    def skip_strings(self, count: int, what: str) -> bytes:
        """Steps over `count` strings; returns their bytes, lengths included."""
        begin = position = self.position
        unpack, buffer = struct.Struct("<Q").unpack_from, self._buffer
        for _ in range(count):  # a vocabulary has a quarter of a million strings, so this loop is kept short
            if position + 8 > len(buffer):
                self.position = position
                self.need(8, what)
            length = unpack(buffer, position)[0]
            position += 8 + length
            if position > len(buffer):
                self.position = position - length
                self.need(length, what)
        self.position = position
        return bytes(memoryview(buffer)[begin:position])

    @property
    def left(self) -> int:
        return self._file_bytes - self.position


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Parse the header of a GGUF file. Raises CheckpointError when it is no GGUF file or its structure is broken."""
    file = Path(path)
    descriptor = _open_regular(file)
    try:
        state = os.fstat(descriptor)
        return _parse(_Cursor(file, descriptor, state.st_size), state)
    finally:
        os.close(descriptor)


def _open_regular(file: Path) -> int:
    """Opens without waiting on pipes and devices: anything but a regular file is refused before it is opened."""
    require_file(file)
    try:
        return os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise open_error(file, error) from error


def _parse(cursor: _Cursor, state: os.stat_result) -> GgufHeader:
    magic = cursor.raw(min(4, state.st_size), "magic")
    if magic != MAGIC:
        raise CheckpointError(f"{cursor.path}: not a GGUF file (begins with {magic!r}, expected {MAGIC!r})")
    version = cursor.unpack("<I", "version")
    if version != VERSION:
        big = struct.unpack(">I", struct.pack("<I", version))[0] == VERSION
        found = "a big-endian file" if big else f"version {version}"
        raise CheckpointError(f"{cursor.path}: GGUF version 3, little endian, is expected; found {found}")
    n_tensors = _count(cursor, "tensor count", MAX_TENSORS, 24)
    n_metadata = _count(cursor, "metadata count", MAX_METADATA, 13)
    problems: list[str] = []
    metadata: dict[str, MetadataValue] = {}
    for _ in range(n_metadata):
        at = cursor.position
        key = cursor.text(MAX_NAME_BYTES, "metadata key")
        if key in metadata:
            problems.append(f"{cursor.path}: byte {at}: metadata key {key!r} appears twice")
        metadata[key] = _read_value(cursor, key)
    alignment = _alignment(cursor, metadata)
    raw = [_read_info(cursor) for _ in range(n_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    header = GgufHeader(cursor.path, state, alignment, data_start, metadata, [], problems)
    _check_tensors(header, raw)
    return header


def _count(cursor: _Cursor, what: str, limit: int, least_bytes: int) -> int:
    at = cursor.position
    count = int(cursor.unpack("<Q", what))
    if count > limit or count * least_bytes > cursor.left:
        raise cursor.fail(f"{what} {count} cannot be true for a file of this size (limit {limit})", at)
    return count


def _read_value(cursor: _Cursor, key: str) -> MetadataValue:
    kind = cursor.unpack("<I", f"type of {key}")
    at = cursor.position
    if kind == _STRING:
        return MetadataValue(cursor.text(MAX_HEADER_BYTES, f"value of {key}"), kind, False, at)
    if kind == _ARRAY:
        return _read_array(cursor, key, at)
    if kind not in _SCALARS:
        raise cursor.fail(f"metadata key {key!r} has the unknown value type {kind}", at - 4)
    value = cursor.unpack(_SCALARS[kind][0], f"value of {key}")
    return MetadataValue(bool(value) if kind == _BOOL else value, kind, False, at)


def _read_array(cursor: _Cursor, key: str, at: int) -> MetadataValue:
    kind = cursor.unpack("<I", f"element type of {key}")
    if kind != _STRING and kind not in _SCALARS:
        raise cursor.fail(f"metadata array {key!r} has the unsupported element type {kind}", at)
    what = f"array {key}"
    item = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind][0])
    limit = MAX_STRINGS if kind == _STRING else MAX_HEADER_BYTES // item
    count = _count(cursor, f"length of {what}", limit, item)
    if kind == _STRING:
        return MetadataValue(StringArray(cursor.skip_strings(count, what), count), kind, True, at)
    values: npt.NDArray[Any] = np.frombuffer(cursor.raw(count * item, what), dtype=_SCALARS[kind][1])
    return MetadataValue(values, kind, True, at)


def _alignment(cursor: _Cursor, metadata: dict[str, MetadataValue]) -> int:
    found = metadata.get("general.alignment")
    if found is None:
        return DEFAULT_ALIGNMENT
    value = found.value
    if found.is_array or not isinstance(value, int) or not 8 <= value <= 1 << 24 or value & (value - 1):
        raise cursor.fail(f"general.alignment is {value!r}, expected a power of two from 8 to {1 << 24}", found.offset)
    return value


@dataclass(frozen=True, slots=True)
class _RawInfo:
    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int
    header_offset: int


def _read_info(cursor: _Cursor) -> _RawInfo:
    at = cursor.position
    name = cursor.text(MAX_NAME_BYTES, "tensor name")
    n_dims = cursor.unpack("<I", f"dimension count of tensor {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} claims {n_dims} dimensions, expected 1 to {MAX_DIMS}", at)
    dims = tuple(cursor.unpack("<Q", f"shape of tensor {name!r}") for _ in range(n_dims))
    type_id = cursor.unpack("<I", f"type of tensor {name!r}")
    return _RawInfo(name, dims, type_id, cursor.unpack("<Q", f"offset of tensor {name!r}"), at)


def _check_tensors(header: GgufHeader, raw: list[_RawInfo]) -> None:
    seen: set[str] = set()
    for info in raw:
        where = f"{header.path}: byte {info.header_offset}: tensor {info.name!r}"
        if info.name in seen:
            header.problems.append(f"{where} appears twice")
            continue
        seen.add(info.name)
        checked = _checked(header, info, where)
        if isinstance(checked, str):
            header.problems.append(f"{where} {checked}")
        else:
            header.tensors.append(checked)
    _check_overlap(header)


def _checked(header: GgufHeader, info: _RawInfo, where: str) -> TensorInfo | str:
    """The tensor, or what is wrong with it."""
    known = type_table().get(info.type_id)
    if known is None:
        return f"has the unknown type id {info.type_id}"
    name, block, block_bytes = known
    elements = prod(info.dims)
    if 0 in info.dims or elements >= 1 << 62:
        return f"has the impossible shape {list(info.dims)}"
    if info.dims[0] % block:
        return f"has rows of {info.dims[0]} elements, {name} needs a multiple of {block}"
    nbytes = elements // block * block_bytes
    offset = header.data_start + info.offset
    if info.offset % header.alignment:
        return f"begins at byte {offset}, which is not aligned to {header.alignment}"
    if offset + nbytes > header.file_bytes:
        missing = offset + nbytes - header.file_bytes
        return f"ends at byte {offset + nbytes}, {missing} bytes past the end of the file ({header.file_bytes} bytes)"
    return TensorInfo(info.name, info.type_id, name, info.dims[::-1], offset, nbytes, info.header_offset)


def _check_overlap(header: GgufHeader) -> None:
    ordered = sorted(header.tensors, key=lambda t: t.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            header.problems.append(
                f"{header.path}: byte {after.offset}: tensors {before.name!r} and {after.name!r} overlap"
            )
