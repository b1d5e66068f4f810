"""A shared file system behind a store (`KVStore(folder, remote="s3://...")`): objects by name, through fsspec.

Objects lie at `<url>/<name of the block>/<begin>-<end>.<name>.<kind>`: which there are follows from one listing a
block, and whether one belongs to a prompt from the prompt's tokens alone. Nothing is ever deleted there.
"""

from __future__ import annotations

import logging
import re
import time
from asyncio import CancelledError
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError, StoreError, shown
from .find import Found
from .format import BLOCK, ENCODER, FULL, HEADER_BYTES, KIND_NAMES, PAGE, Header, Prefixes, checksum
from .format import frontier_id as name_of_frontier
from .format import page_id as name_of_page
from .objects import Object

log = logging.getLogger("ds4v41.kvstore")
PAUSE = 60.0
"""Seconds for which a remote that failed is left alone."""
WORTH_ASKING = 64
"""The remote is asked when at least so many tokens would have to be run."""
_NAME = re.compile(r"([0-9a-f]{64})/(\d{1,18})-(\d{1,18})\.([0-9a-f]{64})\.(page|full|encoder)")
_KINDS = {name: kind for kind, name in KIND_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One object there."""

    path: str
    block: bytes
    begin: int
    end: int
    id: bytes
    kind: int

    def belongs_to(self, prefixes: Prefixes) -> bool:
        """Is it about a prefix of these tokens?"""
        if not self.begin <= self.end <= len(prefixes) or (self.kind == PAGE) is (self.begin == self.end):
            return False
        node = prefixes.node(self.end)
        if self.kind == PAGE:
            return self.id == name_of_page(prefixes.node(self.begin), node)
        return self.id == name_of_frontier(node, self.kind)


class Remote:
    """A folder of an fsspec file system. A failure never raises: it is reported (`state`, log), and the remote left
    alone for a minute (`awake`)."""

    def __init__(self, url: str, folder: Path | None = None) -> None:
        """folder: of the store in front of it, which must not hold it."""
        if not isinstance(url, str) or "://" not in url:
            raise OptionError(f"remote: expected a URL such as s3://bucket/folder, found {shown(url)}")
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise OptionError("remote: needs the package fsspec: pip install 'ds4v41[remote]'") from error
        try:
            self._fs, self._base = url_to_fs(url)
        except Exception as error:  # a file system's constructor may raise anything
            raise OptionError(f"remote: {shown(url)}: {_words(error)}") from error
        near = url.startswith(("file://", "local://"))
        if near and folder is not None and Path(self._base).resolve().is_relative_to(folder.resolve()):
            raise OptionError(f"remote: {shown(url)} lies in the store's own folder, {folder}; give another place")
        self.url = url
        self.reports: list[str] = []
        """Damaged objects that were met."""
        self.sent_bytes = self.fetched_bytes = 0
        self._bad: set[bytes] = set()
        self._failed = ""
        self.until = 0.0
        """Left alone until then (time.monotonic)."""

    @property
    def state(self) -> str:
        """In words: reachable as far as is known, or what failed last."""
        return f"{self.url}: {self._failed or 'no failure'}"

    def awake(self) -> bool:
        """Is it worth a try?"""
        return time.monotonic() >= self.until

    def wake(self) -> None:
        """Try again now."""
        self.until = 0.0

    def _fail(self, doing: str, error: BaseException) -> None:
        self._failed = f"{doing} failed: {_words(error)}"
        self.until = time.monotonic() + PAUSE
        log.warning("%s: %s; left alone for %d s", self.url, self._failed, PAUSE)

    def _path(self, header: Header) -> str:
        name = f"{header.begin}-{header.end}.{header.id.hex()}.{KIND_NAMES[header.kind]}"
        return f"{self._base}/{header.block.hex()}/{name}"

    # ---- from there ----------------------------------------------------------------------------------------------

    def beyond(self, found: Found, prefixes: Prefixes) -> Iterator[Object]:
        """Objects that bring these tokens further than what was found here: pages in order, then the deepest frontier.
        Ends early when an object is damaged or the remote fails."""
        try:
            pages, frontiers = self._choose(found, prefixes)
            reached = found.whole
            for entry in pages:
                thing = self._fetch(entry, prefixes)
                if thing is None:
                    break
                reached = entry.end
                yield thing
            known = max([0, *found.frontiers, *found.encoders])
            for entry in sorted(frontiers, key=lambda e: (-e.end, e.kind)):
                if known < entry.end <= reached and (thing := self._fetch(entry, prefixes)) is not None:
                    yield thing
                    if entry.kind == FULL:
                        break
                    known = 0  # the encoder's windows alone: the deepest full frontier as well
        except (Exception, CancelledError) as error:  # whatever a file system may raise
            self._fail("reading", error)

    def _choose(self, found: Found, prefixes: Prefixes) -> tuple[list[Entry], list[Entry]]:
        """The chain of pages behind what is here, and all frontiers on the way."""
        behind: dict[int, Entry | None] = {0: None}
        behind.update({page.end: None for page in found.pages if page.end <= found.whole})
        frontiers: list[Entry] = []
        block = max(0, found.whole - 1) // BLOCK
        while block * BLOCK < len(prefixes) and block * BLOCK in behind:
            for entry in sorted(self._listing(prefixes.start(block)), key=lambda e: (e.end, e.begin)):
                if not entry.belongs_to(prefixes):
                    continue
                if entry.kind != PAGE:
                    frontiers.append(entry)
                elif entry.begin in behind and entry.end not in behind:
                    behind[entry.end] = entry
            block += 1
        pages: list[Entry] = []
        at = max(behind)
        while (entry_at := behind[at]) is not None:
            pages.append(entry_at)
            at = entry_at.begin
        return pages[::-1], frontiers

    def _listing(self, block: bytes) -> list[Entry]:
        folder = f"{self._base}/{block.hex()}"
        self._fs.invalidate_cache(folder)
        try:
            return [e for info in self._fs.ls(folder, detail=True) if (e := self._entry(info)) is not None]
        except FileNotFoundError:
            return []

    @staticmethod
    def _entry(info: dict[str, Any]) -> Entry | None:
        match = _NAME.search(str(info["name"]))
        if match is None or info.get("type", "file") != "file":  # a pipe would never answer
            return None
        block, begin, end, name, kind = match.groups()
        names = bytes.fromhex(block), int(begin), int(end), bytes.fromhex(name)
        return Entry(str(info["name"]), *names, _KINDS[kind])

    def _fetch(self, entry: Entry, prefixes: Prefixes | None) -> Object | None:
        """One object, every sum checked; None, with a report, for a damaged one or one that has just gone."""
        try:
            data = np.frombuffer(self._fs.cat_file(entry.path), np.uint8)
            self.fetched_bytes += len(data)
            return checked(data, entry, prefixes)
        except FileNotFoundError:
            return None
        except StoreError as error:
            self._bad.add(entry.id)
            self.reports.append(f"remote: {error}")
            log.warning("not used: %s", error)
            return None

    # ---- to there ------------------------------------------------------------------------------------------------

    def send(self, thing: Object) -> bool:
        """Write an object that is not there yet, or over one that is damaged or shorter there; False when it failed."""
        try:
            self._send(*thing)
        except BaseException as error:  # whatever a file system may raise; and this thread is nobody else's
            self._fail("writing", error)
            return False
        self._failed = ""
        return True

    def _send(self, header: Header, tokens: NDArray[np.int32], payload: NDArray[np.uint8]) -> None:
        path = self._path(header)
        folder = path.rpartition("/")[0]
        self._fs.invalidate_cache(folder)
        try:
            there = int(self._fs.info(path)["size"] or 0)
        except FileNotFoundError:
            there = -1
        if there < header.file_bytes or header.id in self._bad:
            self._fs.makedirs(folder, exist_ok=True)
            # Where the file system can, the name appears when all is written; elsewhere the sums tell.
            with self._fs.open(path, "wb", autocommit=False) as file:
                for part in (header.pack(), tokens.tobytes(), payload.tobytes()):
                    file.write(part)
            file.commit()
            self.sent_bytes += header.file_bytes
            self._bad.discard(header.id)

    # ---- looking after it ----------------------------------------------------------------------------------------

    def verify(self) -> tuple[int, int, list[str]]:
        """Read everything there: (objects, bytes, faults)."""
        checked_objects = total = 0
        faults: list[str] = []
        try:
            self._fs.invalidate_cache()
            if self._fs.isfile(self._base):
                faults.append(f"remote: {self.url}: expected a folder, found a file")
            folders = self._fs.ls(self._base, detail=True)  # (find() leaves out what cannot be listed)
            names = [f["name"] for f in folders if f.get("type") == "directory"]
            for info in (info for name in names for info in self._fs.ls(name, detail=True)):
                entry = self._entry(info)
                if entry is None:
                    continue
                try:
                    data = np.frombuffer(self._fs.cat_file(entry.path), np.uint8)
                    checked(data, entry, None)
                    checked_objects, total = checked_objects + 1, total + len(data)
                except StoreError as error:
                    self._bad.add(entry.id)
                    faults.append(f"remote: {error}")
        except FileNotFoundError:
            pass  # nothing was ever sent
        except (Exception, CancelledError) as error:  # whatever a file system may raise
            self._fail("reading", error)
            faults.append(f"remote: {self.state}")
        return checked_objects, total, faults


def _words(error: BaseException) -> str:
    """A failure in short, whatever it is made of."""
    try:
        text = str(error)
    except Exception:  # somebody else's __str__ may do anything
        text = "no message"
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:300] + '...'}"


def checked(data: NDArray[np.uint8], entry: Entry, prefixes: Prefixes | None) -> Object:
    """The object in these bytes. Raises StoreError unless it is what its name says, and of these tokens if given."""
    source = entry.path
    header = Header.unpack(data[:HEADER_BYTES].tobytes(), source)
    if (header.id, header.kind, header.begin, header.end, header.block) != (
        entry.id, entry.kind, entry.begin, entry.end, entry.block
    ) or header.kind not in (PAGE, FULL, ENCODER):  # fmt: skip
        raise StoreError(f"{source}: the content belongs to another name")
    if len(data) != header.file_bytes:
        raise StoreError(f"{source}: expected {header.file_bytes:,} bytes, found {len(data):,}")
    raw, payload = data[HEADER_BYTES : header.payload_offset], data[header.payload_offset :]
    if checksum(raw) != header.tokens_sum or checksum(payload) != header.payload_sum:
        raise StoreError(f"{source}: the content is damaged (checksum)")
    tokens = raw.view("<i4")
    if prefixes is not None and (
        header.root != prefixes.root
        or (header.kind == PAGE and not np.array_equal(tokens, prefixes.tokens[header.begin : header.end]))
    ):
        raise StoreError(f"{source}: it has the name of other tokens")
    return header, tokens, payload
