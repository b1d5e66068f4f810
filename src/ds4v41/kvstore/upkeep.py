"""Looking after a store: what is on its disk, what the index does not know, what is damaged, what was left behind."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat as stat_module
from pathlib import Path

from ..errors import StoreError
from .files import HOST, Files, alive, closing_fd, disk_bytes, open_regular
from .format import HEADER_BYTES, PAGE, Header
from .index import Index
from .memory_files import MemoryFiles
from .results import VerifyResult

_ENDINGS = {".page", ".frontier"}


class Upkeep:
    """Scans of the folder. `overhead`: bytes on disk that are neither objects, index nor the store's own folders."""

    def __init__(self, files: Files | MemoryFiles, index: Index) -> None:
        self.files, self.index = files, index
        self.overhead = 0
        self.foreign = 0

    def scan(self) -> list[Path]:
        """Look at every file; returns the object files that the index does not list."""
        if isinstance(self.files, MemoryFiles):
            return []
        known = self.index.names()
        overhead = foreign = 0
        unlisted = []
        index_files = {f"{self.index.path}{ending}" for ending in ("", "-wal", "-shm")}
        for path, stat in self.files.walk():
            size = max(disk_bytes(stat.st_size), stat.st_blocks * 512)
            if stat_module.S_ISDIR(stat.st_mode):
                if path not in (self.files.objects, self.files.tmp):
                    overhead += size
            elif str(path) in index_files:
                continue
            elif path.parent == self.files.tmp:
                if not _living_writer(path.name):  # what living writers have aside is reserved already
                    overhead += size
            elif (name := _object_name(path)) is None:
                overhead += size
                foreign += size
            elif name not in known:
                overhead += size
                unlisted.append(path)
        self.overhead, self.foreign = overhead, foreign
        return unlisted

    def adopt(self) -> int:
        """List objects that the index lacks (their writer died after the rename, or the index is new)."""
        if isinstance(self.files, MemoryFiles):
            return 0
        headers = []
        for path in self.scan():
            with contextlib.suppress(StoreError, OSError):
                name = _object_name(path)
                assert name is not None
                fd, header = self.files.open(name, PAGE if path.suffix == ".page" else _kind_of(path))
                os.close(fd)
                headers.append(header)
        if not headers:
            return 0
        with contextlib.suppress(sqlite3.OperationalError):  # a full disk: they count as overhead until there is room
            with self.index.writing() as db:  # files are deleted under this lock only
                there = [h for h in headers if self.files.path(h.id, h.kind).exists()]
                self.index.insert(there, db=db)
            self.scan()
            return len(there)
        return 0

    def sweep(self) -> list[Path]:
        """Delete what dead writers left aside."""
        if isinstance(self.files, MemoryFiles):
            return []
        gone = list(self.files.stale())
        for path in gone:
            path.unlink(missing_ok=True)
        self.scan()
        return gone

    def verify(self) -> VerifyResult:
        """Every byte of every object against its checksums."""
        damaged, missing, checked, total = [], [], 0, 0
        for item in self.index.items():
            try:
                if item.kind == PAGE:
                    self.files.tokens(item.id)
                total += len(self.files.payload(item.id, item.kind))
                checked += 1
            except FileNotFoundError as error:
                if item.id in self.index.has([item.id]):  # not just deleted by someone else
                    missing.append(str(error.filename))
            except (StoreError, OSError) as error:
                damaged.append(str(error))
        listed = self.index.names()
        unlisted = [str(p) for p in self.scan() if _object_name(p) not in listed and p.exists()]
        return VerifyResult(checked, total, tuple(damaged), tuple(missing), tuple(unlisted))


def _kind_of(path: Path) -> int:
    fd = open_regular(path)
    with closing_fd(fd):
        return Header.unpack(os.pread(fd, HEADER_BYTES, 0), str(path)).kind


def _object_name(path: Path) -> bytes | None:
    if path.suffix not in _ENDINGS or path.parent.name != "objects":
        return None
    with contextlib.suppress(ValueError):
        name = bytes.fromhex(path.stem)
        return name if len(name) == 32 else None
    return None


def _living_writer(name: str) -> bool:
    host, _, rest = name.rpartition(".")[0].rpartition(".")
    return host == HOST and rest.isdigit() and alive(int(rest))
