"""Whole steps on a model, usually a synthetic slice of the released shape: decode, depth, prefill.

Caches are filled with random rows (`fill`), so a depth of 300k tokens costs nothing to reach; what such a session
generates means nothing. Steps and plain reads alternate, so that both see the same machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _ext
from ..checks import positive_int
from ..errors import OptionError
from ..ledger import Ledger
from ..model import Model
from ..session import Session
from . import device
from .common import environment, median

Path = str | os.PathLike[str] | Model | Callable[[], Model] | None
"""A file or folder, a model that is open already (it stays open), what makes one when the options are known to be
right, or nothing: the nano model."""

_ROOF_BYTES = 1 << 30
_PIECE = 1 << 28
MOST_STEPS = 100_000


def fill(session: Session, position: int, seed: int = 1) -> None:
    """For benchmarks only: an empty session becomes one of `position` (even) random tokens with random caches."""
    session._ext.fill_for_benchmark(position, seed)


def _warm(model: Model) -> None:
    """Bring every page of the weights into memory and into this process, so that no step waits for the disk."""
    if model.checkpoint.made is not None or device.is_device(model.backend):  # just written, or no pages of ours
        return
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


class _Stepper:
    """One session's single-token steps, its times beside plain reads; the ledger runs."""

    def __init__(self, session: Session, seed: int = 7) -> None:
        self.session, self._rng = session, np.random.default_rng(seed)
        self.walls: list[float] = []
        self.cpus: list[float] = []
        self.reads: list[tuple[float, float]] = []
        session.step([self._token()])  # pages of scratch
        session._ext.start_ledger()

    def _token(self) -> int:
        return int(self._rng.integers(10, self.session.model.config.vocab_size))

    def step(self, roof: _Roof) -> None:
        self.reads.append(roof.sample())
        token = self._token()
        wall, cpu = time.perf_counter(), time.process_time()
        self.session.step([token])
        self.walls.append(time.perf_counter() - wall)
        self.cpus.append((time.process_time() - cpu) / self.session.model.threads)

    def result(self) -> dict[str, Any]:
        """Medians; `ledger` too."""
        roof_wall, roof_cpu = (median([r[i] for r in self.reads]) for i in (0, 1))
        ledger = Ledger.from_ext(self.session._ext.ledger(), roof_wall)
        ledger.require_complete()
        nbytes = ledger.bytes / ledger.runs
        return {
            "roof_gb_s": roof_cpu,
            "roof_wall_gb_s": roof_wall,
            "bytes_per_step": nbytes,
            "gb_s": nbytes / median(self.cpus) / 1e9,
            "share": nbytes / median(self.cpus) / 1e9 / roof_cpu,
            "wall_share": nbytes / median(self.walls) / 1e9 / roof_wall,
            "tok_s": 1.0 / median(self.walls),
            "cpu_tok_s": 1.0 / median(self.cpus),
            "experts_touched": ledger.experts_touched,
            "ledger": ledger,
        }


@contextmanager
def _opened(path: Path, threads: int | None, backend: str) -> Iterator[Model]:
    if isinstance(path, Model) or callable(path):
        if threads is not None or backend not in ("auto", getattr(path, "backend", "auto")):
            raise OptionError("threads, backend: an open model, or one still to be made, has its own; leave them out")
        if isinstance(path, Model):
            yield path
        else:
            with path() as model:
                yield model
    else:
        with Model.open(path, threads=threads, backend=backend) as model:
            yield model


def _name(path: Path, model: Model) -> str:
    return str(model.path if isinstance(path, Model) or callable(path) else path or "nano")


def _about(model: Model) -> dict[str, Any]:
    if device.is_device(model.backend):
        return device.about(model.backend)
    return environment(model.threads, model.backend)


def _steppers(model: Model) -> tuple[Any, Callable[[Session], Any]]:
    """The roof that a model's steps are measured against, and what measures them."""
    if device.is_device(model.backend):
        on_device = device.Roof(model.backend)
        return on_device, lambda session: device.Stepper(session, on_device)
    _warm(model)
    return _Roof(model.threads), _Stepper


def _depths(model: Model, contexts: Sequence[int] | None, usual: Sequence[int], steps: int) -> list[int]:
    """The even positions at or below these contexts that leave room for the steps. What was asked for is measured or
    refused; without a wish the usual ones are, as far as the model goes."""
    most = model.config.max_position_embeddings
    longest = most - steps - 8
    if longest < 0:
        raise OptionError(f"steps: {steps} do not fit into this model's context of {most:,}")
    if contexts is None:
        return sorted({min(context, longest) & ~1 for context in usual})
    if max(contexts) > longest:
        raise OptionError(
            f"context: expected at most {longest:,} ({most:,} of this model less {steps} steps and 8), "
            f"found {max(contexts):,}"
        )
    return [context & ~1 for context in contexts]


