"""The sixty turns of agent_chat.py really run: a tiny model of random weights computes every token, over a store with a
budget of a third of what the chats come to. A turn reuses the prefix that it shares with anything before it,
up to the last frontier that is stored.

    python -m benchmarks.agent_chat_run [--scale 1.0] [--budget BYTES] [--out agent-chat-run.csv]
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import ds4v41
from ds4v41.reuse import common_prefix
from ds4v41.synth import tiny_config, write_official

from .agent_chat import SYSTEM, conversations

CONTEXT = 1 << 17


def run(folder: Path, scale: float, budget: int) -> tuple[list[dict[str, Any]], Any]:
    """The table, a row for each turn, and the store's statistics at the end."""
    write_official(folder / "model", tiny_config(max_position_embeddings=CONTEXT + 8), seed=1)
    model = ds4v41.Model.open(folder / "model")
    store = ds4v41.KVStore(folder / "store", budget=budget)
    live: dict[int, ds4v41.Session] = {}
    states: list[np.ndarray] = []
    table: list[dict[str, Any]] = []
    for number, turn in enumerate(conversations(system=SYSTEM, scale=scale)):
        if turn.chat not in live:
            live[turn.chat] = model.session(CONTEXT, store=store, retain=256)
        session = live[turn.chat]
        before = time.perf_counter()
        session.advance_to(turn.prompt, shared=SYSTEM)
        seconds = time.perf_counter() - before
        stats = replace(session.stats)
        common = max((common_prefix(state, turn.prompt) for state in states), default=0)
        states.append(turn.prompt)
        session.prefill(turn.reply, None)
        states.append(np.array(session.tokens, np.int32))
        disk = store.stats()
        table.append(
            {
                "turn": number, "chat": turn.chat, "kind": turn.kind, "tokens": len(turn.prompt), "common": common,
                "reused": stats.reused, "prefilled": stats.prefilled, "replayed": stats.replayed,
                "restored": stats.restored, "seconds": round(seconds, 3), "disk_bytes": disk.disk_bytes,
                "why": stats.why,
            }
        )  # fmt: skip
        if turn.restart:
            for old in live.values():
                old.close()
            live.clear()
            store.close()
            store = ds4v41.KVStore(folder / "store", budget=budget)
    final = store.stats()
    print(f"written {final.written_bytes:,} bytes, {final.disk_bytes:,} on disk; store clean: {store.verify().clean}")
    store.close()
    return table, final


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--budget", type=int, default=0, help="bytes (default: a third of a run without one)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    budget = args.budget
    if not budget:
        with tempfile.TemporaryDirectory() as folder:
            _, stats = run(Path(folder), args.scale, 1 << 40)
            budget = stats.disk_bytes // 3
            print(f"without a budget the chats come to {stats.disk_bytes:,} bytes")
    with tempfile.TemporaryDirectory() as folder:
        table, stats = run(Path(folder), args.scale, budget)
    for row in table:
        print("  ".join(f"{k} {v}" for k, v in row.items()))
    common, reused = sum(r["common"] for r in table), sum(min(r["reused"], r["common"]) for r in table)
    most = max(r["disk_bytes"] for r in table)
    print(f"reused {reused:,} of {common:,} ({reused / common:.2%}); most on disk {most:,} of {budget:,}")
    if args.out is not None:
        with open(args.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
