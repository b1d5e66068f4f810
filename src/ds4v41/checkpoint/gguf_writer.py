"""Writing GGUF files: the bytes of a header, and a file that appears under its name only when it is complete."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..atomic import may_be_replaced
from ..errors import CheckpointError
from .gguf_dialect import Record
from .gguf_header import MAGIC, VERSION, type_ids

_ARRAY, _STRING, _BOOL = 9, 8, 7
_SCALARS = {4: "<I", 5: "<i", 6: "<f", 10: "<Q"}
_NUMPY = {4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8"}

PARTIAL_SUFFIX = ".partial"
"""Added to the name of a file that is being written."""


def pack_text(text: str) -> bytes:
    """A string as GGUF stores it: its length in bytes, then UTF-8."""
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def pack_record(record: Record) -> bytes:
    """One metadata entry."""
    head = pack_text(record.key)
    if not record.is_array:
        return head + struct.pack("<I", record.kind) + _pack_scalar(record.kind, record.value)
    head += struct.pack("<IIQ", _ARRAY, record.kind, len(record.value))
    if record.kind == _STRING:
        return head + b"".join(map(pack_text, record.value))
    return head + np.asarray(record.value, dtype=_NUMPY[record.kind]).tobytes()


def _pack_scalar(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return pack_text(value)
    if kind == _BOOL:
        return b"\1" if value else b"\0"
    return struct.pack(_SCALARS[kind], value)


def pack_tensor(name: str, shape: Sequence[int], type_name: str, offset: int) -> bytes:
    """One tensor entry; `shape` outermost first, `offset` from the start of the data."""
    dims = tuple(reversed(shape))
    return (
        pack_text(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", type_ids()[type_name], offset)
    )


def pack_header(records: Sequence[Record], tensors: Iterable[bytes], n_tensors: int, alignment: int) -> bytes:
    """Magic, counts, metadata and tensor entries, padded to `alignment`; the data follow at once."""
    head = MAGIC + struct.pack("<IQQ", VERSION, n_tensors, len(records))
    header = head + b"".join(map(pack_record, records)) + b"".join(tensors)
    return header + bytes(-len(header) % alignment)


class CompleteFile:
    """A file under a temporary name that takes its real name on success and vanishes on failure.

    As a context manager: leaving it without an exception syncs the data, renames, and syncs the folder. A process that
    is killed leaves only `NAME.partial`, which is never taken for a model and which the next run writes anew. A lock on
    the partial file keeps two runs from writing the same one.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        self.path = path
        if not path.name:
            raise CheckpointError(f"{path}: this is a folder; give the name of a file")
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._overwrite = overwrite
        self._descriptor = -1
        self.position = 0

    def __enter__(self) -> CompleteFile:
        self._refuse_existing()
        try:
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointError(f"{self._partial}: cannot be created: {error.strerror or error}") from error
        try:
            self._lock()
            self._refuse_existing()
            os.ftruncate(self._descriptor, 0)
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def _refuse_existing(self) -> None:
        if os.path.isdir(self.path):
            raise CheckpointError(f"{self.path}: this is a folder; give the name of a file")
        if not may_be_replaced(self.path):
            raise CheckpointError(f"{self.path}: this is a pipe or a device, not a file; it is left as it is")
        if not self._overwrite and os.path.lexists(self.path):
            raise CheckpointError(
                f"{self.path}: this file exists already: remove it, give another name, or allow it to be replaced "
                "(overwrite=True; on the command line --overwrite)"
            )

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # no advisory locks on this system
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another run may have finished since the file was opened: then it has its real name now.
            same = os.path.samestat(os.fstat(self._descriptor), os.stat(self._partial))
        except OSError as error:
            raise CheckpointError(f"{self._partial}: another process is writing this file now") from error
        if not same:
            raise CheckpointError(f"{self._partial}: another process has just written this file")

    def write(self, data: Any) -> None:
        """Appends all of `data` (any buffer)."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            try:
                n = os.write(self._descriptor, view[: 1 << 30])
            except OSError as error:
                raise CheckpointError(
                    f"{self._partial}: writing failed at byte {self.position}: {error.strerror or error}"
                ) from error
            self.position += n
            view = view[n:]

    def pad(self, alignment: int) -> None:
        """Appends zeros up to the next multiple."""
        self.write(bytes(-self.position % alignment))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
                self._refuse_existing()
                os.replace(self._partial, self.path)
        except OSError as failure:
            raise CheckpointError(f"{self.path}: cannot be completed: {failure.strerror or failure}") from failure
        finally:
            if kind is not None or os.path.lexists(self._partial):
                self._partial.unlink(missing_ok=True)
            os.close(self._descriptor)
        if kind is None:
            _sync_folder(self.path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable; some file systems do not let folders be synced, which is no reason to fail."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
