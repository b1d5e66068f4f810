"""What a slow disk costs: steps when every read takes a millisecond, and prefill from disk against tables in memory.

    python benchmarks/engram_disk.py [MODEL] [--json OUT]     without MODEL: the nano model

The disk is slowed on purpose (csrc/engram/faults.h), so that the result does not depend on the one at hand. `exposed`
is the time that layers waited.

Prefill from disk and from memory take turns (ABBA); the injected bandwidth brings all rows in `--share` of the time
that the computation takes. A prompt of k chunks then waits for its first chunk, before which nothing computes: with
the tables in the first layers at most share / k of the whole. `later_ratio` is the throughput of all other chunks
against theirs from memory; the first is in `throughput_ratio` too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

import ds4v41
from ds4v41.bench.common import environment
from ds4v41.checkpoint import Checkpoint, open_checkpoint
from ds4v41.engram import EngramOptions, hash_of, open_engram
from ds4v41.model import NANO, usable_cores
from ds4v41.prefill import run_prefill
from ds4v41.session import Session
from ds4v41.weights import build, default_activations


def open_model(checkpoint: Checkpoint, options: EngramOptions, faults: dict[str, Any] | None = None) -> ds4v41.Model:
    """A model whose disk is slow on purpose."""
    rows = open_engram(checkpoint, options, faults=faults)
    mode = default_activations(checkpoint.config, checkpoint.dialect)
    weights = build(checkpoint, mode, "auto", usable_cores(), rows)
    return ds4v41.Model(checkpoint, weights, mode, 0, rows)


def waited(session: Session) -> float:
    """Seconds that layers of this session waited for rows so far."""
    return float(session._ext.engram_counters()["wait_seconds"])


def decode(checkpoint: Checkpoint, tokens: Any, delay: float, threads: int | None) -> dict[str, Any]:
    """Steps without a cache, every read delayed."""
    with open_model(checkpoint, EngramOptions(cache=0, threads=threads), {"delay": delay}) as model:
        with model.session(len(tokens) + 8) as session:
            waits, steps = [], []
            for token in tokens:
                before, begin = waited(session), time.perf_counter()
                session.step([int(token)])
                steps.append(time.perf_counter() - begin)
                waits.append(waited(session) - before)
        stats = model.engram
        assert stats is not None
        return {
            "delay_ms": 1e3 * delay,
            "threads": EngramOptions(threads=threads).n_threads(),
            "reads_a_token": stats.reads / len(tokens),
            "read_ms": 1e3 * stats.read_seconds / stats.reads,
            "step_ms": 1e3 * statistics.median(steps[8:]),
            "read_p50_ms": 1e3 * stats.latency[0],
            "exposed_ms": 1e3 * statistics.median(waits[8:]),
            "exposed_p90_ms": 1e3 * float(np.quantile(waits[8:], 0.9)),
            "exposed_p95_ms": 1e3 * float(np.quantile(waits[8:], 0.95)),
        }


def one_prefill(model: ds4v41.Model, tokens: Any, chunk: int) -> list[tuple[float, float, float]]:
    """(seconds, seconds exposed, CPU seconds) of every chunk of a prompt in an empty session."""
    with model.session(len(tokens) + 8, chunk=chunk) as session:
        chunks, before = [], [0.0, time.process_time()]

        def done(_n: int, seconds: float, _matrix: bool) -> None:
            now = [waited(session), time.process_time()]
            chunks.append((seconds, now[0] - before[0], now[1] - before[1]))
            before[:] = now

        run_prefill(session._ext, tokens, None, model.config.vocab_size, chunk, done=done)
        return chunks


def bytes_of(checkpoint: Checkpoint, tokens: Any, chunk: int) -> int:
    """What is read from disk for a prompt in chunks, without computing it."""
    rows, hash_ = open_engram(checkpoint, EngramOptions(cache=0)), hash_of(checkpoint)
    assert rows is not None
    for begin in range(0, len(tokens), chunk):
        first = max(0, begin - checkpoint.config.engram_max_ngram_size + 1)
        for table in range(len(rows.n_rows)):
            line = hash_.rows(table, tokens[first : begin + chunk], begin - first)
            rows.request(table, line.ravel(), "chunk").wait()
    return int(rows.counters()["bytes"])


def prefill(checkpoint: Checkpoint, tokens: Any, chunk: int, share: float, delay: float, pairs: int) -> dict[str, Any]:
    """Paired: tables in memory, and on a disk that takes `share` of the computation's time."""
    with open_model(checkpoint, EngramOptions(mode="ram")) as memory:
        one_prefill(memory, tokens[: 2 * chunk], chunk)  # its pages of the weights come into the page table
        compute = sum(seconds for seconds, _, _ in one_prefill(memory, tokens, chunk))
        bandwidth = bytes_of(checkpoint, tokens, chunk) / (share * compute)
        faults = {"bytes_per_second": bandwidth, "delay": delay}
        ratios, later, first, exposed, cpu = [], [], [], [], []
        with open_model(checkpoint, EngramOptions(cache=0), faults) as disk:
            one_prefill(disk, tokens[: 2 * chunk], chunk)
            for i in range(pairs):
                took = {}
                for model in (memory, disk) if i % 2 == 0 else (disk, memory):
                    took[model] = np.array(one_prefill(model, tokens, chunk))
                whole, part = ({m: t[k:].sum(axis=0) for m, t in took.items()} for k in (0, 1))
                ratios.append(whole[memory][0] / whole[disk][0])
                later.append(part[memory][0] / part[disk][0])
                first.append(took[disk][0][1] / whole[disk][0])
                exposed.append(part[disk][1] / part[disk][0])
                cpu.append(whole[memory][2] / whole[disk][2])
    return {
        "tokens": len(tokens),
        "chunk": chunk,
        "disk_mb_s": bandwidth / 1e6,
        "delay_ms": 1e3 * delay,
        "disk_share": share,
        "memory_tok_s": len(tokens) / compute,
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratios": [round(r, 4) for r in ratios],
        "later_ratio": statistics.median(later),
        "later_ratios": [round(r, 4) for r in later],
        "first_exposed_share": statistics.median(first),
        "later_exposed_share": statistics.median(exposed),
        "cpu_ratio": statistics.median(cpu),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--delay-ms", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", choices=("decode", "prefill"), help="one half of it")
    parser.add_argument("--json", help="also write the result to this file")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model or NANO)
    rng = np.random.default_rng(7)
    tokens = rng.integers(10, checkpoint.config.vocab_size, args.tokens).astype(np.int32)
    delay = args.delay_ms / 1e3
    result = environment(usable_cores(), "auto") | {"model": "nano" if args.model is None else checkpoint.path.name}
    if args.only != "prefill":
        result["decode"] = [decode(checkpoint, tokens[: args.steps], delay, threads) for threads in (1, 16, None)]
    if args.only != "decode":
        result["prefill"] = prefill(checkpoint, tokens, args.chunk, args.share, delay, args.pairs)
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
