"""Async forms: the work runs in a thread, so the event loop stays free; cancelling the task stops the work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator
from typing import Any, Generic, Protocol, TypeVar

from .errors import Ds4Error

_ASK_SECONDS = 0.02
Item = TypeVar("Item", covariant=True)
Result = TypeVar("Result", covariant=True)


class Running(Protocol[Item, Result]):
    """What `generate` and `chat(stream=True)` return."""

    session: Any

    def __next__(self) -> Item: ...
    def close(self) -> None: ...
    def finish(self) -> Result: ...


class AsyncStream(AsyncIterator[Item], Generic[Item, Result]):
    """`async for` gives the items one by one; `await` runs to the end and gives the whole result."""

    def __init__(self, running: Running[Item, Result]) -> None:
        self._running = running

    def __aiter__(self) -> AsyncStream[Item, Result]:
        return self

    async def __anext__(self) -> Item:
        found: list[Item] = await self._in_thread(self._next)
        if not found:
            raise StopAsyncIteration
        return found[0]

    def __await__(self) -> Generator[Any, None, Result]:
        return self._in_thread(self._running.finish).__await__()

    async def aclose(self) -> None:
        """End it early; the session stays valid."""
        await self._in_thread(self._running.close)

    def _next(self) -> list[Item]:
        try:
            return [self._running.__next__()]
        except StopIteration:  # cannot leave a thread's future
            return []

    async def _in_thread(self, work: Any) -> Any:
        future = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The thread must be out of the session before the caller goes on. A call that begins just now forgets a
            # cancel() from before it, so ask until it listens.
            while not future.done():
                self._running.session.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future], timeout=_ASK_SECONDS)
            if not future.cancelled():
                future.exception()  # seen: Cancelled, or whatever ended it
            with contextlib.suppress(Ds4Error):
                self._running.close()
            raise
