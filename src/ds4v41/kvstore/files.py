"""Payload files: written aside, synced, renamed; read with every length and checksum looked at."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat as stat_module
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreError
from .format import ENCODER, FULL, HEADER_BYTES, PAGE, Header, checksum, drafter_rows

log = logging.getLogger("ds4v41.kvstore")
DISK_BLOCK = 4096
HOST = socket.gethostname()
_ENDINGS = {PAGE: ".page", FULL: ".frontier", ENCODER: ".frontier"}


def disk_bytes(n: int) -> int:
    """What a file of n bytes takes on disk."""
    return -(-n // DISK_BLOCK) * DISK_BLOCK


class Files:
    """The objects of a store in a folder: objects/<64 hex digits>.page or .frontier, tmp/ while being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects = folder / "objects"
        self.tmp = folder / "tmp"
        self._prefix = f"{self.objects}{os.sep}"
        self.written = 0

    def create(self) -> None:
        """Make the folders (mode 0700); raises OSError where that is not possible."""
        for path in (self.folder, self.objects, self.tmp):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def why_not_writable(self) -> str:
        """Why a store that is there cannot be written to; empty when it can, or when it is not there yet."""
        if not os.path.isdir(self.objects):
            return ""
        probe = self.objects / f"probe.{HOST}.{os.getpid()}.{uuid.uuid4().hex}"
        try:
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError as error:
            return str(error.strerror) if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else ""
        probe.unlink(missing_ok=True)
        return ""

    def path(self, name: bytes, kind: int) -> Path:
        """Where an object is."""
        return self.objects / (name.hex() + _ENDINGS[kind])

    def folder_bytes(self) -> int:
        """What the folders themselves take on disk."""
        return sum(os.stat(path).st_blocks * 512 for path in (self.folder, self.objects, self.tmp))

    def write(self, header: Header, tokens: NDArray[np.int32], payload: NDArray[np.uint8]) -> Path:
        """Write one object to a file aside and sync it; `publish` gives it its name."""
        path = self.tmp / f"{HOST}.{os.getpid()}.{uuid.uuid4().hex}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for part in (header.pack(), tokens.tobytes(), payload.data):
                view = memoryview(part).cast("B")
                while view:
                    done = os.write(fd, view)
                    self.written += done
                    view = view[done:]
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)
        return path

    def publish(self, aside: Path, header: Header) -> None:
        """Rename a file that was written aside to its own name; `sync` makes that last."""
        path = self.path(header.id, header.kind)
        try:
            os.replace(aside, path)
        except IsADirectoryError:
            self._clear_away(path)
            os.replace(aside, path)

    def discard(self, aside: Path) -> None:
        """Forget what was written aside and has no name yet."""
        aside.unlink(missing_ok=True)

    def sync(self) -> None:
        """Make the renames durable."""
        sync_folder(self.objects)

    def open(self, name: bytes, kind: int) -> tuple[int, Header]:
        """(descriptor, header) of an object whose length and header are right; the caller closes the descriptor."""
        path = f"{self._prefix}{name.hex()}{_ENDINGS[kind]}"
        fd = open_regular(path)
        try:
            header = Header.unpack(os.pread(fd, HEADER_BYTES, 0), path)
            size = os.fstat(fd).st_size
            if header.id != name or header.kind != kind:
                raise StoreError(f"{path}: the content belongs to another name")
            if size != header.file_bytes:
                raise StoreError(f"{path}: expected {header.file_bytes:,} bytes, found {size:,}")
        except BaseException:
            os.close(fd)
            raise
        return fd, header

    def tokens(self, name: bytes) -> NDArray[np.int32]:
        """The token ids of a page, checked."""
        fd, header = self.open(name, PAGE)
        with closing_fd(fd):
            data = np.frombuffer(os.pread(fd, 4 * header.n_tokens, HEADER_BYTES), np.uint8)
        if len(data) != 4 * header.n_tokens or checksum(data) != header.tokens_sum:
            raise StoreError(f"{header.source}: the token ids are damaged (checksum)")
        return data.view("<i4")

    def payload(self, name: bytes, kind: int) -> NDArray[np.uint8]:
        """The payload of an object, checked."""
        return self.both(name, kind)[1]

    def both(self, name: bytes, kind: int) -> tuple[Header, NDArray[np.uint8]]:
        """Header and payload of an object, checked."""
        fd, header = self.open(name, kind)
        with closing_fd(fd):
            return header, read_payload(fd, header)

    def header(self, name: bytes, kind: int) -> Header:
        """The header of an object whose length and header are right."""
        fd, header = self.open(name, kind)
        os.close(fd)
        return header

    def drafter_rows(self, name: bytes) -> int:
        """Rows of drafter state that a full frontier holds."""
        fd, header = self.open(name, FULL)
        with closing_fd(fd):
            return drafter_rows(lambda at, n: os.pread(fd, n, header.payload_offset + at), header.payload_bytes)

    def remove(self, name: bytes, kind: int) -> None:
        """Delete an object; no harm when it is gone already."""
        path = self.path(name, kind)
        try:
            path.unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError):  # which of them, for a folder, is the system's choice
            if not path.is_dir():
                raise
            self._clear_away(path)

    def _clear_away(self, path: Path) -> None:
        """A folder with the name of an object: somebody else's, so it is moved out of the way and not deleted."""
        aside = self.folder / f"not-an-object.{uuid.uuid4().hex}"
        log.warning("%s: a folder is in the place of an object; moved to %s", path, aside.name)
        path.rename(aside)

    def walk(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Every file and folder below the store's folder."""
        waiting = [self.folder]
        while waiting:
            with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    yield Path(entry.path), stat

    def stale(self) -> Iterator[Path]:
        """Files aside whose writer is dead (as far as this host can tell)."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.tmp) as entries:
            for entry in entries:
                host, _, rest = entry.name.rpartition(".")[0].rpartition(".")
                if host == HOST and rest.isdigit() and not alive(int(rest)):
                    yield Path(entry.path)


def open_regular(path: Path | str) -> int:
    """A descriptor to read a file with; StoreError for a pipe or a device, which might never answer."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat_module.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StoreError(f"{path}: expected a regular file, found a folder, pipe or device")
    return fd


def read_payload(fd: int, header: Header) -> NDArray[np.uint8]:
    """All of an open file's payload, checked."""
    data = np.empty(header.payload_bytes, np.uint8)
    done = 0
    while done < len(data):
        got = os.preadv(fd, [data.data[done:]], header.payload_offset + done)
        if got == 0:
            raise StoreError(f"{header.source}: the file ends {len(data) - done:,} bytes early")
        done += got
    if checksum(data) != header.payload_sum:
        raise StoreError(f"{header.source}: the payload is damaged (checksum)")
    return data


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Closes the descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable, where the system can."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with closing_fd(fd):
            os.fsync(fd)


def alive(pid: int) -> bool:
    """Does a process of this host have this number?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
