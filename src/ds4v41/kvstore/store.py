"""KVStore: states of conversations by prefix, in a folder or in memory, within a budget."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from ..checks import path_of
from ..errors import OptionError, StoreError, shown
from ..machine import human, parse_bytes
from .files import Files, disk_bytes
from .find import Found, find
from .format import ENCODER, FULL, KIND_NAMES, PAGE, Prefixes
from .index import Index, IndexDamaged, IndexRefused, Use
from .memory_files import MemoryFiles
from .mending import mended, open_index, set_aside
from .objects import new_frontier, new_pages, read_object
from .policy import Item, off_ladder
from .remote import WORTH_ASKING, Remote
from .results import PruneResult, PutResult, StoreStats, VerifyResult
from .room import Room
from .sender import Sender
from .sizes import default_budget
from .upkeep import Upkeep

if TYPE_CHECKING:
    from .. import _ext

log = logging.getLogger("ds4v41.kvstore")
RESCAN_PUTS = 64
USES_AT_ONCE = 64
FILES_AT_ONCE = 64
"""Files that a restore has open together."""
FRESH = 2.0
"""Score of what has just been put."""


class KVStore:
    """Pages and frontiers of conversations, found again by their tokens.

    path: a folder (made with mode 0700), shared by any number of processes; None keeps everything in memory, shared
        by the sessions of this process.
    budget: bytes, or text such as "64 GiB"; everything below the folder counts. None: 64 GiB or a quarter of the free
        disk, whichever is less (1 GiB in memory).
    memory: bytes of a second tree in memory, above the folder's: what sessions of this process put is there as well,
        and is taken from there first. None: no such tree.
    remote: the URL of a shared folder behind this one, for any file system of fsspec ("s3://bucket/folder"; needs
        `ds4v41[remote]`): what is put is sent there too, in the background (`flush` waits for it), and what is missing
        here is looked for there. The budget does not count it, and nothing is deleted there.
    read_only: never write to the folder; puts are kept in `memory` or say that they were not kept. A folder that cannot
        be written to is opened like this by itself, with a warning.

    Opening never deletes anything. Raises StoreError when the folder cannot be made or read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        budget: int | str | None = None,
        *,
        memory: int | str | None = None,
        remote: str | None = None,
        read_only: bool = False,
    ) -> None:
        if isinstance(path, str) and "://" in path:
            raise OptionError(f"path: expected a local folder, found {shown(path)}; give the URL as remote=")
        self.path = None if path is None else path_of("path", path)
        if not isinstance(read_only, bool):
            raise OptionError(f"read_only: expected True or False, found {shown(read_only)}")
        if path is None and (memory is not None or read_only):
            raise OptionError("memory and read_only go with a path: a store without one is all memory")
        if remote is not None and read_only:
            raise OptionError("remote and read_only do not go together: what comes from there is kept in the folder")
        self._remote = None if remote is None else Remote(remote, self.path)
        self._above = None if memory is None else KVStore(None, parse_bytes("memory", memory, 1))
        self._no_writes = "read_only=True" if read_only else ""
        self._given = None if budget is None else parse_bytes("budget", budget, 1)
        self._files: Files | MemoryFiles = MemoryFiles() if self.path is None else Files(self.path)
        self._sender = None if self._remote is None else Sender(self._remote, partial(read_object, self._files))
        self._lock = threading.RLock()
        self._damaged: list[str] = []
        self._restored = 0
        self._uses: list[Use] = []
        self._puts = 0
        self._open()
        self._begin()

    def _open(self) -> None:
        if self.path is not None and not self._no_writes:
            self._no_writes = self._files.why_not_writable()
            if self._no_writes:
                what = "put there, nor taken from the remote" if self._remote else "put there"
                log.warning("%s is opened read-only (%s): nothing will be %s", self.path, self._no_writes, what)
        if self.path is None:
            self._index = Index(None)
        elif self._no_writes:
            if not os.path.isdir(self.path / "objects"):
                raise StoreError(f"{self.path}: there is no store here, and none can be made ({self._no_writes})")
            self._index = Index(None)  # made from the objects: SQLite would have to write beside its file
        else:
            try:
                self._files.create()
                self._index, report = open_index(self.path)
                self._damaged += [report] if report else []
            except StoreError:
                raise
            except PermissionError as error:
                raise StoreError(f"{self.path}: this folder cannot be written to ({error.strerror})") from error
            except (FileExistsError, NotADirectoryError) as error:
                what = "a link to nowhere" if os.path.islink(error.filename) else "a file"
                raise StoreError(f"{self.path}: expected a folder, found {what}: {error.filename}") from error
            except OSError as error:
                raise StoreError(f"{self.path}: cannot be used as a store: {error}") from error
        self._look_after()

    def _look_after(self) -> None:
        self._upkeep = Upkeep(self._files, self._index)
        self._room = Room(self._files, self._index, self._upkeep, str(self.path or "memory"))

    @mended
    def _begin(self) -> None:
        self._upkeep.adopt()
        self.budget = self._given or self._usual_budget()
        self._warn_once()

    def _usual_budget(self) -> int:
        return 1 << 30 if self.path is None else default_budget(self.path, self._room.overhead())

    def _mend(self, error: IndexDamaged) -> None:
        """Make the index again from the objects, unless another thread has done it since."""
        with self._lock:
            if error.index is not self._index:
                return
            self._index.close("another index takes its place")
            if self.path is None or self._no_writes:  # it is in memory; what lies in the folder is others' business
                self._index = Index(None)
            else:
                first = set_aside(self.path / "index.sqlite", error)
                self._index, again = open_index(self.path)
                self._damaged += filter(None, (first, again))
            self._look_after()
            self._upkeep.adopt()

    def _warn_once(self) -> None:
        used = self._room.usage()
        if used > self.budget:
            log.warning(
                "%s holds %s, more than its budget of %s: prune(), or the next put, deletes the least useful",
                self.path, human(used), human(self.budget),
            )  # fmt: skip

    # ---- looking ----------------------------------------------------------------------------------------------

    @property
    def read_only(self) -> str:
        """Why nothing is written to the folder, if so."""
        return self._no_writes

    @mended
    def find(self, prefixes: Prefixes, partial: bool = True) -> Found:
        """What is stored of these tokens, in the folder and in the memory above it; nothing, with a warning, while the
        index cannot be read (no call fails for it)."""
        try:
            found = self._find_both(prefixes, partial)
            if self._remote is not None and self._take_in(self._remote, prefixes, found):
                found = self._find_both(prefixes, partial)
            return found
        except IndexRefused as error:
            log.warning("%s", error)
            return Found()

    def _find_both(self, prefixes: Prefixes, partial: bool) -> Found:
        above = self._above
        if above is None:
            return self._find_here(prefixes, partial)

        def of_blocks(blocks: Sequence[bytes], root: bytes) -> dict[bytes, list[Item]]:
            here, there = self._index.of_blocks(blocks, root), above._index.of_blocks(blocks, root)
            return {b: list({item.id: item for item in (*here[b], *there[b])}.values()) for b in blocks}

        return find(of_blocks, lambda name: self._holder(name)._files.tokens(name), prefixes, partial)

    def _find_here(self, prefixes: Prefixes, partial: bool) -> Found:
        return find(self._index.of_blocks, self._files.tokens, prefixes, partial)

    def _take_in(self, remote: Remote, prefixes: Prefixes, found: Found) -> bool:
        """Fetch what the remote knows of these tokens beyond what was found here; True if there was anything."""
        if len(prefixes) - max([0, *found.frontiers]) < WORTH_ASKING or self._no_writes or not remote.awake():
            return False
        path = {item.id for item in (*found.pages, *found.all_frontiers())}
        before = len(path)
        try:
            for thing in remote.beyond(found, prefixes):  # without the lock: others need not wait for the network
                with self._lock:
                    kept = self._room.keep([thing], self.budget, path, FRESH)
                if kept is None:
                    log.warning("%s: the budget leaves no room for more of what %s has", self.path, remote.url)
                    break
                path.add(thing[0].id)
                if self._sender is not None:
                    self._sender.came_from_there((thing[0].id, thing[0].kind))
        except IndexDamaged:
            raise
        except OSError as error:
            log.warning("%s: what %s has is not kept: %s", self.path, remote.url, error)
        return len(path) > before

    def _holder(self, name: bytes) -> KVStore:
        """The tree that an object is taken from."""
        return self if self._above is None or not self._above._index.has([name]) else self._above

    def restore(
        self, session: _ext.Session, tokens: NDArray[np.int32], pages: Sequence[Item], frontier: Item | None = None
    ) -> None:
        """Finish a restore that has begun: the rows of pages that follow each other, the tokens, and perhaps the window
        rows of a frontier at the end. Raises StoreError for an object that is damaged or gone, after dropping it."""
        if pages:
            session.expect_rows(pages[-1].end)
        for at in range(0, len(pages) - FILES_AT_ONCE, FILES_AT_ONCE):
            self._read(session, pages[at : at + FILES_AT_ONCE], None, None)
        self._read(session, pages[(len(pages) - 1) // FILES_AT_ONCE * FILES_AT_ONCE :], tokens, frontier)
        if pages:
            self._restored += pages[-1].end - pages[0].begin

    def _read(
        self, session: _ext.Session, pages: Sequence[Item], tokens: NDArray[np.int32] | None, frontier: Item | None
    ) -> None:
        """Some pages, all on the way at once; with tokens the last of them."""
        items = [*pages, frontier] if frontier else pages
        open_files: list[int] = []
        sources: list[tuple[int, int, int, int, int, NDArray[np.uint8] | None]] = []
        window, in_memory, names = None, None, []
        item = None
        try:
            for item in items:
                files = self._holder(item.id)._files
                if isinstance(files, MemoryFiles):
                    header, data = files.both(item.id, item.kind)
                    fd = -1
                else:
                    fd, header = files.open(item.id, item.kind)
                    open_files.append(fd)
                    data = None
                names.append(header.source)
                if (header.begin, header.end, header.node) != (item.begin, item.end, item.node):
                    self._mend(IndexDamaged(self._index, f"it contradicts the header of {header.source}"))
                    raise IndexRefused(f"{header.source}: the index had other positions for it, and was made again")
                if item is frontier:
                    window, in_memory = (fd, header.payload_offset, header.payload_bytes, header.payload_sum), data
                elif header.payload_bytes != session.rows_bytes(header.begin, header.end):
                    raise StoreError(f"{header.source}: the rows have another size than this model's")
                else:
                    sources.append((header.begin, header.end, fd, header.payload_offset, header.payload_sum, data))
            bad = session.read_pages(sources, tokens, None if in_memory is not None else window)
            if bad is not None:
                item = items[bad[0]]
                raise StoreError(f"{names[bad[0]]}: {bad[1]}")
            if in_memory is not None:
                session.import_frontier(in_memory)
        except (StoreError, OSError) as error:
            if item is None or isinstance(error, IndexRefused):
                raise
            self._holder(item.id)._drop(item, error)
        finally:
            for fd in open_files:
                os.close(fd)

    def _drop(self, item: Item, error: Exception) -> NoReturn:
        """What is damaged is deleted and named, never used."""
        if not isinstance(error, (StoreError, FileNotFoundError)):
            raise StoreError(f"{error}: the store cannot be read now") from error
        with contextlib.suppress(OSError):
            self._index.delete([item.id])
            if not self._no_writes:
                self._room.unlink([item])
        if not isinstance(error, FileNotFoundError):
            text = f"{KIND_NAMES[item.kind]} of positions {item.begin:,} to {item.end:,}: {error}"
            self._damaged.append(text)
            log.warning("dropped a damaged %s", text)
        raise StoreError(str(error)) from error

    def touch(self, items: Sequence[Item], gain: float = 1.0, factor: float = 1.0, least: float = FRESH) -> None:
        """These were useful: they stay longer. Written down with the next put, or when some have come together."""
        if self._above is not None:
            self._above.touch(items, gain, factor, least)
        with self._lock:
            self._uses.append(([item.id for item in items], gain, factor, least))
            if len(self._uses) >= USES_AT_ONCE:
                self._write_uses()

    def _write_uses(self) -> None:
        uses, self._uses = self._uses, []
        if uses:
            with contextlib.suppress(StoreError), self._index.writing() as db:
                self._index.touch(uses, db)

    # ---- putting -----------------------------------------------------------------------------------------------

    @mended
    def put(
        self, session: _ext.Session, prefixes: Prefixes, numerics: str, *, frontier: bool = True, weight: float = FRESH
    ) -> PutResult:
        """Store what is new of a session's state: the rows behind the deepest stored position, and a frontier.

        Never raises for a full or failing disk: the result says what was not kept, and why.
        """
        if len(prefixes) == 0:
            return PutResult(0, True)
        above = None
        if self._above is not None:
            above = self._above._put_here(session, prefixes, numerics, frontier, weight, self.find(prefixes, False))
        if self._no_writes:
            result = PutResult(len(prefixes), False, why=f"not kept: the store is read-only ({self._no_writes})")
        else:
            result = self._put_here(session, prefixes, numerics, frontier, weight, None)
        if above is not None and above.kept and not result.kept:
            return replace(above, why=f"in memory only; in the folder {result.why}")
        return result

    def _put_here(
        self,
        session: _ext.Session,
        prefixes: Prefixes,
        numerics: str,
        frontier: bool,
        weight: float,
        found: Found | None,
    ) -> PutResult:
        position = len(prefixes)
        with self._lock:
            try:
                found = self._find_here(prefixes, False) if found is None else found
                result = self._put(session, prefixes, numerics, frontier, weight, found)
                if self._room.over(self.budget):
                    self._write_uses()
                    result = replace(result, deleted=result.deleted + self._room.trim(self.budget))
                return result
            except IndexDamaged:
                raise
            except OSError as error:
                why = f"not kept: {error}"
                log.warning("%s: checkpoint at %s %s", self.path or "memory", position, why)
                return PutResult(position, False, why=why)

    def _put(
        self, session: _ext.Session, prefixes: Prefixes, numerics: str, frontier: bool, weight: float, found: Found
    ) -> PutResult:
        """found: what need not be put."""
        position = len(prefixes)
        new = [*new_pages(session, prefixes, numerics, found.whole)]
        there = found.frontiers.get(position) or (None if session.ready else found.encoders.get(position))
        if frontier and (there is None or self._lacks_drafter(there, session)):
            new.append(new_frontier(session, prefixes, numerics))
        path = [*found.pages, *found.all_frontiers()]
        if self._sender is not None:  # what another process could not send, too
            self._sender.add((item.id, item.kind) for item in (*found.pages, *([there] if there else [])))
        if not new:
            self.touch([*found.pages, *([there] if frontier and there else [])], 0.0)
            return PutResult(position, True, why="it was stored before")
        self._puts += 1
        if self._puts % RESCAN_PUTS == 0:
            self._upkeep.adopt()
        self._write_uses()
        thinned = self._thin(found, position)
        kept = self._room.keep(new, self.budget, {item.id for item in path} - thinned, weight)
        if kept is None:
            need = human(sum(disk_bytes(header.file_bytes) for header, _, _ in new))
            return PutResult(
                position, False, why=f"not kept: it takes {need}, the budget of {human(self.budget)} leaves less"
            )
        size, deleted = kept
        if self._sender is not None:
            self._sender.add([(header.id, header.kind) for header, _, _ in new], changed=True)
        self.touch(found.pages, 0.0)
        # What lies behind the tip is needed less: it is there for rewinds only.
        behind = [f for f in found.all_frontiers() if f.end < position and f.value(f.tick) <= FRESH]
        self.touch(behind, 0.0, 0.5, 0.0)
        return PutResult(position, True, size, deleted + len(thinned))

    def _lacks_drafter(self, there: Item, session: _ext.Session) -> bool:
        """Does the session know more rows of its drafter than the frontier that is stored at its position?"""
        if there.kind != FULL or not session.ready or session.draft_context == 0:
            return False
        try:
            return self._files.drafter_rows(there.id) < session.draft_context
        except FileNotFoundError:
            return True

    def _thin(self, found: Found, tip: int) -> set[bytes]:
        """Frontiers of this chain that its ladder has no place for any more."""
        now = self._index.tick()
        there = found.all_frontiers()
        kept = [f.end for f in there if f.value(now) > FRESH]  # others came this way too
        off = set(off_ladder([*(f.end for f in there), tip], tip, kept))
        # Where the decoder's rows are as well, the encoder's alone are of no use.
        gone = [f for f in there if f.end in off or (f.kind == ENCODER and f.end in found.frontiers)]
        if gone:
            self._index.delete([item.id for item in gone])
            self._room.unlink(gone)
        return {item.id for item in gone}

    # ---- looking after it ----------------------------------------------------------------------------------------

    @mended
    def stats(self) -> StoreStats:
        """Counts and bytes, now."""
        counts = self._index.counts()
        self._upkeep.scan()
        pages = [v for (_, kind), v in counts.items() if kind == PAGE]
        others = [v for (_, kind), v in counts.items() if kind != PAGE]
        return StoreStats(
            path=str(self.path) if self.path else "memory",
            budget=self.budget,
            disk_bytes=self._room.usage(),
            pages=sum(n for n, _ in pages),
            page_bytes=sum(size for _, size in pages),
            frontiers=sum(n for n, _ in others),
            frontier_bytes=sum(size for _, size in others),
            roots=len({root for root, _ in counts}),
            foreign_bytes=self._upkeep.foreign,
            written_bytes=self._index.written(),
            restored_tokens=self._restored,
            damaged=(*self._damaged, *(self._remote.reports if self._remote else ())),
            remote=self._sender.state if self._sender else "",
            memory_bytes=0 if self._above is None else self._above._room.usage(),
            read_only=self._no_writes,
        )

    @mended
    def other_bytes(self, root: bytes) -> int:
        """Bytes that belong to other models, modes or formats than this root's."""
        return sum(size for (other, _), (_, size) in self._index.counts().items() if other != root)

    @mended
    def prune(self, *, budget: int | str | None = None, dry_run: bool = False) -> PruneResult:
        """Bring the store below its budget (or a smaller one, this once); list what goes, or with dry_run would go.
        Also removes what dead writers left, and takes in objects that the index does not know."""
        limit = self.budget if budget is None else parse_bytes("budget", budget, 1)
        if self._no_writes and not dry_run:
            raise StoreError(f"{self.path}: cannot be pruned, the store is read-only ({self._no_writes})")
        with self._lock:
            self._write_uses()
            adopted = self._upkeep.adopt()
            leftovers = [] if dry_run else self._upkeep.sweep()
            chosen = self._room.surplus(limit)
            if not dry_run:
                self._room.delete(chosen)
            names = tuple(f"{KIND_NAMES[i.kind]} {i.begin}-{i.end} {i.id.hex()[:16]}" for i in chosen)
            freed = sum(item.bytes for item in chosen)
            return PruneResult(dry_run, names, freed, adopted, len(leftovers), self._room.usage(), limit)

    @mended
    def verify(self) -> VerifyResult:
        """Read every object, here and in the remote, and compare every checksum; deletes nothing. What waits to be
        sent is sent first."""
        if self._remote is not None:
            self._remote.wake()  # somebody wants to know now
        sent = self.flush()
        here = self._upkeep.verify()
        n, size, faults = self._remote.verify() if self._remote is not None else (0, 0, [])
        faults += [] if sent or self._sender is None else [f"remote: {self._sender.state}"]
        return replace(here, checked=here.checked + n, bytes=here.bytes + size, damaged=(*here.damaged, *faults))

    @property
    @mended
    def tick(self) -> int:
        """The store's own time: it goes on by one with each use."""
        return self._index.tick()

    @mended
    def ls(self) -> list[Item]:
        """Every object, by position."""
        return sorted(self._index.items(), key=lambda i: (i.begin, i.end, i.id))

    def flush(self) -> bool:
        """Wait until what this process put is in the remote as well; False when that fails (`stats().remote` says why).
        Without a remote there is nothing to wait for: a put that returned is on the disk."""
        return self._sender is None or self._sender.flush()

    def close(self) -> None:
        """Close the index, after what waits for a remote that answers has been sent; the store stays on disk."""
        if self._above is not None:
            self._above.close()
        try:
            if self._sender is not None:
                self._sender.close()
                if self._sender.waiting:
                    log.warning("closed before all was sent: %s", self._sender.state)
        finally:  # also when somebody is tired of waiting
            self._write_uses()
            self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        more = f", read-only ({self._no_writes})" if self._no_writes else ""
        more += f", {self._remote.url} behind it" if self._remote is not None else ""
        more += f", {human(self._above.budget)} in memory above it" if self._above is not None else ""
        return f"<KVStore {self.path or 'in memory'}: budget {human(self.budget)}{more}>"
