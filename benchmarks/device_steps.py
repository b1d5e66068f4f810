"""Steps of a released-shape model on a device: one row and six, at several depths, and a short prefill.

    ds4v41 synth q4.gguf --shape released --layers 40 --experts 16 --recipe q4
    python benchmarks/device_steps.py q4.gguf --backend cuda --json results.json

The sessions are filled with random cache rows: what comes out means nothing, the bytes that are read are those of the
release.
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
from ds4v41 import Model, _ext


def median_ms(step: Any, n: int) -> float:
    times = []
    for i in range(n):
        begin = time.perf_counter()
        step(i)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def at_depth(model: Model, context: int, steps: int) -> dict[str, Any]:
    with model.session(context + 256) as session:
        session._ext.fill_for_benchmark(context, 1)
        session.step([5])  # kernels are compiled, pages move to the device
        before = _ext.metal_counters() if hasattr(_ext, "metal_counters") else None
        one = median_ms(lambda i: session.step([7 + i]), steps)
        counts = {}
        if before is not None:
            after = _ext.metal_counters()
            names = ("dispatches", "levels", "command_buffers", "waits")
            counts = {name: (after[name] - before[name]) / steps for name in names}
        times = kernel_times(lambda: [session.step([9]) for _ in range(3)], 3)
        session.step([5] * 6)
        six = median_ms(lambda i: session.step([7 + i, 8, 9, 10, 11, 12]), max(3, steps // 3))
        times += kernel_times(lambda: session.step([9] * 6), 1)
    return {
        "context": context,
        "one_row_ms": one,
        "six_rows_ms": six,
        "tok_s": 1e3 / one,
        **counts,
        **({"times": times} if times else {}),
    }


def kernel_times(work: Any, runs: int) -> list[dict[str, Any]]:
    """With DS4_CUDA_TIMES=1 (docs/cuda.md): what every kernel took of the device, a run."""
    if os.environ.get("DS4_CUDA_TIMES") != "1" or not hasattr(_ext, "cuda_times"):
        return []
    _ext.cuda_times()
    work()
    return [{"launch": launch, "dispatches": n / runs, "us": 1e6 * s / runs} for launch, n, s in _ext.cuda_times()]


def prefill(model: Model, n: int) -> dict[str, Any]:
    ids = np.random.default_rng(1).integers(10, model.config.vocab_size, n).astype(np.int32)
    with model.session(2 * n, chunk=n) as session:
        session.prefill(ids[:64], logits=None)
        begin = time.perf_counter()
        session.prefill(ids, logits=None)
        seconds = time.perf_counter() - begin
    return {"tokens": n, "seconds": seconds, "tok_s": n / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--contexts", default="8192,300000,1000000")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prefill", type=int, default=512, metavar="N")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    with Model.open(args.model, backend=args.backend) as model:
        result: dict[str, Any] = {"version": ds4v41.__version__, "model": args.model.name, "backend": args.backend}
        result["steps"] = [at_depth(model, int(c), args.steps) for c in args.contexts.split(",")]
        for row in result["steps"]:
            print(row, flush=True)
        result["prefill"] = prefill(model, args.prefill)
        print(result["prefill"], flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
