"""Whole steps on a model, usually a synthetic slice of the released shape: decode, depth, prefill.

Caches are filled with random rows (`fill`), so a depth of 300k tokens costs nothing to reach; what such a session
generates means nothing. Steps and plain reads alternate, so that both see the same machine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _ext
from ..ledger import Ledger
from ..model import Model
from ..session import Session
from .common import environment, median

_ROOF_BYTES = 1 << 30
_PIECE = 1 << 28


def fill(session: Session, position: int, seed: int = 1) -> None:
    """For benchmarks only: an empty session becomes one of `position` (even) random tokens with random caches."""
    session._ext.fill_for_benchmark(position, seed)


def _warm(model: Model) -> None:
    """Bring every page of the weights into memory and into this process, so that no step waits for the disk."""
    for tensor in model.checkpoint.tensors.values():
        if tensor.segment is not None:
            int(tensor.view()[::4096].sum(dtype=np.uint64))


class _Roof:
    """Plain reads between steps."""

    def __init__(self, threads: int) -> None:
        self._probe = _ext.bench.Probe(_ext.cpu_isas()[0], threads, _ROOF_BYTES, True)
        self._at = 0

    def sample(self) -> tuple[float, float]:
        """(wall GB/s, CPU GB/s) of the next piece."""
        wall, cpu = self._probe.read(self._at, _PIECE)
        self._at = (self._at + _PIECE) % _ROOF_BYTES
        return _PIECE / wall / 1e9, _PIECE / cpu / 1e9


def _steps(session: Session, roof: _Roof, threads: int, steps: int) -> dict[str, Any]:
    """Single-token steps with reads between them; the ledger runs."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(10, session.model.config.vocab_size, steps + 2)
    session.step([int(tokens[0])])  # pages of scratch
    session._ext.start_ledger()
    walls, cpus, reads = [], [], []
    for token in tokens[1 : steps + 1]:
        reads.append(roof.sample())
        wall, cpu = time.perf_counter(), time.process_time()
        session.step([int(token)])
        walls.append(time.perf_counter() - wall)
        cpus.append((time.process_time() - cpu) / threads)
    roof_cpu, roof_wall = median([r[1] for r in reads]), median([r[0] for r in reads])
    ledger = Ledger.from_ext(session._ext.ledger(), roof_wall)
    ledger.require_complete()
    nbytes = ledger.bytes / ledger.runs
    return {
        "roof_gb_s": roof_cpu,
        "roof_wall_gb_s": roof_wall,
        "bytes_per_step": nbytes,
        "gb_s": nbytes / median(cpus) / 1e9,
        "share": nbytes / median(cpus) / 1e9 / roof_cpu,
        "wall_share": nbytes / median(walls) / 1e9 / roof_wall,
        "tok_s": 1.0 / median(walls),
        "cpu_tok_s": 1.0 / median(cpus),
        "experts_touched": ledger.experts_touched,
        "ledger": ledger,
    }


def decode(
    path: str | os.PathLike[str] | None = None, *, context: int = 8192, steps: int = 20, threads: int | None = None
) -> dict[str, Any]:
    """Decode rate at a context: medians over `steps` single-token steps; `ledger` says where the time went."""
    with Model.open(path, threads=threads) as model:
        context = min(context, model.config.max_position_embeddings - steps - 8) & ~1
        _warm(model)
        roof = _Roof(model.threads)
        with model.session(context + steps + 8, retain=256) as session:
            fill(session, context)
            result = _steps(session, roof, model.threads, steps)
        return environment(model.threads, model.backend) | {"model": str(path or "nano"), "context": context} | result


def depth(
    path: str | os.PathLike[str] | None = None,
    *,
    contexts: Sequence[int] = (8192, 62_000, 131_072, 300_000, 1_000_000),
    steps: int = 9,
    threads: int | None = None,
) -> dict[str, Any]:
    """Decode rate at several contexts of one resident model; `rate` is relative to the first one (CPU time)."""
    results: list[dict[str, Any]] = []
    with Model.open(path, threads=threads) as model:
        _warm(model)
        roof = _Roof(model.threads)
        for context in contexts:
            size = min(context, model.config.max_position_embeddings - steps - 8) & ~1
            with model.session(size + steps + 8, retain=256) as session:
                fill(session, size)
                item = {"context": size} | _steps(session, roof, model.threads, steps)
            item["rate"] = item["cpu_tok_s"] / (results[0]["cpu_tok_s"] if results else item["cpu_tok_s"])
            ledger = item.pop("ledger")
            item["ms_by_op"] = {r.op: 1e3 * r.seconds / ledger.runs for r in ledger.by_op()}
            results.append(item)
        return environment(model.threads, model.backend) | {"model": str(path or "nano"), "results": results}


def prefill(
    path: str | os.PathLike[str] | None = None,
    *,
    tokens: Sequence[int] = (512, 2048),
    threads: int | None = None,
    matrix: bool = False,
) -> dict[str, Any]:
    """Prefill rate for prompts of several lengths, from an empty session; time by operation.

    matrix: each prompt also in the matrix class, `ratio` is its CPU rate over the canonical one."""
    results = []
    with contextlib.ExitStack() as stack:
        models = [stack.enter_context(Model.open(path, threads=threads))]
        if matrix:
            models.append(stack.enter_context(Model.open(path, threads=threads, prefill="matrix")))
        for model in models:
            _warm(model)
        rng = np.random.default_rng(3)
        for n in tokens:
            ids = rng.integers(10, models[0].config.vocab_size, n).astype(np.int32)
            items = [_prefill(model, ids) for model in models]
            for item in items[1:]:
                item["ratio"] = item["cpu_tok_s"] / items[0]["cpu_tok_s"]
            results += items
        return environment(models[0].threads, models[0].backend) | {"model": str(path or "nano"), "results": results}


def _prefill(model: Model, ids: NDArray[np.int32]) -> dict[str, Any]:
    n = len(ids)
    with model.session(n + 8, retain=256, chunk=min(n, 2048)) as session:
        session._ext.start_ledger()
        wall, cpu = time.perf_counter(), time.process_time()
        session.prefill(ids, logits=None)
        wall, cpu = time.perf_counter() - wall, (time.process_time() - cpu) / model.threads
        ledger = Ledger.from_ext(session._ext.ledger())
        return {
            "context": n,
            "class": model.prefill,
            "chunk": session.chunk,
            "tok_s": n / wall,
            "cpu_tok_s": n / cpu,
            "seconds_by_op": {r.op: r.seconds for r in ledger.by_op()},
        }
