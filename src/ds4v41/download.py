"""Downloading a file in parts, each checked as it streams in, so that nothing half-made is ever taken for whole.

A file grows under the name `NAME.incomplete`, beside a note of what it is; when its bytes have the published digest it
is synced to disk and renamed. Parts are appended one after the other, so a file that is published in pieces needs its
own space only once. What was there from an earlier attempt is read again and checked, then the rest is asked for.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

from .atomic import sync_folder, write_atomically
from .errors import PullError

BLOCK = 1 << 20
ATTEMPTS = 6
"""How often in a row the connection may fail without a single byte arriving."""

Progress = Callable[[int, int, str], object]
"""Called with (bytes done, bytes of the file, what is being done)."""


@dataclass(frozen=True, slots=True)
class Part:
    """A published file: all of a target, or one of the pieces that it is joined from."""

    repo: str
    file: str
    revision: str
    size: int
    sha256: str | None
    git_sha1: str | None = None
    """Digest of small files, which repositories keep without a SHA-256."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.repo}:{self.file}"

    def hasher(self) -> Any:
        """A new hasher of the kind whose digest is known."""
        return hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    @property
    def digest(self) -> str:
        """What the hasher must give."""
        return self.sha256 or self.git_sha1 or ""


@dataclass(frozen=True, slots=True)
class Target:
    """A file that is wanted, made of one or more parts in order."""

    path: Path
    parts: tuple[Part, ...]
    sha256: str | None = None
    """Of the whole; None when its only part says it."""

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        return sum(part.size for part in self.parts)

    @property
    def partial(self) -> Path:
        """Its name while it is not complete."""
        return self.path.with_name(self.path.name + ".incomplete")

    @property
    def note(self) -> Path:
        """The note of what the partial file is."""
        return self.path.with_name(self.path.name + ".incomplete.json")

    def identity(self) -> dict[str, Any]:
        """What the note says: bytes of another version are not gone on with."""
        return {"parts": [{"file": p.name, "size": p.size, "digest": p.digest} for p in self.parts]}

    def have(self) -> int:
        """Bytes of an earlier attempt that can be gone on with (they are checked when that happens)."""
        try:
            known = json.loads(self.note.read_bytes()) == self.identity()
            size = self.partial.stat().st_size
        except (OSError, ValueError, RecursionError):
            return 0
        return size if known and size <= self.size else 0


class Source(Protocol):
    """Where bytes come from."""

    def stream(self, part: Part, offset: int) -> Any:
        """A context manager with `read(n)` that gives the part's bytes from `offset` on.

        Raises OSError or HTTPException for what may pass, PullError for what will not.
        """


class Sums:
    """Digests of a target as its bytes pass by in order."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.position = self.index = 0
        self.part_start = 0
        self._whole = hashlib.sha256()
        self._start_whole = self._whole.copy()
        self._part = target.parts[0].hasher()

    @property
    def part(self) -> Part:
        """The part that the next byte belongs to."""
        return self.target.parts[self.index]

    @property
    def left_in_part(self) -> int:
        """Bytes until its end."""
        return self.part_start + self.part.size - self.position

    def add(self, data: bytes) -> None:
        """Bytes of the present part."""
        self._part.update(data)
        if self.target.sha256 is not None:
            self._whole.update(data)
        self.position += len(data)

    def part_is_right(self) -> bool:
        """At the end of a part: is it what was published?"""
        return bool(self._part.hexdigest() == self.part.digest)

    def next_part(self) -> None:
        """Go on to the next one."""
        self.part_start, self.index = self.position, self.index + 1
        self._start_whole = self._whole.copy()
        if self.index < len(self.target.parts):
            self._part = self.part.hasher()

    def restart_part(self) -> None:
        """As if none of the present part's bytes had been seen."""
        self.position = self.part_start
        self._whole, self._part = self._start_whole.copy(), self.part.hasher()

    @property
    def done(self) -> bool:
        """All parts are there."""
        return self.index == len(self.target.parts)

    def whole_is_right(self) -> bool:
        """At the end: the digest of the joined file."""
        return self.target.sha256 is None or self._whole.hexdigest() == self.target.sha256


