"""Two configurations in one process, interleaved, with paired ratios; no speed is reported when outputs differ."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import positive_int
from ..errors import OptionError, StateError
from ..model import Model
from .common import environment, interval, median
from .device import is_device

_KEYS = {"threads": int, "backend": str, "activations": str, "rows": int, "context": int}
"""Options of a side: those of Model.open, rows per step (1 to 8), and the depth of the filled cache."""


def parse_side(items: list[str]) -> dict[str, Any]:
    """["threads=1", "backend=cpu/avx2"] to options. Raises OptionError for unknown keys."""
    side: dict[str, Any] = {}
    for item in items:
        key, found, value = item.partition("=")
        if not found or key not in _KEYS:
            raise OptionError(f"a side takes {', '.join(f'{k}=' for k in _KEYS)}; found {item!r}")
        if key in side:
            raise OptionError(f"{key}: given twice for one side")
        try:
            side[key] = _KEYS[key](value)
        except ValueError:
            raise OptionError(f"{key}: expected a whole number, found {value!r}") from None
    return side


def compare(
    path: str | os.PathLike[str] | None,
    a: dict[str, Any],
    b: dict[str, Any],
    *,
    pairs: int = 15,
) -> dict[str, Any]:
    """Run `pairs` pairs of steps, A and B in turn (ABBA), on the same tokens. `ratio` is time A / time B: CPU time, or
    wall time when a side is on a device, whose work is not this process's CPU time.

    Every step starts from the same position, so sides with another number of rows are compared in the rows that both
    have. Raises StateError when the logits of the two differ in a single bit.
    """
    pairs = positive_int("pairs", pairs, 1, 100_000)
    sides: list[_Side] = []
    try:
        for options in (a, b):
            sides.append(_Side(path, options))
        rng = np.random.default_rng(5)
        vocab = sides[0].model.config.vocab_size
        common = min(s.rows for s in sides)
        times: list[tuple[float, float, float, float]] = []
        for i in range(pairs + 1):
            tokens = rng.integers(10, vocab, max(s.rows for s in sides))
            order = (0, 1) if i % 2 == 0 else (1, 0)
            took: dict[int, tuple[float, float]] = {}
            for which in order:
                took[which] = sides[which].step(tokens)
            if sides[0].digest(common) != sides[1].digest(common):
                raise StateError(f"A and B differ in step {i}: logits are not the same bytes, so no speed is shown")
            if i:  # the first pair warms up
                times.append((*took[0], *took[1]))
        device = any(is_device(side.model.backend) for side in sides)
        clock = 0 if device else 1
        ratios = [t[clock] / t[2 + clock] for t in times]
        low, high = interval(ratios)
        return environment(sides[0].model.threads, sides[0].model.backend) | {
            "a": a,
            "b": b,
            "pairs": pairs,
            "clock": "wall" if device else "cpu",
            "a_seconds": median([t[clock] for t in times]),
            "b_seconds": median([t[2 + clock] for t in times]),
            "ratio": median(ratios),
            "ratio_low": low,
            "ratio_high": high,
            "wall_ratio": median([t[0] / t[2] for t in times]),
            "outputs_equal": True,
            "rows_compared": common,
        }
    finally:
        for side in sides:
            side.close()


class _Side:
    def __init__(self, path: str | os.PathLike[str] | None, options: dict[str, Any]) -> None:
        from .model import fill

        rest = dict(options)
        self.rows = positive_int("rows", rest.pop("rows", 1), 1, 8)
        context = positive_int("context", rest.pop("context", 0), 0) & ~1
        self.model = Model.open(path, **rest)
        longest = self.model.config.max_position_embeddings
        if context + self.rows > longest:
            raise OptionError(f"context: expected at most {longest - self.rows:,} with this model, found {context:,}")
        self.session = self.model.session(min(context + 4096, longest), retain=256)
        if context:
            fill(self.session, context)
        self.start = self.session.position
        self.logits = np.empty((0, 0), np.float32)

    def step(self, tokens: NDArray[np.int64]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        self.logits = self.session.step([int(t) for t in tokens[: self.rows]])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.session.truncate(self.start)
        return wall, cpu

    def digest(self, rows: int) -> bytes:
        """Of the first rows of the last step's logits."""
        return hashlib.sha256(self.logits[:rows].tobytes()).digest()

    def close(self) -> None:
        self.session.close()
        self.model.close()
