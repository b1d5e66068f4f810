"""What a draft and verify steps cost beside a serial step, from the ledgers, on a slice of the released shape.

    ds4v41 synth slice.gguf --layers 6 --experts 32 --drafter drafter.gguf --drafter-experts 16
    python benchmarks/draft_costs.py slice.gguf drafter.gguf [--steps 12] [--position 4096] [--json FILE]

Weights are random, so rows of a verify step choose experts as if they had nothing in common. The floor of a verify step
is its bytes over the rate at which the serial step reads its own; `over floor` is how far it stays above that.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from typing import Any

import numpy as np

import ds4v41
from ds4v41.ledger import Ledger
from ds4v41.sampling import Sampler, SamplingParams


def part(ledger: Ledger) -> dict[str, Any]:
    """Per run: milliseconds, bytes, and where they go."""
    ledger.require_complete()
    return {
        "ms": 1e3 * ledger.seconds / ledger.runs,
        "bytes": ledger.bytes / ledger.runs,
        "ms_by_op": {row.op: 1e3 * row.seconds / ledger.runs for row in ledger.by_op()},
        "bytes_by_op": {row.op: row.bytes / ledger.runs for row in ledger.by_op()},
    }


def measure(session: ds4v41.Session, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Serial steps, drafts, verify steps of 2 to 6 rows, in turns, every one with different tokens."""
    dice, vocab = random.Random(1), session.model.config.vocab_size
    sampler = Sampler(SamplingParams(temperature=0.0), vocab)
    proposer = session.proposer(sampler, None, None)
    parts: dict[str, list[dict[str, Any]]] = {}
    for _ in range(steps):
        for rows in range(1, 7):
            tokens = np.array([dice.randrange(8, vocab - 1000) for _ in range(rows)], np.int32)
            session.start_ledger()
            session._ext.run(tokens, "all")
            parts.setdefault(f"{rows} rows", []).append(part(session.ledger()))
            session.rewind(session.position - rows)
        session._ext.draft_settle()
        session.start_ledger()
        proposer.propose(dice.randrange(8, vocab - 1000), session.block_size, [])
        parts.setdefault("draft", []).append(part(session.draft_ledger()))
    return parts


def summary(parts: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians; costs in serial steps; over the floor."""
    middle: dict[str, dict[str, Any]] = {
        name: {key: statistics.median(p[key] for p in values) for key in ("ms", "bytes")}
        for name, values in parts.items()
    }
    serial = middle["1 rows"]
    for name, values in middle.items():
        values["serial steps"] = values["ms"] / serial["ms"]
        values["serial bytes"] = values["bytes"] / serial["bytes"]
        values["over floor"] = values["serial steps"] / values["serial bytes"]
        values["ms_by_op"] = {
            op: statistics.median(p["ms_by_op"].get(op, 0.0) for p in parts[name]) for op in parts[name][0]["ms_by_op"]
        }
        values["bytes_by_op"] = {
            op: statistics.median(p["bytes_by_op"].get(op, 0.0) for p in parts[name])
            for op in parts[name][0]["bytes_by_op"]
        }
    return middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("drafter")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--position", type=int, default=4096)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json")
    args = parser.parse_args()
    with ds4v41.Model.open(args.model, threads=args.threads) as model:
        drafter = ds4v41.Drafter.open(args.drafter, model)
        with model.session(args.position + 256, drafter=drafter) as session:
            session._ext.fill_for_benchmark(args.position, 1)
            session.prefill(list(range(100, 100 + model.config.sliding_window)), None)
            measure(session, 1)  # pages come in
            result = summary(measure(session, args.steps))
    for name, values in result.items():
        print(
            f"{name:8} {values['ms']:9.1f} ms  {values['bytes'] / 1e6:9.1f} MB  {values['serial steps']:.2f} serial "
            f"steps, {values['serial bytes']:.2f} of its bytes, {values['over floor']:.2f} over the floor"
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(args), **result}, file, indent=1)


if __name__ == "__main__":
    main()
