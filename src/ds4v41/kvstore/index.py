"""The index of a store: one SQLite file (WAL) that says which objects there are. The objects alone can rebuild it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import StoreError
from .files import HOST, alive, disk_bytes
from .format import ENCODER, FULL, PAGE, Header
from .policy import Item

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
MOST_SCORE = 1e9
_KINDS = frozenset({PAGE, FULL, ENCODER})
_HEADER = "id, kind, root, parent, block, node, begin, end, bytes"
_POSSIBLE = " AND ".join(
    [f"typeof({name})='blob' AND length({name})=32" for name in ("id", "root", "parent", "block", "node")]
    + [f"typeof({name})='integer' AND {name}>=0" for name in ("begin", "end", "bytes", "tick")]
    + [f"kind IN ({PAGE},{FULL},{ENCODER})", f"typeof(score)='real' AND score BETWEEN 0 AND {MOST_SCORE}"]
)
"""What every row of an object fulfils; `Index._item` asks the same of a row that is used."""
_ITEM = "id, kind, parent, node, begin, end, bytes, score, tick"


_NOT_NOW = frozenset(
    {
        sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOLFS,
    }
)  # fmt: skip
"""What the system or another process refuses; the index itself is as it should be."""
_DAMAGE = frozenset({sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS, sqlite3.SQLITE_READONLY_DBMOVED})
"""Extended codes of the above that do mean damage."""


class IndexRefused(StoreError):
    """The index cannot be read or written now: another process holds it, the disk is full or fails."""


class IndexDamaged(StoreError):
    """The index of this object cannot be used any more: damaged, moved or replaced. The objects can make a new one."""

    def __init__(self, index: Index, why: str) -> None:
        super().__init__(f"{index.path}: {why}")
        self.index, self.why = index, why


class Index:
    """Rows of the objects. Threads of a process share one; processes share the file.

    Every method raises IndexDamaged, IndexRefused or, after `close`, StoreError; never an error of sqlite3.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._ended = ""
        self._replaced = False
        self._file = self._identity()
        with self._told():
            self._db = self._connect()
        try:
            self.check()
        except BaseException:
            self._db.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        if self.path is not None and self.path.exists() and not stat.S_ISREG(os.stat(self.path).st_mode):
            raise IndexRefused(f"{self.path}: expected a file, found a folder, pipe or device; move it away: the index "
                               "is made again from the objects")  # fmt: skip
        db = sqlite3.connect(
            ":memory:" if self.path is None else self.path, timeout=60, isolation_level=None, check_same_thread=False
        )
        try:
            if self.path is not None:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=NORMAL")
                db.execute("PRAGMA wal_autocheckpoint=512")
                db.execute("PRAGMA cell_size_check=ON")
                db.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
                os.chmod(self.path, 0o600)
            with _begun(db):
                for statement in _SCHEMA.split(";\n"):
                    db.execute(statement)
                version = self._meta("version", db)
        except BaseException:
            db.close()
            raise
        if version != 1:
            db.close()
            raise StoreError(
                f"{self.path}: this index has version {version}; this program knows version 1. Use the program that "
                "wrote it, or move the index away: it is made again from the objects"
            )
        self._file = self._identity()
        return db

    def _identity(self) -> tuple[int, int] | None:
        if self.path is None:
            return None
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return None
        return now.st_dev, now.st_ino

    def unmoved(self) -> bool:
        """Is the file of this name still the one that was opened?"""
        return self._file == self._identity()

    def _own(self) -> sqlite3.Connection:
        """The connection of this process: a child of os.fork() must not use its parent's."""
        if self._ended:
            raise IndexDamaged(self, self._ended) if self._replaced else StoreError(f"{self.path}: {self._ended}")
        if os.getpid() != self._pid and self.path is not None:
            self._pid = os.getpid()
            self._lock = threading.RLock()
            self._db = self._connect()
        if not self.unmoved():
            raise IndexDamaged(self, "the file was moved or deleted while it was open")
        return self._db

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What SQLite raises, as what it means for a store."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            says_so_itself = code == sqlite3.SQLITE_READONLY and self.path is not None and os.access(self.path, os.W_OK)
            if code is not None and code & 0xFF in _NOT_NOW and code not in _DAMAGE and not says_so_itself:
                raise IndexRefused(f"{self.path}: the index cannot be used now: {error}. {_advice(code)}") from error
            raise IndexDamaged(self, str(error)) from error
        except UnicodeDecodeError as error:  # a message that quotes damaged text
            raise IndexDamaged(self, "its schema is no text") from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for statements that do not change anything."""
        with self._lock, self._told():
            yield self._own()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other process can come between."""
        with self._lock, self._told():
            db = self._own()
            with _begun(db):
                yield db

    def close(self, why: str = "") -> None:
        """Close the connection. why: another index takes its place; who still uses this one is told so."""
        with self._lock:
            self._ended, self._replaced = why or "this store is closed; open it again with KVStore(path)", bool(why)
            with contextlib.suppress(sqlite3.Error):
                self._db.close()

    def check(self) -> None:
        """Raises IndexDamaged unless the file is whole and every row holds what its column should."""
        if self.path is None:
            return
        with self.reading() as db:
            problems = db.execute("PRAGMA integrity_check(1)").fetchone()
            if problems is None or problems[0] != "ok":
                raise IndexDamaged(self, str(problems and problems[0]))
            self._expect(db.execute(f"SELECT 1 FROM objects WHERE NOT ({_POSSIBLE})").fetchone() is None, "an object")
            for row in db.execute("SELECT id, host, pid, bytes FROM reservations"):
                self._expect(isinstance(row[1], str) and all(_is_count(row[i]) for i in (0, 2, 3)), "a reservation")
        self.tick()
        self.written()

    def _expect(self, right: bool, what: str) -> None:
        if not right:
            raise IndexDamaged(self, f"the row of {what} holds values that it cannot have")

    def _item(self, row: Sequence[object]) -> Item:
        item = Item(*row)  # type: ignore[arg-type]
        self._expect(
            all(_is_name(name) for name in (item.id, item.parent, item.node))
            and all(_is_count(n) for n in (item.kind, item.begin, item.end, item.bytes, item.tick))
            and item.kind in _KINDS and item.begin <= item.end
            and isinstance(item.score, float) and 0 <= item.score <= MOST_SCORE,
            "an object",
        )  # fmt: skip
        return item

    def _meta(self, key: str, db: sqlite3.Connection) -> int:
        row = db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        self._expect(row is not None and _is_count(row[0]), f"meta {key}")
        return int(row[0])

    # ---- what there is -----------------------------------------------------------------------------------------

    def of_blocks(self, blocks: Sequence[bytes], root: bytes) -> dict[bytes, list[Item]]:
        """Objects that end in blocks in front of which these prefixes lie."""
        marks = ",".join("?" * len(blocks))
        with self.reading() as db:
            query = f"SELECT block, {_ITEM} FROM objects WHERE block IN ({marks}) AND root=?"
            rows = db.execute(query, (*blocks, root)).fetchall()
        out: dict[bytes, list[Item]] = {block: [] for block in blocks}
        for block, *row in rows:
            self._expect(block in out, "an object")  # the key says one thing, the row another
            out[block].append(self._item(row))
        return out

    def items(self) -> list[Item]:
        """Every object."""
        with self.reading() as db:
            return [self._item(row) for row in db.execute(f"SELECT {_ITEM} FROM objects")]

    def counts(self) -> dict[tuple[bytes, int], tuple[int, int]]:
        """(root, kind) -> (number, bytes)."""
        with self.reading() as db:
            rows = db.execute("SELECT root, kind, COUNT(*), SUM(bytes) FROM objects GROUP BY root, kind").fetchall()
        for root, _, _, size in rows:
            self._expect(_is_name(root) and _is_count(size), "an object")
        return {(root, kind): (n, size) for root, kind, n, size in rows}

    def has(self, names: Sequence[bytes]) -> set[bytes]:
        """Which of these objects there are."""
        with self.reading() as db:
            return {n for n in names if db.execute("SELECT 1 FROM objects WHERE id=?", (n,)).fetchone()}

    def agrees(self, header: Header) -> bool:
        """Does the row of an object say what its file says? True also without a row."""
        with self.reading() as db:
            row = db.execute(f"SELECT {_HEADER} FROM objects WHERE id=?", (header.id,)).fetchone()
        return row is None or tuple(row) == _row(header)

    def sizes(self) -> dict[bytes, int]:
        """The names of all objects and what each takes on disk."""
        with self.reading() as db:
            found = dict(db.execute("SELECT id, bytes FROM objects").fetchall())
        self._expect(all(map(_is_name, found)) and all(map(_is_count, found.values())), "an object")
        return found

    def tick(self) -> int:
        """The present tick."""
        with self.reading() as db:
            return self._meta("tick", db)

    def written(self) -> int:
        """Bytes that all processes have written to this store since its index was made."""
        with self.reading() as db:
            return self._meta("written", db)

    # ---- changes -------------------------------------------------------------------------------------------------

    def insert(self, headers: Iterable[Header], weight: float = 2.0, db: sqlite3.Connection | None = None) -> None:
        """Objects whose files are in place."""
        if db is None:
            with self.writing() as own:
                return self.insert(headers, weight, own)
        tick = self._meta("tick", db)
        db.executemany(
            "INSERT INTO objects VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT(id) DO UPDATE SET kind=excluded.kind, "
            "root=excluded.root, parent=excluded.parent, block=excluded.block, node=excluded.node, "
            "begin=excluded.begin, end=excluded.end, bytes=excluded.bytes",
            [(*_row(h), weight, tick) for h in headers],
        )

    def delete(self, names: Iterable[bytes]) -> None:
        """Forget objects."""
        with self.writing() as db:
            db.executemany("DELETE FROM objects WHERE id=?", [(n,) for n in names])

    def touch(self, uses: Iterable[Use], db: sqlite3.Connection) -> None:
        """Uses of objects: with each, time goes on by one tick."""
        for names, gain, factor, least in uses:
            db.execute("UPDATE meta SET value=value+1 WHERE key='tick'")
            now = self._meta("tick", db)
            for name in names:
                row = db.execute(f"SELECT {_ITEM} FROM objects WHERE id=?", (name,)).fetchone()
                if row is not None:
                    score = max(least, self._item(row).value(now) * factor + gain)
                    db.execute("UPDATE objects SET score=?, tick=? WHERE id=?", (score, now, name))

    def object_bytes(self, db: sqlite3.Connection) -> int:
        """Bytes of all objects."""
        found = db.execute("SELECT COALESCE(SUM(bytes), 0) FROM objects").fetchone()[0]
        self._expect(_is_count(found), "an object")
        return int(found)

    def used(self, db: sqlite3.Connection) -> int:
        """Bytes of all objects and of what living writers have reserved; a transaction forgets what dead ones had."""
        total = self.object_bytes(db)
        for rid, host, pid, size in db.execute("SELECT id, host, pid, bytes FROM reservations").fetchall():
            self._expect(isinstance(host, str) and _is_count(pid) and _is_count(size), "a reservation")
            if host != HOST or alive(pid):
                total += size
            elif db.in_transaction:
                db.execute("DELETE FROM reservations WHERE id=?", (rid,))
        return total

    def shrink(self) -> None:
        """Bring the log back into the index file when it has grown beyond its limit."""
        with self.reading() as db, contextlib.suppress(FileNotFoundError):
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


def _row(h: Header) -> tuple[object, ...]:
    return (h.id, h.kind, h.root, h.parent, h.block, h.node, h.begin, h.end, disk_bytes(h.file_bytes))


def _is_name(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == 32


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _advice(code: int) -> str:
    """What to do about a refusal of SQLite."""
    kind = code & 0xFF
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
        return "Another process holds it: try again, or end that process"
    if kind == sqlite3.SQLITE_FULL:
        return "Make room on the disk"
    return "Look at the disk and the rights of the folder; a folder on a local disk is needed"
