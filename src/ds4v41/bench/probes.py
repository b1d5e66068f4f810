"""Below the level of a model: roof, row products, top-k."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _ext
from ..checks import choice, positive_int
from ..errors import MemoryPlanError, OptionError, shown
from ..machine import available_memory, human
from ..model import worker_threads
from . import device
from .common import environment, median

GIB = 1 << 30
BLOCKS = {
    "q8_0": (32, 34), "q4_k": (256, 144), "mxfp4": (32, 17), "fp8_block": (32, 32), "fp4_row": (32, 16),
    "f16": (1, 2), "bf16": (1, 2), "f32": (1, 4),
}  # fmt: skip
"""Columns and bytes of a block."""
SHAPES = {
    "q8_0": (8192, 5120), "q4_k": (2304, 5120), "mxfp4": (2304, 5120), "fp8_block": (8192, 5120),
    "fp4_row": (2304, 5120), "f16": (4096, 5120), "bf16": (4096, 5120), "f32": (384, 5120),
}  # fmt: skip
"""Rows and columns of a matrix that the released model holds in such a type (or would)."""
_REPEATS = 5
MOST_ROWS = 8192


def _probe(threads: int | None, gib: float, huge_pages: bool) -> tuple[Any, int, str, int]:
    n_threads = worker_threads(threads)
    if isinstance(gib, bool) or not isinstance(gib, (int, float)) or not 0.01 <= gib <= 1024:
        raise OptionError(f"gib: expected 0.01 to 1024, found {shown(gib)}")
    if gib * GIB > available_memory():
        raise MemoryPlanError(f"gib: {gib:g} GiB are not available ({human(available_memory())} are); ask for less")
    isa = _ext.cpu_isas()[0]
    size = int(gib * GIB) & ~0xFFFFF
    return _ext.bench.Probe(isa, n_threads, size, huge_pages), n_threads, isa, size


def _refuse_other(backend: str) -> None:
    if backend not in ("auto", "cpu"):
        raise OptionError(
            f"backend: below a model are measured the best instruction set of this machine (auto, cpu) and devices "
            f"(metal, cuda), found {shown(backend)}"
        )


def _read_rates(probe: Any, offset: int, size: int) -> tuple[float, float]:
    wall, cpu = probe.read(offset, size)
    return size / wall / 1e9, size / cpu / 1e9


def _refuse_on_device(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            raise OptionError(f"{name}: only the CPU has this; leave it out with a device")


def roof(
    *, threads: int | None = None, gib: float | None = None, huge_pages: bool = True, backend: str = "auto"
) -> dict[str, Any]:
    """Stream read rate over `gib` GiB (4) and the f32 multiply-add peak, medians of 5.

    On a device (backend "metal" or "cuda"): the rate of copies in its memory (2 GiB), read and written bytes added, and
    what an empty dispatch costs."""
    if device.is_device(backend):
        _refuse_on_device(threads=threads is not None, huge_pages=not huge_pages)
        return device.roof(backend, gib)
    _refuse_other(backend)
    gib = 4.0 if gib is None else gib
    probe, n_threads, isa, size = _probe(threads, gib, huge_pages)
    reads = [_read_rates(probe, 0, size) for _ in range(_REPEATS)]
    peaks = [probe.fma(200_000) for _ in range(_REPEATS)]
    return environment(n_threads, isa) | {
        "touched_bytes": size,
        "huge_pages": huge_pages,
        "roof_gb_s": median([cpu * 1.0 for _, cpu in reads]),
        "roof_wall_gb_s": median([wall for wall, _ in reads]),
        "fma_gflop_s": median([gflop / cpu for _, cpu, gflop in peaks]),
        "fma_wall_gflop_s": median([gflop / wall for wall, _, gflop in peaks]),
    }


def ops(
    *,
    types: Sequence[str] = tuple(SHAPES),
    rows: Sequence[int] = (1, 2, 4, 6, 8),
    threads: int | None = None,
    gib: float | None = None,
    huge_pages: bool = True,
    matrix: bool = False,
    backend: str = "auto",
) -> dict[str, Any]:
    """Row products at released shapes: matrices that fill `gib` GiB, each read once, interleaved with plain reads of as
    many bytes (ABAB); medians of 5 passes over pairs of pieces. `share` is the product's rate over the read rate.

    matrix: the matrix class instead, in turn with the canonical one: `share` is of the peak of its instruction, taken
    in the same run, `ratio` the speed over canonical.

    On a device (backend "metal" or "cuda"): by its own clock, against copies in its memory."""
    if device.is_device(backend):
        _refuse_on_device(threads=threads is not None, huge_pages=not huge_pages, matrix=matrix)
        return device.ops(backend, types, rows, gib, SHAPES, BLOCKS)
    _refuse_other(backend)
    gib = 4.0 if gib is None else gib
    types = [choice("types", kind, tuple(SHAPES)) for kind in types]
    rows = [positive_int("rows", n, 1, MOST_ROWS) for n in rows]
    probe, n_threads, isa, size = _probe(threads, gib, huge_pages)
    if matrix and (missing := _ext.matrix_missing(isa)):
        raise OptionError(f"matrix: this machine has no matrix class ({missing})")
    peak_of = probe.matrix_peak if matrix else probe.fma
    results = []
    for kind in types:
        for n in rows:
            results.append((_one_matrix_op if matrix else _one_op)(probe, size, kind, n))
    peak = [peak_of(200_000) for _ in range(_REPEATS)]
    fma = median([gflop / cpu for _, cpu, gflop in peak])
    if matrix:
        for item in results:
            item["share"] = item["gflop_s"] / fma
        return environment(n_threads, isa) | {"matrix_gflop_s": fma, "results": results}
    for item in results:
        item["fma_share"] = item["gflop_s"] / fma
    return environment(n_threads, isa) | {"touched_bytes": size, "fma_gflop_s": fma, "results": results}


def _one_matrix_op(probe: Any, size: int, kind: str, n: int) -> dict[str, Any]:
    n_rows, cols = SHAPES[kind]
    block, block_bytes = BLOCKS[kind]
    nbytes = n_rows * cols // block * block_bytes
    pieces = max(1, min(size // nbytes, 400 // max(1, n)))
    passes = []
    for _ in range(_REPEATS):
        matrix = canonical = 0.0
        for i in range(pieces):
            canonical += probe.product(kind, n_rows, cols, i * nbytes, n)[1]
            matrix += probe.product(kind, n_rows, cols, i * nbytes, n, True)[1]
        passes.append((canonical, matrix))
    flops = 2e-9 * n * n_rows * cols * pieces
    return {
        "type": kind,
        "shape": [n_rows, cols],
        "rows": n,
        "gflop_s": flops / median([p[1] for p in passes]),
        "canonical_gflop_s": flops / median([p[0] for p in passes]),
        "ratio": median([p[0] / p[1] for p in passes]),
    }


def _one_op(probe: Any, size: int, kind: str, n: int) -> dict[str, Any]:
    n_rows, cols = SHAPES[kind]
    block, block_bytes = BLOCKS[kind]
    nbytes = n_rows * cols // block * block_bytes
    pairs = size // (2 * nbytes)
    limit = max(1, min(pairs, 400 // max(1, n // 8)))
    passes = []
    for _ in range(_REPEATS):
        read_cpu = read_wall = cpu = wall = 0.0
        for i in range(limit):
            a, b = 2 * i * nbytes, (2 * i + 1) * nbytes
            w, c = probe.read(a, nbytes)
            read_wall, read_cpu = read_wall + w, read_cpu + c
            w, c = probe.product(kind, n_rows, cols, b, n)
            wall, cpu = wall + w, cpu + c
        total = limit * nbytes
        passes.append((total / cpu / 1e9, total / read_cpu / 1e9, total / wall / 1e9, total / read_wall / 1e9))
    flops = 2.0 * n * n_rows * cols / nbytes  # a byte
    rate = median([p[0] for p in passes])
    return {
        "type": kind,
        "shape": [n_rows, cols],
        "rows": n,
        "gb_s": rate,
        "roof_gb_s": median([p[1] for p in passes]),
        "share": median([p[0] / p[1] for p in passes]),
        "wall_gb_s": median([p[2] for p in passes]),
        "wall_share": median([p[2] / p[3] for p in passes]),
        "gflop_s": rate * flops,
        "touched_bytes": limit * nbytes * 2,
    }


def select(*, n: int = 300_000, k: int = 512) -> dict[str, Any]:
    """Top-k of n scores against one pass of `max` (numpy), for scores as the model makes them and for hard ones."""
    isa = _ext.cpu_isas()[0]
    rng = np.random.default_rng(1)
    normal = rng.standard_normal(n).astype(np.float32)
    cases = {
        "normal": normal,
        "sparse": np.where(rng.random(n) < 0.9, 0.0, normal).astype(np.float32),
        "equal": np.ones(n, np.float32),
        "ascending": np.sort(normal),
        "bf16": (normal.view(np.uint32) & 0xFFFF0000).view(np.float32),
    }
    results = []
    for name, scores in cases.items():
        chosen = np.asarray(_ext.ops.top_k(isa, scores, k))
        wanted = np.sort(np.lexsort((np.arange(n), -scores))[:k])
        if not np.array_equal(chosen, wanted):
            raise AssertionError(f"top_k differs from a sort for {name} scores")
        ours, base = [], []
        for _ in range(21):
            base.append(_time(scores.max))
            ours.append(_time(lambda s=scores: _ext.ops.top_k(isa, s, k)))
        results.append({"scores": name, "seconds": min(ours), "max_seconds": min(base), "ratio": min(ours) / min(base)})
    return environment(1, isa) | {"n": n, "k": k, "results": results}


def _time(call: Any) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start
