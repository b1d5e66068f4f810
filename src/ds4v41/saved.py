"""One session in one file: `Session.save` and `Model.load_session` (docs/formats-store.md, session files)."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

import numpy as np

from . import _ext
from .atomic import may_be_replaced
from .errors import ContextError, StoreError
from .kvstore.files import closing_fd, open_regular, sync_folder
from .kvstore.format import HEADER_BYTES, SESSION, Header, Prefixes, checksum


def save(session: _ext.Session, path: Path, root: bytes, numerics: str) -> int:
    """Write the session's state; returns the bytes of the file. An old file is replaced in one step, or not at all."""
    session.complete()
    tokens = np.asarray(session.history, np.int32)
    n = len(tokens)
    rows = session.export_rows(0, n)
    frontier = session.export_frontier() if n else np.zeros(0, np.uint8)
    payload = np.concatenate([rows, frontier])
    prefixes = Prefixes(root, tokens)
    raw = np.frombuffer(prefixes.tokens.tobytes(), np.uint8)
    header = Header(
        SESSION, 0, n, n, len(payload), checksum(payload), checksum(raw), root, root, root, prefixes.node(n), numerics,
        int(time.time()), len(rows),
    )  # fmt: skip
    if not path.name or os.path.isdir(path):
        raise StoreError(f"{path}: this is a folder; give the name of a file")
    if not may_be_replaced(path):
        raise StoreError(f"{path}: this is a pipe or a device, not a file; it is left as it is")
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(aside, "xb") as file:
            file.write(header.pack())
            file.write(raw.data)
            file.write(payload.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise StoreError(f"{path}: the session could not be saved: {error}") from error
    except BaseException:  # Ctrl-C
        aside.unlink(missing_ok=True)
        raise
    return header.file_bytes


def read_header(path: Path) -> Header:
    """The header of a session file. Raises StoreError when it is none."""
    try:
        fd = open_regular(path)
        with closing_fd(fd):
            header = Header.unpack(os.pread(fd, HEADER_BYTES, 0), str(path))
            size = os.fstat(fd).st_size
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error
    if header.kind != SESSION:
        raise StoreError(f"{path}: this is a part of a store, not a saved session")
    if size != header.file_bytes:
        raise StoreError(f"{path}: expected {header.file_bytes:,} bytes, found {size:,}; the file was truncated")
    return header


def load(session: _ext.Session, path: Path, root: bytes, numerics: str) -> None:
    """Fill a new session from a file. Raises StoreError when it is damaged or of another model or mode."""
    header = read_header(path)
    if header.root != root:
        detail = f" ({header.numerics} there, {numerics} here)" if header.numerics != numerics else ""
        raise StoreError(f"{path}: this session belongs to another model, mode or format{detail}")
    if header.end > session.context:
        raise ContextError(
            f"{path} holds {header.end:,} tokens, the session's context is {session.context:,}; ask for a larger "
            "context="
        )
    if header.end == 0:
        return
    try:
        fd = open_regular(path)
        with closing_fd(fd):
            raw = os.pread(fd, 4 * header.n_tokens, HEADER_BYTES)
            payload = np.fromfile(path, np.uint8, header.payload_bytes, offset=header.payload_offset)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error
    if checksum(raw) != header.tokens_sum or checksum(payload) != header.payload_sum:
        raise StoreError(f"{path}: the file is damaged (checksum)")
    tokens = np.frombuffer(raw, "<i4").astype(np.int32)
    if Prefixes(root, tokens).node(len(tokens)) != header.node:
        raise StoreError(f"{path}: the tokens do not belong to the state")
    session.begin_restore(0)
    session.import_rows(0, header.end, payload[: header.extra])
    session.finish_restore(tokens)
    session.import_frontier(payload[header.extra :])
