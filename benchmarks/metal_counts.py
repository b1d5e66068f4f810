"""What a token, a verification and a prefill chunk of the released model mean for a Metal device.

Command buffers, waits, dispatches, and how many of them must wait for another. Needs a build with the stand-in, which
encodes and validates without executing; the weights are a sparse file of the released size. Then, by arithmetic from
the sizes of the matrices, what the products of a prefill ask the memory for, in pieces of 8 rows and in tiles of 32.

    python benchmarks/metal_counts.py [--folder FOLDER] [--depth 8192]
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ds4v41 import _ext, synth_gguf
from ds4v41.checkpoint import ModelConfig, open_checkpoint
from ds4v41.checkpoint.convert_plan import plan_tensors
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


def pieces_of_experts(rows: int, experts: int, chosen: int, size: int) -> float:
    """Expected pieces of up to `size` tokens over all experts, if tokens choose independently and evenly."""
    p, total, chance = chosen / experts, 0.0, (1 - chosen / experts) ** rows
    for m in range(rows + 1):
        total += -(-m // size) * chance
        chance *= (rows - m) / (m + 1) * p / (1 - p)
    return experts * total


def streamed(config: ModelConfig, rows: int, tiles: bool) -> dict[str, float]:
    """Bytes that the products of a prefill of `rows` rows ask for, from caches or memory, if all layers do all rows.

    Without tiles two matrix rows make a piece with 8 activation rows, and up to 1,024 tokens share their experts; with
    tiles 32 with 32, and up to 2,048. The rules are those of csrc/metal_host (use_tiles, kMoeRows).
    """
    out = dict.fromkeys(("dense weights", "expert weights", "activations"), 0.0)
    chosen, experts = config.num_experts_per_tok, config.n_routed_experts
    for tensor in plan_tensors(config, "model", "q4", None, None)[0]:
        shape, name = tensor.shape, tensor.spec.name
        if len(shape) == 3:
            together = min(rows, 2048 if tiles else 1024)
            wide = tiles and together * chosen >= 8 * experts
            pieces = rows / together * pieces_of_experts(together, experts, chosen, 32 if wide else 8)
            out["expert weights"] += tensor.nbytes / experts * pieces
            out["activations"] += rows * chosen * shape[2] * 4 * shape[1] / (32 if wide else 2)
        elif len(shape) == 2 and not re.search(r"^embed|^head|engram\.embed|[qk]_weight", name):
            wide = tiles and -(-shape[0] // 32) * -(-rows // 32) >= 64
            out["dense weights"] += tensor.nbytes * -(-rows // (32 if wide else 8))
            out["activations"] += rows * shape[1] * 4 * shape[0] / (32 if wide else 2)
    return out


def print_streamed() -> None:
    """What a prefill asks for, before and after tiles."""
    config = synth_gguf.slice_config("released", 40, 384, 100_000)
    print("\n| rows | pieces of | dense weights | expert weights | activations |\n| --- | --- | --- | --- | --- |")
    for rows in (512, 2048):
        for tiles in (False, True):
            cells = " | ".join(f"{v / 1e9:,.0f} GB" for v in streamed(config, rows, tiles).values())
            print(f"| {rows:,} | {'32 x 32' if tiles else '2 x 8'} | {cells} |")


def main() -> None:
    """Print three tables in Markdown."""
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
    print_streamed()


if __name__ == "__main__":
    main()
