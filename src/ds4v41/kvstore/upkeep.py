"""Looking after a store: what is on its disk, what the index does not know, what is damaged, what was left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import stat as stat_module
from pathlib import Path

from ..errors import StoreError
from .files import HOST, Files, alive, closing_fd, disk_bytes, open_regular
from .format import FULL, HEADER_BYTES, PAGE, Header
from .index import Index, IndexDamaged, IndexRefused
from .memory_files import MemoryFiles
from .results import VerifyResult

log = logging.getLogger("ds4v41.kvstore")
_ENDINGS = {".page", ".frontier"}


class Upkeep:
    """Scans of the folder. `overhead`: bytes on disk that are neither objects, index nor the store's own folders."""

    def __init__(self, files: Files | MemoryFiles, index: Index) -> None:
        self.files, self.index = files, index
        self.overhead = 0
        self.foreign = 0
        self._missing: list[bytes] = []

    def scan(self) -> list[Path]:
        """Look at every file; returns the object files that the index does not list."""
        if isinstance(self.files, MemoryFiles):
            return []
        known = self.index.sizes()
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
            elif (listed := known.pop(name, None)) is None:
                overhead += size
                unlisted.append(path)
            elif listed != disk_bytes(stat.st_size):
                self._compare(path)
        self.overhead, self.foreign, self._missing = overhead, foreign, list(known)
        return unlisted

    def _compare(self, path: Path) -> None:
        """A file and its row differ in size. When the file is right the row is put right: a frontier was replaced by a
        process that was killed before it could say so, or the index is damaged there."""
        with contextlib.suppress(StoreError, FileNotFoundError), self.index.writing() as db:
            header = self._header(path)  # a file that is damaged itself is dropped by who reads it
            if not self.index.agrees(header):
                log.warning("%s: the index said otherwise; put right", header.source)
                self.index.insert([header], db=db)

    def _header(self, path: Path) -> Header:
        """The header of an object file, checked."""
        name = _object_name(path)
        assert name is not None and isinstance(self.files, Files)
        return self.files.header(name, PAGE if path.suffix == ".page" else _kind_of(path))

    def _agreed(self, header: Header) -> None:
        if self.index.agrees(header):
            return
        with self.index.writing():  # no frontier is being replaced now
            header = self.files.header(header.id, header.kind)  # type: ignore[union-attr]
            if not self.index.agrees(header):
                raise IndexDamaged(self.index, f"it contradicts the header of {header.source}")

    def adopt(self) -> int:
        """List objects that the index lacks (their writer died after the rename, or the index is new), and forget
        those whose files are gone."""
        if isinstance(self.files, MemoryFiles):
            return 0
        headers = []
        unlisted = self.scan()
        self._forget_missing()
        for path in unlisted:
            with contextlib.suppress(StoreError, OSError):
                headers.append(self._header(path))
        if not headers:
            return 0
        with contextlib.suppress(IndexRefused):  # a full disk: they count as overhead until there is room
            with self.index.writing() as db:  # files are deleted under this lock only
                there = [h for h in headers if self.files.path(h.id, h.kind).exists()]
                self.index.insert(there, db=db)
            self.scan()
            return len(there)
        return 0

    def _forget_missing(self) -> None:
        if self._missing and isinstance(self.files, Files):
            with contextlib.suppress(IndexRefused), self.index.writing() as db:
                gone = [(n,) for n in self._missing if not any(self.files.path(n, k).exists() for k in (PAGE, FULL))]
                db.executemany("DELETE FROM objects WHERE id=?", gone)

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
        """The index in itself, then every byte of every object against its checksums and its row."""
        self.index.check()
        damaged, missing, checked, total = [], [], 0, 0
        for item in self.index.items():
            try:
                if isinstance(self.files, Files):
                    self._agreed(self.files.header(item.id, item.kind))
                if item.kind == PAGE:
                    self.files.tokens(item.id)
                total += len(self.files.payload(item.id, item.kind))
                checked += 1
            except FileNotFoundError as error:
                if item.id in self.index.has([item.id]):  # not just deleted by someone else
                    missing.append(str(error.filename))
            except IndexDamaged:
                raise
            except (StoreError, OSError) as error:
                damaged.append(str(error))
        listed = self.index.sizes()
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
