"""Room in a store: what is deleted so that something new fits, and how the new is written in its place."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import StoreError
from ..machine import human
from .files import HOST, Files, disk_bytes
from .format import Header
from .index import Index, IndexRefused
from .memory_files import MemoryFiles
from .objects import Object
from .policy import Item, victims
from .upkeep import Upkeep

log = logging.getLogger("ds4v41.kvstore")
MARGIN, MARGIN_SHARE = 256 << 10, 4
"""Room that a put leaves for what the index grows by, whose log alone takes 64 KiB before it is folded in; of a small
budget a quarter."""


class Room:
    """Writes and deletes objects of one tree, within a budget.

    name: of the tree, for the log.
    """

    def __init__(self, files: Files | MemoryFiles, index: Index, upkeep: Upkeep, name: str) -> None:
        self._files, self._index, self._upkeep, self._name = files, index, upkeep, name

    def overhead(self) -> int:
        """Bytes on disk that are no objects: index, folders, foreign files, leftovers of writers."""
        return self._upkeep.overhead + self._files.folder_bytes() + self._index.file_bytes()

    def usage(self) -> int:
        """All bytes that count against the budget."""
        with self._index.reading() as db:
            return self._index.used(db) + self.overhead()

    # ---- writing -------------------------------------------------------------------------------------------------

    def keep(self, new: list[Object], budget: int, protected: set[bytes], weight: float) -> tuple[int, int] | None:
        """Write objects within the budget: (bytes, objects deleted for them); None when they do not fit."""
        need = sum(disk_bytes(header.file_bytes) for header, _, _ in new)
        reservation, deleted, fits = self._make(need, budget, protected)
        if not fits:
            return None
        try:
            return self._write(new, reservation, weight), deleted
        except BaseException:
            self._release(reservation)
            raise

    def _make(self, need: int, budget: int, protected: set[bytes]) -> tuple[int, int, bool]:
        """Reserve `need` bytes, deleting what is least useful: (reservation, objects deleted, whether it fits)."""
        overhead = self.overhead() + _margin(budget)
        with self._index.writing() as db:
            over = self._index.used(db) + overhead + need - budget
            chosen: list[Item] = []
            if over > 0:
                now = self._index.tick()
                chosen = victims(self._index.items(), over, protected, now)
                if sum(item.bytes for item in chosen) < over:
                    return 0, 0, False
                db.executemany("DELETE FROM objects WHERE id=?", [(item.id,) for item in chosen])
            freed = sum(item.bytes for item in chosen)  # not free before the files are gone
            cursor = db.execute(
                "INSERT INTO reservations(host, pid, bytes) VALUES (?,?,?)", (HOST, os.getpid(), need + freed)
            )
            reservation = int(cursor.lastrowid or 0)
        if chosen:
            log.info("%s: %d objects (%s) make room", self._name, len(chosen), human(freed))
            try:
                self.unlink(chosen)
                with self._index.writing() as db:
                    db.execute("UPDATE reservations SET bytes=? WHERE id=?", (need, reservation))
            except BaseException:
                self._release(reservation)
                raise
        return reservation, len(chosen), True

    def _release(self, reservation: int) -> None:
        with contextlib.suppress(StoreError), self._index.writing() as db:
            db.execute("DELETE FROM reservations WHERE id=?", (reservation,))

    def _write(self, new: list[Object], reservation: int, weight: float) -> int:
        before = self._files.written
        aside: list[tuple[Path, Header]] = []
        try:
            for header, tokens, payload in new:
                aside.append((self._files.write(header, tokens, payload), header))
            size = self._files.written - before
            # Names and rows appear under one lock, and files disappear under the same: see unlink.
            with self._index.writing() as db:
                for path, header in aside:
                    self._files.publish(path, header)
                self._files.sync()
                self._index.insert((header for _, header in aside), weight, db)
                db.execute("DELETE FROM reservations WHERE id=?", (reservation,))
                db.execute("UPDATE meta SET value=value+? WHERE key='written'", (size,))
        except BaseException:
            for path, _ in aside:
                self._files.discard(path)
            with contextlib.suppress(OSError):
                self.unlink([header for _, header in aside])
            raise
        self._index.shrink()
        return size

    # ---- deleting ------------------------------------------------------------------------------------------------

    def unlink(self, objects: Sequence[Item | Header]) -> None:
        """Delete files that no row names. Under the lock of the index, so that nobody is just about to list one."""
        if not objects:
            return
        with self._index.writing() as db:
            for item in objects:
                if db.execute("SELECT 1 FROM objects WHERE id=?", (item.id,)).fetchone() is None:
                    self._files.remove(item.id, item.kind)

    def surplus(self, limit: int) -> list[Item]:
        """What has to go so that the tree takes `limit` bytes."""
        with self._index.reading() as db:
            over = self._index.used(db) + self.overhead() + _margin(limit) - limit
            return victims(self._index.items(), over, (), self._index.tick())

    def over(self, budget: int) -> bool:
        """Is the tree above its budget? Reservations do not count: what a writer is just deleting is in them too."""
        with self._index.reading() as db:
            return self._index.object_bytes(db) + self.overhead() > budget

    def trim(self, budget: int) -> int:
        """Delete the least useful of a tree that is above its budget though nothing new was put (it had a larger one
        before, or another process has); nothing where that would not suffice, because of foreign files."""
        chosen = self.surplus(budget)
        if self.usage() - sum(item.bytes for item in chosen) > budget:
            return 0
        log.info("%s: above its budget of %s; %d objects go", self._name, human(budget), len(chosen))
        self.delete(chosen)
        return len(chosen)

    def delete(self, items: Sequence[Item]) -> None:
        """Delete objects: first the rows, so that no other process counts on the files; on a disk that is full to the
        last byte, where the index cannot write either, first the files (others will then miss them)."""
        if not items:
            return
        try:
            self._index.delete(item.id for item in items)
        except IndexRefused:
            for item in items:
                self._files.remove(item.id, item.kind)
            self._index.delete(item.id for item in items)
        self.unlink(items)
        self._index.shrink()


def _margin(budget: int) -> int:
    return min(MARGIN, budget // MARGIN_SHARE)
