"""The index of a store: one SQLite file (WAL) that says which objects there are. The objects alone can rebuild it."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import StoreError
from .files import HOST, alive, disk_bytes
from .format import Header
from .policy import Item, decayed

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects(
  id BLOB PRIMARY KEY, kind INTEGER NOT NULL, root BLOB NOT NULL, parent BLOB NOT NULL, block BLOB NOT NULL,
  node BLOB NOT NULL, begin INTEGER NOT NULL, end INTEGER NOT NULL, bytes INTEGER NOT NULL,
  score REAL NOT NULL, tick INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_block ON objects(block);
CREATE TABLE IF NOT EXISTS reservations(
  id INTEGER PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT OR IGNORE INTO meta VALUES ('version', 1), ('tick', 0), ('written', 0);
"""
WAL_BYTES = 64 << 10
Use = tuple[Sequence[bytes], float, float, float]
"""(objects, gain, factor, least): a score s becomes the larger of `least` and s * factor + gain."""
_ITEM = "id, kind, parent, node, begin, end, bytes, score, tick"


class Index:
    """Rows of the objects. Threads of a process share one; processes share the file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._db = self._connect()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            ":memory:" if self.path is None else self.path, timeout=60, isolation_level=None, check_same_thread=False
        )
        try:
            if self.path is not None:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=NORMAL")
                db.execute("PRAGMA wal_autocheckpoint=512")
                db.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
                os.chmod(self.path, 0o600)
            with _begun(db):
                for statement in _SCHEMA.split(";\n"):
                    db.execute(statement)
                version = db.execute("SELECT value FROM meta WHERE key='version'").fetchone()[0]
        except BaseException:
            db.close()
            raise
        if version != 1:
            db.close()
            raise StoreError(f"{self.path}: this index has version {version}; this program knows version 1")
        return db

    def _own(self) -> sqlite3.Connection:
        """The connection of this process: a child of os.fork() must not use its parent's."""
        if os.getpid() != self._pid and self.path is not None:
            self._pid = os.getpid()
            self._lock = threading.RLock()
            self._db = self._connect()
        return self._db

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for statements that do not change anything."""
        with self._lock:
            yield self._own()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other process can come between."""
        with self._lock:
            db = self._own()
            with _begun(db):
                yield db

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._db.close()

    # ---- what there is -----------------------------------------------------------------------------------------

    def of_blocks(self, blocks: Sequence[bytes], root: bytes) -> dict[bytes, list[Item]]:
        """Objects that end in blocks in front of which these prefixes lie."""
        marks = ",".join("?" * len(blocks))
        with self.reading() as db:
            query = f"SELECT block, {_ITEM} FROM objects WHERE block IN ({marks}) AND root=?"
            rows = db.execute(query, (*blocks, root)).fetchall()
        out: dict[bytes, list[Item]] = {block: [] for block in blocks}
        for block, *row in rows:
            out[block].append(Item(*row))
        return out

    def items(self) -> list[Item]:
        """Every object."""
        with self.reading() as db:
            return [Item(*row) for row in db.execute(f"SELECT {_ITEM} FROM objects")]

    def counts(self) -> dict[tuple[bytes, int], tuple[int, int]]:
        """(root, kind) -> (number, bytes)."""
        with self.reading() as db:
            rows = db.execute("SELECT root, kind, COUNT(*), SUM(bytes) FROM objects GROUP BY root, kind").fetchall()
        return {(root, kind): (n, size) for root, kind, n, size in rows}

    def has(self, names: Sequence[bytes]) -> set[bytes]:
        """Which of these objects there are."""
        with self.reading() as db:
            return {n for n in names if db.execute("SELECT 1 FROM objects WHERE id=?", (n,)).fetchone()}

    def names(self) -> set[bytes]:
        """The names of all objects."""
        with self.reading() as db:
            return {row[0] for row in db.execute("SELECT id FROM objects")}

    def tick(self) -> int:
        """The present tick."""
        with self.reading() as db:
            return int(db.execute("SELECT value FROM meta WHERE key='tick'").fetchone()[0])

    def written(self) -> int:
        """Bytes that all processes have written to this store since its index was made."""
        with self.reading() as db:
            return int(db.execute("SELECT value FROM meta WHERE key='written'").fetchone()[0])

    # ---- changes -------------------------------------------------------------------------------------------------

    def insert(self, headers: Iterable[Header], weight: float = 2.0, db: sqlite3.Connection | None = None) -> None:
        """Objects whose files are in place."""
        if db is None:
            with self.writing() as own:
                return self.insert(headers, weight, own)
        tick = db.execute("SELECT value FROM meta WHERE key='tick'").fetchone()[0]
        db.executemany(
            "INSERT OR IGNORE INTO objects VALUES (?,?,?,?,?,?,?,?,?,?,?)",
            [
                (h.id, h.kind, h.root, h.parent, h.block, h.node, h.begin, h.end, disk_bytes(h.file_bytes), weight,
                 tick)
                for h in headers
            ],
        )

    def delete(self, names: Iterable[bytes]) -> None:
        """Forget objects."""
        with self.writing() as db:
            db.executemany("DELETE FROM objects WHERE id=?", [(n,) for n in names])

    def touch(self, uses: Iterable[Use], db: sqlite3.Connection) -> None:
        """Uses of objects: with each, time goes on by one tick."""
        for names, gain, factor, least in uses:
            now = db.execute("UPDATE meta SET value=value+1 WHERE key='tick' RETURNING value").fetchone()[0]
            for name in names:
                row = db.execute("SELECT score, tick FROM objects WHERE id=?", (name,)).fetchone()
                if row is not None:
                    score = max(least, decayed(row[0], row[1], now) * factor + gain)
                    db.execute("UPDATE objects SET score=?, tick=? WHERE id=?", (score, now, name))

    def used(self, db: sqlite3.Connection) -> int:
        """Bytes of all objects and of what living writers have reserved; a transaction forgets what dead ones had."""
        total = int(db.execute("SELECT COALESCE(SUM(bytes), 0) FROM objects").fetchone()[0])
        for rid, host, pid, size in db.execute("SELECT id, host, pid, bytes FROM reservations").fetchall():
            if host != HOST or alive(pid):
                total += size
            elif db.in_transaction:
                db.execute("DELETE FROM reservations WHERE id=?", (rid,))
        return total

    def shrink(self) -> None:
        """Bring the log back into the index file when it has grown beyond its limit."""
        with self.reading() as db:
            if self.path is not None and os.stat(f"{self.path}-wal").st_size > WAL_BYTES:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def file_bytes(self) -> int:
        """What the index itself takes on disk."""
        if self.path is None:
            return 0
        total = 0
        for ending in ("", "-wal", "-shm"):
            try:
                total += disk_bytes(os.stat(f"{self.path}{ending}").st_size)
            except FileNotFoundError:
                continue
        return total


@contextmanager
def _begun(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
