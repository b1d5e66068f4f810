"""The header of one .safetensors file, read without trusting it.

Layout: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, then the data, which
the tensors must cover exactly, without gap or overlap.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .files import open_error, parse_json, require_file

MAX_HEADER = 100_000_000
"""Bytes; the limit of the format's own library."""
_MAX_RANK = 8
_MAX_BYTES = 2**63 - 1
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a header; `start` and `end` are absolute file offsets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(slots=True)
class Header:
    """What one file declares. Entries that lie are left out and reported."""

    path: Path
    stat: os.stat_result | None = None
    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    readable: bool = True
    """False when the file or its header as a whole could not be read."""


def read_header(path: Path) -> Header:
    """Read and check one header. Never raises for what the file contains: faults are in `problems`."""
    header = Header(path)
    try:
        header.stat = require_file(path)
        raw = _raw_header(path, header.stat.st_size)
        parsed = parse_json(raw, first_byte=8)
        if not isinstance(parsed, dict):
            raise ValueError("byte 8: expected a JSON object of tensors")
    except (CheckpointError, ValueError) as error:
        prefix = "" if isinstance(error, CheckpointError) else f"{path}: "
        header.problems.append(f"{prefix}{error}")
        header.readable = False
        return header
    _read_entries(header, parsed, 8 + len(raw), header.stat.st_size)
    return header


def _raw_header(path: Path, size: int) -> bytes:
    if size < 8:
        raise ValueError(
            f"byte 0: expected 8 bytes of header length, but the file has only {size} bytes; it is truncated"
        )
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise ValueError(f"byte 0: the header length {length} is above the limit of {MAX_HEADER} bytes")
            if length > size - 8:
                raise ValueError(
                    f"byte 0: the header length {length} reaches past the end of the file ({size} bytes); the file is "
                    "truncated or not a .safetensors file"
                )
            raw = file.read(length)
    except OSError as error:
        raise open_error(path, error) from error
    if len(raw) != length:
        raise ValueError(f"byte {8 + len(raw)}: the file ended inside its header of {length} bytes")
    return raw


def _read_entries(header: Header, parsed: dict[str, Any], data_start: int, size: int) -> None:
    complete = True
    for name, value in parsed.items():
        if name == "__metadata__":
            if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
                header.problems.append(f"{header.path}: byte 8: __metadata__ must be an object of strings")
            continue
        entry = _entry(header, name, value, data_start, size)
        if entry is None:
            complete = False
        else:
            header.entries.append(entry)
    header.entries.sort(key=lambda entry: (entry.start, entry.end))
    if complete:
        _check_coverage(header, data_start, size)


def _entry(header: Header, name: str, value: Any, data_start: int, size: int) -> Entry | None:
    where = f"{header.path}: byte 8: tensor {_quote(name)}"
    if not isinstance(value, Mapping) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        header.problems.append(f"{where}: expected an object with dtype, shape and data_offsets")
        return None
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    item = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    faults: list[str] = []
    if item is None:
        faults.append(f"unknown dtype {_quote(dtype)}")
    if not _is_wholes(shape) or len(shape) > _MAX_RANK:
        faults.append(f"shape must be a list of at most {_MAX_RANK} whole numbers >= 0, found {_quote(shape)}")
    if not _is_wholes(offsets) or len(offsets) != 2:
        faults.append(f"data_offsets must be two whole numbers, found {_quote(offsets)}")
    elif not offsets[0] <= offsets[1] <= size - data_start:
        faults.append(
            f"data_offsets {_quote(offsets)} are not an ascending range inside the {size - data_start} data bytes "
            "of the file; it is truncated or its header is damaged"
        )
    if not faults and item is not None:
        nbytes = _n_bytes(shape, item)
        if nbytes != offsets[1] - offsets[0]:
            need = "more than 2^63 bytes" if nbytes is None else f"{nbytes} bytes"
            faults.append(f"{dtype} {_quote(shape)} needs {need}, but data_offsets span {offsets[1] - offsets[0]}")
    header.problems += [f"{where}: {fault}" for fault in faults]
    if faults:
        return None
    return Entry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _check_coverage(header: Header, data_start: int, size: int) -> None:
    """The data must be one tensor after the other, up to the end of the file."""
    position, previous = data_start, "the header"
    for entry in header.entries:
        if entry.start < position:
            header.problems.append(
                f"{header.path}: byte {entry.start}: tensor {_quote(entry.name)} overlaps {previous}, "
                f"which ends at {position}"
            )
        elif entry.start > position:
            header.problems.append(
                f"{header.path}: byte {position}: {entry.start - position} bytes before tensor {_quote(entry.name)} "
                "belong to no tensor"
            )
        if entry.end >= position:
            position, previous = entry.end, f"tensor {_quote(entry.name)}"
    if position < size:
        header.problems.append(
            f"{header.path}: byte {position}: the file goes on for {size - position} bytes after its last tensor"
        )


def _n_bytes(shape: list[int], item: int) -> int | None:
    """Bytes of a tensor, None when they do not fit 63 bits; stops early, so that sizes stay small."""
    n = item
    for dimension in shape:
        n *= dimension
        if n > _MAX_BYTES:
            return None
    return n


def _is_wholes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_BYTES for item in value)


def _quote(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits, deep nesting
        return "(too long to show)"
    return text if len(text) <= 160 else text[:157] + "..."
