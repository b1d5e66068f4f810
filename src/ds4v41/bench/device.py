"""Measurements of a device (`--backend metal|cuda`): times are its own clock's, the roof is a copy in its memory.

The stand-in for Metal runs kernels on this machine's processor: there these are times of a processor, good for testing
the measurement and for nothing else; results say so (`note`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _ext
from ..checks import choice, positive_int
from ..errors import BackendError, OptionError, shown
from ..ledger import Ledger
from ..model import DEVICES
from ..session import Session
from .common import environment, median

GIB = 1 << 30
_REPEATS = 5
_COUNTS = ("dispatches", "levels", "command_buffers", "waits")
LEDGER_STEPS = 5
"""Steps under the ledger, which waits after every operation, beside those whose rate counts."""
STANDIN_NOTE = "the stand-in for Metal: times of this processor, not of a device"


def is_device(backend: Any) -> bool:
    """Is this back end a device? OptionError for what is no text."""
    if not isinstance(backend, str):
        raise OptionError(f"backend: expected text, found {shown(backend)}")
    return backend in DEVICES


def on_standin() -> bool:
    """Is the device of this build the stand-in?"""
    return hasattr(_ext, "standin")


def require(backend: str) -> None:
    """BackendError, with the reason, when there is no such device here."""
    if reason := _ext.device_missing(backend):
        raise BackendError(f"backend: {backend} is not here ({reason})")


def about(backend: str) -> dict[str, Any]:
    """What every result of a device carries."""
    found = environment(1, backend) | {"clock": "device"}
    return found | ({"note": STANDIN_NOTE} if on_standin() else {})


class Roof:
    """Copies in the device's memory, read and written bytes added."""

    def __init__(self, backend: str, gib: float | None = None) -> None:
        require(backend)
        if gib is None:
            gib = 1 / 64 if on_standin() else 2.0
        if isinstance(gib, bool) or not isinstance(gib, (int, float)) or not 0.001 <= gib <= 1024:
            raise OptionError(f"gib: expected 0.001 to 1024 on a device, found {shown(gib)}")
        self.size = int(gib * GIB) & ~0xFFFFF
        self.probe = _ext.bench.DeviceProbe(self.size)

    def sample(self) -> tuple[float, float]:
        """(wall GB/s, device GB/s) of a copy of half the memory to the other half."""
        wall, device = self.probe.copy(self.size // 2, 1)
        return self.size / wall / 1e9, self.size / device / 1e9

    def gb_s(self) -> float:
        """The median of five, by the device's clock."""
        return median([self.sample()[1] for _ in range(_REPEATS)])

    def empty_us(self, times: int) -> tuple[float, float]:
        """(wall, device) microseconds of a dispatch that does next to nothing and waits for the one before."""
        found = [self.probe.empty(times) for _ in range(_REPEATS)]
        return median([1e6 * w / times for w, _ in found]), median([1e6 * d / times for _, d in found])


def roof(backend: str, gib: float | None) -> dict[str, Any]:
    """Copy rate of the device, and what a dispatch costs that does nothing."""
    place = Roof(backend, gib)
    samples = [place.sample() for _ in range(_REPEATS)]
    wall, device = place.empty_us(20 if on_standin() else 1000)
    return about(backend) | {
        "touched_bytes": place.size,
        "roof_gb_s": median([d for _, d in samples]),
        "roof_wall_gb_s": median([w for w, _ in samples]),
        "dispatch_us": device,
        "dispatch_wall_us": wall,
    }


def ops(
    backend: str,
    types: Sequence[str],
    rows: Sequence[int],
    gib: float | None,
    shapes: dict[str, tuple[int, int]],
    blocks: dict[str, tuple[int, int]],
) -> dict[str, Any]:
    """Row products, one waiting for the other, a different piece of memory each time, in turn with copies."""
    types = [choice("types", kind, tuple(shapes)) for kind in types]
    rows = [positive_int("rows", n, 1, 8192) for n in rows]
    place = Roof(backend, 0.1 if on_standin() and gib is None else gib)  # room for the largest matrix
    results = [_one_op(place, kind, n, shapes[kind], blocks[kind]) for kind in types for n in rows]
    return about(backend) | {"touched_bytes": place.size, "results": results}


def _one_op(place: Roof, kind: str, n: int, shape: tuple[int, int], block: tuple[int, int]) -> dict[str, Any]:
    n_rows, cols = shape
    nbytes = n_rows * cols // block[0] * block[1]
    times = 1 if on_standin() else max(2, min(200, place.size // nbytes))
    repeats = 1 if on_standin() else _REPEATS
    passes = []
    for _ in range(repeats):
        copy = place.sample()[1]
        wall, device = place.probe.product(kind, n_rows, cols, n, times)
        passes.append((times * nbytes / device / 1e9, copy, times * nbytes / wall / 1e9))
    rate = median([p[0] for p in passes])
    return {
        "type": kind,
        "shape": [n_rows, cols],
        "rows": n,
        "us": nbytes / rate / 1e3,
        "gb_s": rate,
        "roof_gb_s": median([p[1] for p in passes]),
        "share": median([p[0] / p[1] for p in passes]),
        "wall_gb_s": median([p[2] for p in passes]),
        "gflop_s": rate * 2.0 * n * n_rows * cols / nbytes,
        "touched_bytes": times * nbytes,
    }


class Stepper:
    """One session's single-token steps on a device: their wall times, what was issued, and then the ledger's steps."""

    def __init__(self, session: Session, roof: Roof, seed: int = 7) -> None:
        self.session, self.roof, self._rng = session, roof, np.random.default_rng(seed)
        self.walls: list[float] = []
        self.reads: list[float] = []
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.cpus = self.walls  # the clock of a turn (bench.depth)
        session.step([self._token()])  # kernels are compiled, pages go to the device

    def _token(self) -> int:
        return int(self._rng.integers(10, self.session.model.config.vocab_size))

    def step(self, _: Any = None) -> None:
        """A copy, then a step."""
        self.reads.append(self.roof.sample()[1])
        token, before = self._token(), _ext.metal_counters()
        begin = time.perf_counter()
        self.session.step([token])
        self.walls.append(time.perf_counter() - begin)
        after = _ext.metal_counters()
        for name in _COUNTS:
            self.counts[name] += after[name] - before[name]

    def result(self) -> dict[str, Any]:
        """Medians; `ledger` too, of further steps."""
        n = len(self.walls)
        self.session._ext.start_ledger()
        for _ in range(min(n, LEDGER_STEPS)):
            self.session.step([self._token()])
        roof = median(self.reads)
        ledger = Ledger.from_ext(self.session._ext.ledger(), roof)
        ledger.require_complete()
        assert ledger.device_seconds is not None
        nbytes, wall = ledger.bytes / ledger.runs, median(self.walls)
        return {
            "roof_gb_s": roof,
            "bytes_per_step": nbytes,
            "gb_s": nbytes / wall / 1e9,
            "share": nbytes / wall / 1e9 / roof,
            "tok_s": 1.0 / wall,
            "device_ms_per_step": 1e3 * ledger.device_seconds / ledger.runs,
            "per_step": {name: count / n for name, count in self.counts.items()},
            "experts_touched": ledger.experts_touched,
            "ledger": ledger,
        }


def prefill(session_of: Callable[[], Session], ids: Any) -> dict[str, Any]:
    """The prompt twice, each in a new session: under the ledger (kernels are compiled there), then on its own."""
    with session_of() as session:
        session._ext.start_ledger()
        session.prefill(ids, logits=None)
        ledger = Ledger.from_ext(session._ext.ledger())
        ledger.require_complete()
    with session_of() as session:
        begin = time.perf_counter()
        session.prefill(ids, logits=None)
        wall = time.perf_counter() - begin
        chunk = session.chunk
    assert ledger.device_seconds is not None
    return {
        "chunk": chunk,
        "tok_s": len(ids) / wall,
        "device_tok_s": len(ids) / ledger.device_seconds,
        "seconds_by_op": {r.op: r.time for r in ledger.by_op()},
    }