def decode(
    path: Path = None,
    *,
    context: int | None = None,
    steps: int = 20,
    threads: int | None = None,
    backend: str = "auto",
) -> dict[str, Any]:
    """Decode rate at a context (None: 8192, or as far as the model goes): medians over `steps` single-token steps;
    `ledger` says where the time went.

    On a device the ledger, which waits after every operation, watches further steps; the rate is that of steps alone.
    """
    steps = positive_int("steps", steps, 1, MOST_STEPS)
    wished = None if context is None else [positive_int("context", context, 0)]
    with _opened(path, threads, backend) as model:
        (context,) = _depths(model, wished, (8192,), steps)
        roof, stepper_of = _steppers(model)
        with model.session(context + steps + 8, retain=256) as session:
            fill(session, context)
            stepper = stepper_of(session)
            for _ in range(steps):
                stepper.step(roof)
            result: dict[str, Any] = stepper.result()
        return _about(model) | {"model": _name(path, model), "context": context} | result


def depth(
    path: Path = None,
    *,
    contexts: Sequence[int] | None = None,
    steps: int = 15,
    threads: int | None = None,
    backend: str = "auto",
) -> dict[str, Any]:
    """Decode rate at several contexts of one resident model (None: 8k, 62k, 131k, 300k and 1M, as far as the model
    goes). A session of every context is open at once and they take turns, a step each, so that they see the same
    machine; `rate` is relative to the first context, the median of the ratios turn by turn (CPU time; wall time on a
    device)."""
    steps = positive_int("steps", steps, 1, MOST_STEPS)
    if contexts is not None:
        contexts = [positive_int("contexts", context, 0) for context in contexts]
        if not contexts:
            raise OptionError("contexts: expected at least one, found none")
    with _opened(path, threads, backend) as model, ExitStack() as stack:
        roof, stepper_of = _steppers(model)
        steppers: list[tuple[int, Any]] = []
        for size in _depths(model, contexts, (8192, 62_000, 131_072, 300_000, 1_000_000), steps):
            session = stack.enter_context(model.session(size + steps + 8, retain=256))
            fill(session, size)
            steppers.append((size, stepper_of(session)))
        for _ in range(steps):
            for _, stepper in steppers:
                stepper.step(roof)
        first = steppers[0][1].cpus
        results: list[dict[str, Any]] = []
        for size, stepper in steppers:
            item = {"context": size} | stepper.result()
            item["rate"] = median([a / b for a, b in zip(first, stepper.cpus, strict=True)])
            ledger = item.pop("ledger")
            item["ms_by_op"] = {r.op: 1e3 * r.time / ledger.runs for r in ledger.by_op()}
            results.append(item)
        return _about(model) | {"model": _name(path, model), "results": results}


def prefill(
    path: Path = None,
    *,
    tokens: Sequence[int] = (512, 2048),
    behind: Sequence[int] = (0,),
    threads: int | None = None,
    matrix: bool = False,
    backend: str = "auto",
) -> dict[str, Any]:
    """Prefill rate for prompts of several lengths, each behind so many random tokens; time by operation.

    matrix: each prompt also in the matrix class, `ratio` is its CPU rate over the canonical one."""
    results = []
    lengths = [(positive_int("tokens", n), positive_int("behind", b, 0)) for n, b in product(tokens, behind)]
    in_matrix: list[Callable[[], Model]] = []
    if matrix:
        if isinstance(path, Model) or callable(path):
            raise OptionError("matrix: expected a file, to open in both classes of prompts; an open model has one")
        in_matrix.append(partial(Model.open, path, threads=threads, prefill="matrix", backend=backend))
    with ExitStack() as stack:
        models = [stack.enter_context(_opened(path, threads, backend))]
        models += [stack.enter_context(opened()) for opened in in_matrix]
        for model in models:
            _warm(model)
        rng = np.random.default_rng(3)
        longest = models[0].config.max_position_embeddings
        for n, before in lengths:
            if before % 2 or n + before + 8 > longest:
                raise OptionError(
                    f"prefill: expected 1 or more tokens behind an even number of tokens, {longest - 8} in all, "
                    f"found {n} behind {before}"
                )
            ids = rng.integers(10, models[0].config.vocab_size, n).astype(np.int32)
            items = [_prefill(model, ids, before) for model in models]
            for item in items[1:]:
                item["ratio"] = item["cpu_tok_s"] / items[0]["cpu_tok_s"]
            results += items
        return _about(models[0]) | {"model": _name(path, models[0]), "results": results}


def _prefill(model: Model, ids: NDArray[np.int32], behind: int) -> dict[str, Any]:
    n = len(ids)

    def session_of() -> Session:
        session = model.session(behind + n + 8, retain=256, chunk=min(n, 2048))
        if behind:
            fill(session, behind)
        return session

    if device.is_device(model.backend):
        return {"context": n, "behind": behind, "class": model.prefill} | device.prefill(session_of, ids)
    with session_of() as session:
        session._ext.start_ledger()
        wall, cpu = time.perf_counter(), time.process_time()
        session.prefill(ids, logits=None)
        wall, cpu = time.perf_counter() - wall, (time.process_time() - cpu) / model.threads
        ledger = Ledger.from_ext(session._ext.ledger())
        return {
            "context": n,
            "behind": behind,
            "class": model.prefill,
            "chunk": session.chunk,
            "tok_s": n / wall,
            "cpu_tok_s": n / cpu,
            "seconds_by_op": {r.op: r.seconds for r in ledger.by_op()},
        }
