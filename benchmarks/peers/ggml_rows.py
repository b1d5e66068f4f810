"""Row products beside ggml's, in one process, in turns: same shapes, one activation row, same threads.

    python benchmarks/peers/ggml_rows.py [--lib FOLDER] [--threads 2] [--gib 1] [--json OUT]

FOLDER holds libggml-base and libggml-cpu, as llama-cpp-python 0.3.36 builds them (its `llama_cpp/lib`; without --lib
that package is looked for). The peer is no dependency. ggml rounds the activations to 8 bits and multiplies
integers; here they stay f32 in the canonical order, so the two do not do the same arithmetic: this compares what users
get. ggml's plain weights are used, not those that its loader may repack. Rates are weight bytes over CPU time a thread
(wall beside it); ggml's threads spin while they wait for each other, which counts as CPU time.
"""

from __future__ import annotations

import argparse
import ctypes as c
import importlib.util
import json
import mmap
import statistics
import time
from pathlib import Path
from typing import Any

from ds4v41 import _ext
from ds4v41.bench.common import environment
from ds4v41.bench.probes import BLOCKS, SHAPES

TYPES = {"q8_0": 8, "q4_k": 12}
"""Ours to ggml's number of the type (enum ggml_type)."""
F32 = 0


class _Params(c.Structure):
    _fields_ = (("size", c.c_size_t), ("buffer", c.c_void_p), ("no_alloc", c.c_bool))


class Ggml:
    """The few calls that a graph of matrix products needs."""

    def __init__(self, folder: Path) -> None:
        found = {name: sorted(folder.rglob(f"libggml-{name}.*")) for name in ("base", "cpu")}
        if not all(found.values()):
            raise SystemExit(f"{folder}: expected libggml-base and libggml-cpu here, found {found}")
        self.base = c.CDLL(str(found["base"][0]), mode=c.RTLD_GLOBAL)
        self.cpu = c.CDLL(str(found["cpu"][0]))
        pointer, number = c.c_void_p, c.c_int64
        for call, result, arguments in (
            (self.base.ggml_init, pointer, [_Params]),
            (self.base.ggml_new_tensor_2d, pointer, [pointer, c.c_int, number, number]),
            (self.base.ggml_mul_mat, pointer, [pointer, pointer, pointer]),
            (self.base.ggml_new_graph, pointer, [pointer]),
            (self.base.ggml_build_forward_expand, None, [pointer, pointer]),
            (self.base.ggml_get_data, pointer, [pointer]),
            (self.base.ggml_free, None, [pointer]),
            (self.cpu.ggml_graph_compute_with_ctx, c.c_int, [pointer, pointer, c.c_int]),
        ):
            call.restype, call.argtypes = result, arguments

    def products(self, kind: str, n: int) -> tuple[Any, Any, mmap.mmap]:
        """(context, graph, memory) of n matrices of the type, all times one row; in huge pages, as ours."""
        rows, cols = SHAPES[kind]
        block, block_bytes = BLOCKS[kind]
        n_bytes = rows * cols // block * block_bytes
        memory = mmap.mmap(-1, n * (n_bytes + rows * 4 + 4096) + (64 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        context = self.base.ggml_init(_Params(len(memory), c.addressof(c.c_char.from_buffer(memory)), False))
        row = self.base.ggml_new_tensor_2d(context, F32, cols, 1)
        values = (c.c_float * cols)(*((i % 256 - 128) / 64 for i in range(cols)))
        c.memmove(self.base.ggml_get_data(row), values, cols * 4)
        graph = self.base.ggml_new_graph(context)
        # Bytes whose half floats are finite and moderate, as the probe of the library has them.
        piece = bytes((37 * i * i + 11 * i) & (0x3F if i % 2 else 0x7F) for i in range(1 << 16))
        fill = piece * (n_bytes // len(piece) + 1)
        for _ in range(n):
            matrix = self.base.ggml_new_tensor_2d(context, TYPES[kind], cols, rows)
            c.memmove(self.base.ggml_get_data(matrix), fill, n_bytes)
            self.base.ggml_build_forward_expand(graph, self.base.ggml_mul_mat(context, matrix, row))
        return context, graph, memory


def measure(ggml: Ggml, kind: str, threads: int, gib: float, repeats: int) -> dict[str, Any]:
    """Plain reads, ours and theirs in turns, each over as many bytes."""
    rows, cols = SHAPES[kind]
    block, block_bytes = BLOCKS[kind]
    n_bytes = rows * cols // block * block_bytes
    n = max(1, min(1000, int(gib * (1 << 30)) // n_bytes))  # a graph has room for 2,048 nodes
    probe = _ext.bench.Probe(_ext.cpu_isas()[0], threads, n * n_bytes + (1 << 20), True)
    context, graph, memory = ggml.products(kind, n)
    ggml.cpu.ggml_graph_compute_with_ctx(context, graph, threads)  # takes its work buffer
    sums: dict[str, list[tuple[float, float]]] = {"read": [], "ours": [], "ggml": []}
    for _ in range(repeats):
        wall = cpu = 0.0
        for i in range(n):
            took = probe.product(kind, rows, cols, i * n_bytes, 1)
            wall, cpu = wall + took[0], cpu + took[1]
        sums["ours"].append((wall, cpu))
        begin, spent = time.perf_counter(), time.process_time()
        ggml.cpu.ggml_graph_compute_with_ctx(context, graph, threads)
        sums["ggml"].append((time.perf_counter() - begin, (time.process_time() - spent) / threads))
        sums["read"].append(probe.read(0, n * n_bytes))
    ggml.base.ggml_free(context)
    del memory
    total = n * n_bytes / 1e9
    result: dict[str, Any] = {"type": kind, "shape": [rows, cols], "touched_bytes": n * n_bytes}
    for name, times in sums.items():
        result[f"{name}_gb_s"] = total / statistics.median(t[1] for t in times)
        result[f"{name}_wall_gb_s"] = total / statistics.median(t[0] for t in times)
    pairs = list(zip(sums["ggml"], sums["ours"], strict=True))
    result["ours_over_ggml"] = statistics.median(g[1] / o[1] for g, o in pairs)
    result["ours_over_ggml_wall"] = statistics.median(g[0] / o[0] for g, o in pairs)
    return result


def default_folder() -> Path:
    """Where llama-cpp-python keeps its libraries."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise SystemExit("no llama-cpp-python here: name a folder with its libraries (--lib)")
    return Path(spec.origin).parent / "lib"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ggml = Ggml(args.lib or default_folder())
    results = [measure(ggml, kind, args.threads, args.gib, args.repeats) for kind in TYPES]
    text = json.dumps(environment(args.threads, _ext.cpu_isas()[0]) | {"results": results}, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
