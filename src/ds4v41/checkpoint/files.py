"""Careful access to files that may be anything: pipes, directories, unreadable, enormous or hostile."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_PULL = " (published files are fetched first: `ds4v41 pull`, then give the path)"


def stat_path(path: Path) -> os.stat_result:
    """`os.stat` with a clear error; never opens the path, so a pipe cannot block."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        hint = " (it is a symbolic link to nothing)" if path.is_symlink() else ""
        pull = "" if path.is_absolute() or (path.parent.is_dir() and path.suffix) else _PULL
        raise CheckpointError(f"{path}: no such file or folder{hint}; check the path{pull}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise CheckpointError(f"{str(path)!r}: cannot look at this path: {error}") from error


def require_file(path: Path) -> os.stat_result:
    """The state of a regular file; CheckpointError when `path` is something else."""
    info = stat_path(path)
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError(f"{path}: expected a regular file, found {kind_of(info)}")
    return info


def kind_of(info: os.stat_result) -> str:
    """What a path is, in words."""
    kinds = (
        (stat.S_ISREG, "a regular file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    return next((name for test, name in kinds if test(info.st_mode)), "something that is not a file")


def open_error(path: Path, error: OSError) -> CheckpointError:
    """The error to raise when a file cannot be opened or read."""
    if isinstance(error, PermissionError):
        return CheckpointError(f"{path}: permission to read the file is denied; check its mode and owner")
    return CheckpointError(f"{path}: cannot read the file: {error.strerror or error}")


def read_json(path: Path, max_bytes: int) -> Any:
    """Parse a whole JSON file of at most `max_bytes` bytes; every fault is a CheckpointError that names the file."""
    size = require_file(path).st_size
    if size > max_bytes:
        raise CheckpointError(f"{path}: expected at most {max_bytes} bytes of JSON, found {size} bytes")
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise open_error(path, error) from error
    try:
        return parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def parse_json(data: bytes, first_byte: int = 0) -> Any:
    """Parse JSON strictly: UTF-8, no duplicate keys. Raises ValueError with the file offset where there is one."""
    _refuse_expansion(data, first_byte)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {first_byte + error.start}: not valid UTF-8") from None
    except json.JSONDecodeError as error:
        at = first_byte + len(error.doc[: error.pos].encode("utf-8", "surrogatepass"))
        raise ValueError(f"byte {at}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"byte {first_byte}: the JSON is nested too deeply") from None
    except ValueError as error:  # duplicate keys, whole numbers of thousands of digits
        raise ValueError(f"byte {first_byte}: not acceptable JSON: {error}") from None


_SMALL = 1 << 20


def _refuse_expansion(data: bytes, first_byte: int) -> None:
    """Long runs of tiny values become some 25 times as large in memory; no real file looks like that.

    A tensor entry has one bracket per 16 bytes and one comma per 8 bytes at the very most.
    """
    if len(data) <= _SMALL:
        return
    nested = data.count(b"[") + data.count(b"{")
    if nested > len(data) // 16 or data.count(b",") > len(data) // 8:
        raise ValueError(f"byte {first_byte}: the JSON holds far more values than its {len(data)} bytes should")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:200]!r} is there twice")
            seen.add(key)
    return result
