"""Steps of a released-shape model on a device: one row, verifications, several depths, short prefills, and the ledger.

    python benchmarks/device_steps.py --backend cuda --json results.json           # made on the device: 40 layers
    python benchmarks/device_steps.py --backend cuda --experts 16 --recipe mxfp4
    python benchmarks/device_steps.py model.gguf --backend metal                   # or of a file

Without a file the weights are written by the device itself (Model.synthetic), so nothing passes through a disk. The
sessions are filled with random cache rows: what comes out means nothing, the bytes that are read are those of the
release, but for the router. With DS4_CUDA_TIMES=1 the times of all kernels are added (docs/cuda.md).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import ds4v41
from ds4v41 import Model, Session, _ext, bench
from ds4v41.bench.device import about, is_device


def median_ms(step: Any, n: int) -> float:
    times = []
    for i in range(n):
        begin = time.perf_counter()
        step(i)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def at_depth(model: Model, context: int, steps: int, rows: tuple[int, ...]) -> dict[str, Any]:
    """Steps of one row and of several, then what each operation took of the device."""
    with model.session(context + room(steps, rows), retain=256) as session:
        session._ext.fill_for_benchmark(context, 1)
        session.step([5])  # kernels are compiled, pages go to the device
        before = counters()
        one = median_ms(lambda i: session.step([7 + i]), steps)
        counts = {name: (n - before[name]) / steps for name, n in counters().items()}
        times = kernel_times(lambda: [session.step([9]) for _ in range(3)], 3)
        several = {}
        for n in rows:
            ids = [7 + 3 * i for i in range(n)]
            session.step(ids)
            several[n] = median_ms(lambda i, ids=ids: session.step([t + i for t in ids]), max(3, steps // 3))
        if rows:
            times += kernel_times(lambda: session.step([7 + 3 * i for i in range(rows[-1])]), 1)
        ledger = by_op(session, min(5, steps))
    return {
        "context": context,
        "one_row_ms": one,
        "tok_s": 1e3 / one,
        "rows_ms": several,
        **counts,
        **ledger,
        **({"times": times} if times else {}),
    }


def room(steps: int, rows: tuple[int, ...]) -> int:
    """Tokens that come behind the filled ones."""
    return 32 + 2 * steps + sum(n * (max(3, steps // 3) + 2) for n in rows)


def counters() -> dict[str, int]:
    if not hasattr(_ext, "metal_counters"):
        return {}
    every = _ext.metal_counters()
    return {name: every[name] for name in ("dispatches", "levels", "command_buffers", "waits")}


def by_op(session: Session, steps: int) -> dict[str, Any]:
    session.start_ledger()
    for i in range(steps):
        session.step([40 + i])
    ledger = session.ledger()
    return {
        "gb_a_step": ledger.bytes / ledger.runs / 1e9,
        "ledger_clock": "device" if ledger.on_device else "wall",
        "ledger_ms": {row.op: 1e3 * row.time / ledger.runs for row in ledger.by_op()},
        "ledger_gb_s": {row.op: row.gb_s for row in ledger.by_op() if row.bytes},
        "ledger_kernels": ledger.kernels / ledger.runs,
    }


def kernel_times(work: Any, runs: int) -> list[dict[str, Any]]:
    """With DS4_CUDA_TIMES=1 (docs/cuda.md): what every kernel took of the device, a run."""
    if os.environ.get("DS4_CUDA_TIMES") != "1" or not hasattr(_ext, "cuda_times"):
        return []
    _ext.cuda_times()
    work()
    return [{"launch": launch, "dispatches": n / runs, "us": 1e6 * s / runs} for launch, n, s in _ext.cuda_times()]


def prefill(model: Model, n: int) -> dict[str, Any]:
    """The same prompt twice, each in a new session: kernels are compiled in the first."""
    ids = np.random.default_rng(1).integers(10, model.config.vocab_size, n).astype(np.int32)
    for _ in range(2):
        with model.session(n + 64) as session:
            begin = time.perf_counter()
            session.prefill(ids, logits=None)
            seconds = time.perf_counter() - begin
    return {"tokens": n, "seconds": seconds, "tok_s": n / seconds}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="a file; without it one is made in memory")
    parser.add_argument("--shape", choices=("released", "tiny"), default="released")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--recipe", default="q4", help="q4, mxfp4, fp8fp4, bf16")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--contexts", type=numbers, default=(8192, 300_000, 1_000_000))
    parser.add_argument("--rows", type=numbers, default=(2, 3, 4, 5, 6), help="of verifications")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prefill", type=numbers, default=(512, 8192), metavar="N,N")
    parser.add_argument("--json", type=Path, metavar="PATH")
    return parser.parse_args()


def opened(args: argparse.Namespace) -> Model:
    if args.model is not None:
        return Model.open(args.model, backend=args.backend)
    return Model.synthetic(
        args.shape, layers=args.layers, experts=args.experts, recipe=args.recipe, backend=args.backend
    )


def main() -> None:
    args = arguments()
    begin = time.perf_counter()
    with opened(args) as model:
        result: dict[str, Any] = about(model.backend) if is_device(model.backend) else {"isa": model.backend}
        result |= {"version": ds4v41.__version__, "model": model.path.name, "open_s": time.perf_counter() - begin}
        if is_device(model.backend):
            result["roof"] = bench.roof(backend=model.backend)
        print(result, flush=True)
        result["steps"] = []
        for context in args.contexts:
            longest = model.config.max_position_embeddings - room(args.steps, args.rows)
            result["steps"].append(at_depth(model, min(context, longest) & ~1, args.steps, args.rows))
            print(result["steps"][-1], flush=True)
        result["prefill"] = []
        for n in args.prefill:
            result["prefill"].append(prefill(model, n))
            print(result["prefill"][-1], flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
