"""What a token, a verification and a prefill chunk of the released model mean for a Metal device.

Command buffers, waits, dispatches, and how many of them must wait for another. Needs a build with the stand-in, which
encodes and validates without executing; the weights are a sparse file of the released size.

    python benchmarks/metal_counts.py [--folder FOLDER] [--depth 8192]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ds4v41 import _ext, synth_gguf
from ds4v41.checkpoint import open_checkpoint
from ds4v41.weights import build

ROWS = {"decode, 1 row": 1, "verify, 6 rows": 6, "prefill, 512 rows": 512, "prefill, 2,048 rows": 2048}


def sparse_release(folder: Path) -> Path:
    """A GGUF of the released sizes whose weights are holes; short Engram tables."""
    config = synth_gguf.slice_config("released", 40, 384, 100_000)
    plan, header = synth_gguf._plan(config, "q4")
    path = folder / "sparse.gguf"
    with path.open("wb") as file:
        file.write(header)
        file.truncate(plan.file_bytes)
    return path


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Counts between two answers of metal_counters()."""
    totals = {name: after[name] - before[name] for name in after if name != "kernels"}
    none = (0, 0)
    kernels = {
        name: tuple(b - a for a, b in zip(before["kernels"].get(name, none), counts, strict=True))
        for name, counts in after["kernels"].items()
    }
    return totals | {"kernels": {name: counts for name, counts in kernels.items() if counts[0]}}


def main() -> None:
    """Print two tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the sparse file goes (default: a temporary folder)"
    )
    parser.add_argument("--depth", type=int, default=8192, help="position of the runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        checkpoint = open_checkpoint(sparse_release(Path(folder)))
        _ext.standin.set_options(order="forward", checked=False, execute=False)
        model = build(checkpoint, "bf16", "metal", os.cpu_count() or 1)
        counts = {}
        for name, n in ROWS.items():
            session = _ext.Session(model, context=args.depth + 4096, retain=1024, chunk=2048)
            session.fill_for_benchmark(args.depth, 1)
            before = _ext.metal_counters()
            session.run(np.arange(n, dtype=np.int32) + 5, "last")
            counts[name] = difference(before, _ext.metal_counters())
            session.close()
    print(
        f"| at position {args.depth:,} | command buffers | waits | dispatches | levels |\n"
        "| --- | --- | --- | --- | --- |"
    )
    for name, c in counts.items():
        print(f"| {name} | {c['command_buffers']} | {c['waits']} | {c['dispatches']} | {c['levels']} |")
    names = sorted({kernel for c in counts.values() for kernel in c["kernels"]})
    print("\n| kernel: dispatches (levels) | " + " | ".join(counts) + " |\n| --- |" + " --- |" * len(counts))
    for kernel in names:
        cells = [c["kernels"].get(kernel, (0, 0)) for c in counts.values()]
        print(f"| `{kernel}` | " + " | ".join(f"{n} ({levels})" for n, levels in cells) + " |")


if __name__ == "__main__":
    main()
