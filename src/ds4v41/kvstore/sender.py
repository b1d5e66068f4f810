"""What a store puts into its remote, from a thread of its own: calls do not wait for a network."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial

from .format import Header
from .objects import Object
from .remote import Remote


class Sender:
    """A queue of objects on their way. Only names wait; the content is read where it lies when its turn comes.

    read: the object of a header. Raises OSError when it is gone or damaged; it is not sent then, and counted.
    """

    def __init__(self, remote: Remote, read: Callable[[Header], Object]) -> None:
        self._remote, self._read = remote, read
        self._waiting: dict[bytes, Header] = {}
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.lost = self._failures = 0
        # The interpreter ends daemon threads where they are: a store that nobody closed has its queue emptied first.
        self._at_exit = partial(_flush, weakref.ref(self))
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

    def add(self, headers: Iterable[Header]) -> None:
        """Objects to be sent, in this order, after those that wait."""
        with self._change:
            self._waiting.update((header.id, header) for header in headers)
            if self._waiting and not self._running() and not self._closed:
                self._thread = threading.Thread(target=self._run, name="ds4v41-remote", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def flush(self) -> bool:
        """Wait until all is sent, or the remote fails; True when nothing waits any more."""
        with self._change:
            before = self._failures
            while self._waiting and self._running() and self._remote.awake() and self._failures == before:
                self._change.wait(0.2)
            return not self._waiting

    def close(self) -> None:
        """Send what waits while the remote answers; nothing is sent afterwards."""
        self.flush()
        with self._change:
            self._closed = True
            thread = self._thread
            self._change.notify_all()
        if thread is not None:
            thread.join()
        atexit.unregister(self._at_exit)

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
                header = next(iter(self._waiting.values()))
            done = self._send(header)
            with self._change:
                if done:
                    self._waiting.pop(header.id, None)
                else:
                    self._failures += 1
                self._change.notify_all()

    def _send(self, header: Header) -> bool:
        """True when there is nothing left to do about it."""
        try:
            thing = self._read(header)
        except OSError:
            self.lost += 1
            return True
        return self._remote.send(thing)


def _flush(sender: weakref.ref[Sender]) -> None:
    there = sender()
    if there is not None:
        there.flush()
