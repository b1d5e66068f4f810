"""What a store puts into its remote, from a thread of its own: calls do not wait for a network."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial

from .objects import Object
from .remote import Remote

PATIENCE = 60.0
"""Seconds that closing and the end of a process wait for one object; then they leave it."""
Name = tuple[bytes, int]
"""Of an object, and its kind."""


class Sender:
    """A queue of objects on their way. Only names wait; the content is read where it lies when its turn comes.

    read: the object of a name. Raises OSError when it is gone or damaged; it is not sent then, and counted.
    """

    def __init__(self, remote: Remote, read: Callable[[bytes, int], Object]) -> None:
        self._remote, self._read = remote, read
        self._waiting: dict[Name, None] = {}
        self._known: set[Name] = set()  # what is in the remote, or will be: asked for once a process
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.lost = self._failures = 0
        # The interpreter ends daemon threads where they are: a store that nobody closed has its queue emptied first.
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def state(self) -> str:
        """The remote's state, and what waits."""
        late = f", {len(self._waiting):,} objects wait to be sent" if self._waiting else ""
        lost = f", {self.lost:,} were deleted here before they were sent" if self.lost else ""
        return f"{self._remote.state}{late}{lost}"

    @property
    def waiting(self) -> int:
        """Objects that have yet to be sent."""
        return len(self._waiting)

    def add(self, names: Iterable[Name], changed: bool = False) -> None:
        """Objects that the remote should have, in this order, after those that wait. Those that it is known to have
        cost nothing; changed: they are new, or have other content than before."""
        with self._change:
            names = [name for name in names if changed or name not in self._known]
            self._known.update(names)
            self._waiting.update((name, None) for name in names)
            if self._waiting and not self._running() and not self._closed:
                self._thread = threading.Thread(target=self._run, name="ds4v41-remote", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def came_from_there(self, name: Name) -> None:
        """The remote has this one."""
        self._known.add(name)

    def flush(self, patience: float | None = None) -> bool:
        """Wait until all is sent, or the remote fails, or takes longer than `patience` seconds for one object (None: as
        long as it takes); True when nothing waits any more."""
        with self._change:
            failures, left, since = self._failures, len(self._waiting), time.monotonic()
            self._change.notify_all()  # the pause after a failure may have been ended
            while self._waiting and self._running() and self._remote.awake() and self._failures == failures:
                self._change.wait(0.2)
                if len(self._waiting) != left:
                    left, since = len(self._waiting), time.monotonic()
                if patience is not None and time.monotonic() - since > patience:
                    break
            return not self._waiting

    def close(self) -> None:
        """Send what waits while the remote answers; nothing is begun afterwards, also when this is interrupted."""
        try:
            self.flush(PATIENCE)
        finally:
            atexit.unregister(self._at_exit)
            with self._change:
                self._closed = True
                thread = self._thread
                self._change.notify_all()
        if thread is not None and not self._waiting:
            thread.join()

    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()  # a forked process has none of them

    def _run(self) -> None:
        while True:
            with self._change:
                while self._waiting and not self._closed and not self._remote.awake():
                    self._change.wait(max(0.05, self._remote.until - time.monotonic()))
                if self._closed or not self._waiting:  # the next that is added starts another
                    self._thread = None
                    self._change.notify_all()
                    return
                name = next(iter(self._waiting))
            done = self._send(name)
            with self._change:
                if done:
                    self._waiting.pop(name, None)
                else:
                    self._failures += 1
                self._change.notify_all()

    def _send(self, name: Name) -> bool:
        """True when there is nothing left to do about it."""
        try:
            thing = self._read(*name)
        except OSError:
            self.lost += 1
            self._known.discard(name)
            return True
        return self._remote.send(thing)


def _close(sender: weakref.ref[Sender]) -> None:
    there = sender()
    if there is not None:
        there.close()
