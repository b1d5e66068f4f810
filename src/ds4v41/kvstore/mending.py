"""A damaged index: set aside under a name of its own, and made again from the objects."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..errors import StoreError
from .index import Index, IndexDamaged

log = logging.getLogger("ds4v41.kvstore")
TRIES = 3


class _Mendable(Protocol):
    def _mend(self, error: IndexDamaged) -> None: ...


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=_Mendable)


def mended(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """For a method of a store: when the index turns out to be damaged it is made again and the call repeated."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(TRIES - 1):
            try:
                return method(self, *args, **kwargs)
            except IndexDamaged as error:
                self._mend(error)
        return method(self, *args, **kwargs)

    return call


def open_index(folder: Path) -> tuple[Index, str]:
    """The index of a folder, and what was wrong with the one that was there. A damaged one is set aside, not deleted;
    the new one is empty."""
    path = folder / "index.sqlite"
    report = ""
    for _ in range(TRIES):
        try:
            return Index(path), report
        except IndexDamaged as error:
            report = set_aside(path, error) or report
    raise StoreError(
        f"{path}: damaged again each time it was made anew ({report}); look at the disk, and use a local one"
    )


def set_aside(path: Path, error: IndexDamaged) -> str:
    """Rename a damaged index; says what was done, or nothing when another process has done it already."""
    if not error.index.unmoved():
        log.warning("%s: %s; opened again", path, error.why)
        return ""
    aside = path.parent / f"index.damaged.{int(time.time())}.{os.getpid()}"
    for n in range(1, 1000):
        if not aside.exists():
            break
        aside = path.parent / f"index.damaged.{int(time.time())}.{os.getpid()}-{n}"
    # First the log: it must never be taken for that of the new index.
    for ending in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{ending}", f"{aside}{ending}")
    report = f"{path} was damaged ({error.why}): moved to {aside.name}, made again from the objects"
    log.warning("%s", report)
    return report
