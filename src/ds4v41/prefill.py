"""Prefill: a prompt in chunks, with progress, interruptible between and inside of chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from . import _ext
from .errors import MemoryPlanError, StateError
from .history import classes_of
from .machine import available_memory, human
from .results import Progress

LogitsChoice = Literal["last", "all"]
ProgressCallback = Callable[[Progress], object]


def plan_chunks(n: int, chunk: int, cuts: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) that cover n tokens, each at most `chunk` long; one of them ends at each of the cuts that is
    inside. Any plan gives the same bits (E1)."""
    begin = 0
    while begin < n:
        end = min(begin + chunk, n, *(cut for cut in cuts if cut > begin))
        yield begin, end
        begin = end


def run_prefill(
    session: _ext.Session,
    history: NDArray[np.int32],
    logits: LogitsChoice | None,
    n_vocab: int,
    chunk: int,
    cached: int = 0,
    progress: ProgressCallback | None = None,
    done: Callable[[int, float, bool], object] | None = None,
    cut: int = 0,
) -> NDArray[np.float32] | None:
    """Append tokens [n], each in the numeric class that `history` names (history.py), at most `chunk` in one
    run; returns float32 [1, vocab] or [n, vocab], or None. A run ends at `cut`.

    Chunks in front of the cut and of the end are told how many tokens follow them, so that they leave out what nobody
    will need (docs/decisions/0005).

    StateError when `progress` moved the session itself: the rest of the prompt would follow other tokens.

    `done(n, seconds, matrix)` is told of every chunk that is complete. When something stops the run (Ctrl-C, cancel, an
    exception from `progress`), complete chunks stay, the one in progress is dropped.
    """
    tokens, matrix = classes_of(history)
    n = len(tokens)
    size = 4 * n * n_vocab
    if logits == "all" and size > available_memory():
        raise MemoryPlanError(
            f'logits="all": {n:,} rows of {n_vocab:,} logits take {human(size)}, {human(available_memory())} are '
            "available; prefill in parts"
        )
    rows = np.empty((n, n_vocab), np.float32) if logits == "all" else None
    last: NDArray[np.float32] | None = None
    started = time.perf_counter()
    expected = np.concatenate([session.tokens, tokens]) if progress is not None else tokens
    kept = len(expected) - n
    changes = [int(i) + 1 for i in np.flatnonzero(matrix[1:] != matrix[:-1])]
    for begin, end in plan_chunks(n, chunk, [cut, *changes]):
        want = "all" if logits == "all" else ("last" if logits == "last" and end == n else "none")

        def tick(part: int, of: int, begin: int = begin, end: int = end) -> None:
            if progress is not None:
                processed = begin + (end - begin) * part // max(of, 1)
                progress(Progress(cached + n, cached, processed, time.perf_counter() - started))

        session.expect(tokens[end : end + session.chunk])  # its Engram rows are read meanwhile
        before = time.perf_counter()
        after = (cut if begin < cut < n else n) - end
        got = session.run(tokens[begin:end], want, tick if progress is not None else None, after, bool(matrix[begin]))
        if done is not None:
            done(end - begin, time.perf_counter() - before, bool(matrix[begin]))
        if rows is None:
            last = got
        elif got is not None:
            rows[begin:end] = got
        if progress is not None:
            progress(Progress(cached + n, cached, end, time.perf_counter() - started))
            if not np.array_equal(session.tokens, expected[: kept + end]):
                raise StateError(
                    f"the progress callback changed the session: expected the same {kept + end:,} tokens after it, "
                    f"found others ({session.position:,}); a callback may fork or save the session, not move it"
                )
    return rows if rows is not None else last