def download(target: Target, source: Source, progress: Progress, retry_seconds: float = 1.0) -> int:
    """Make `target.path` complete; returns the bytes that were downloaded. Raises PullError; what is left then is only
    the partial file, which the next call goes on with."""
    with _locked(target) as handle:
        if not target.have():
            os.ftruncate(handle, 0)
            write_atomically(target.note, json.dumps(target.identity()))
        sums = Sums(target)
        _recheck(handle, sums, progress)
        before = sums.position
        while not sums.done:
            _fetch_part(handle, sums, source, progress, retry_seconds)
        downloaded = sums.position - before
        if not sums.whole_is_right():
            os.ftruncate(handle, 0)
            raise PullError(f"{target.path.name}: the joined file has another SHA-256 than published; it was removed")
        os.fsync(handle)
        os.replace(target.partial, target.path)
        target.note.unlink(missing_ok=True)
    sync_folder(target.path.parent)
    return downloaded


def file_is_right(target: Target, progress: Progress) -> bool:
    """Read a complete file and compare its digests."""
    sums = Sums(target)
    with open(target.path, "rb") as file:
        while not sums.done:
            data = file.read(min(BLOCK, sums.left_in_part))
            if not data and sums.left_in_part:
                return False
            sums.add(data)
            progress(sums.position, target.size, f"checking {target.path.name}")
            if sums.left_in_part == 0:
                if not sums.part_is_right():
                    return False
                sums.next_part()
    return sums.whole_is_right()


@contextmanager
def _locked(target: Target) -> Iterator[int]:
    """The partial file, opened for this process alone."""
    handle = os.open(target.partial, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise PullError(f"{target.partial}: another process is downloading this file") from error
        if not target.partial.exists() or os.fstat(handle).st_ino != target.partial.stat().st_ino:
            # The other process completed and renamed it between our opening and our locking it.
            raise PullError(f"{target.path}: another process has just completed this file")
        yield handle
    finally:
        os.close(handle)


def _recheck(handle: int, sums: Sums, progress: Progress) -> None:
    """Take up what is there. A complete part that is wrong, and all that follows it, is cut off."""
    have = os.fstat(handle).st_size
    while sums.position < have and not sums.done:
        data = os.pread(handle, min(BLOCK, sums.left_in_part, have - sums.position), sums.position)
        if not data:
            break
        sums.add(data)
        progress(sums.position, sums.target.size, f"checking {sums.target.partial.name}")
        if sums.left_in_part == 0:
            if not sums.part_is_right():
                sums.restart_part()
                break
            sums.next_part()
    os.ftruncate(handle, sums.position)


def _fetch_part(handle: int, sums: Sums, source: Source, progress: Progress, retry_seconds: float) -> None:
    """Download the rest of the present part, through broken connections, and check it."""
    failures = 0
    while sums.left_in_part:
        at = sums.position
        trouble: object = "the connection was closed early"
        try:
            with source.stream(sums.part, at - sums.part_start) as stream:
                _copy(handle, sums, stream, progress)
        except (OSError, HTTPException) as error:
            trouble = error
        if sums.position > at:
            failures = 0
        if sums.left_in_part:
            failures += 1
            if failures == ATTEMPTS:
                raise PullError(
                    f"{sums.part.name}: {trouble}; {sums.position:,} of {sums.target.size:,} bytes are there, run the "
                    "command again to go on"
                )
            time.sleep(retry_seconds * 2 ** (failures - 1))
    if not sums.part_is_right():
        os.ftruncate(handle, sums.part_start)
        raise PullError(
            f"{sums.part.name}: what arrived has another digest than published ({sums.part.digest}); it was removed, "
            "run the command again"
        )
    sums.next_part()


def _copy(handle: int, sums: Sums, stream: Any, progress: Progress) -> None:
    while sums.left_in_part:
        data = stream.read(min(BLOCK, sums.left_in_part))
        if not data:
            return
        _write(handle, data, sums)
        sums.add(data)
        progress(sums.position, sums.target.size, f"downloading {sums.target.path.name}")


def _write(handle: int, data: bytes, sums: Sums) -> None:
    view, at = memoryview(data), sums.position
    try:
        while view:
            n = os.pwrite(handle, view, at)
            view, at = view[n:], at + n
    except OSError as error:
        raise PullError(f"{sums.target.partial}: writing failed at byte {at}: {error.strerror}") from error


def need_space(targets: Sequence[Target], free: int) -> None:
    """PullError when what is still to be downloaded does not fit."""
    need = sum(target.size - target.have() for target in targets if not target.path.exists())
    if need > free:
        folder = targets[0].path.parent
        raise PullError(f"{folder}: {need:,} bytes are needed, {free:,} are free ({need - free:,} short)")
