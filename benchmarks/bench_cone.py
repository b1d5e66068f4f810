"""What the decoder's cone saves: long prefills with decoder="cone" and "all" in turns, their logits compared byte for
byte; and the cost of a token at several lengths.

    python benchmarks/bench_cone.py [-m slice.gguf] [--tokens 16384] [--pairs 3] [--lengths 2048,8192,65536]

Without a model a synthetic one is made: the released plan of 40 layers (sources, ratios, window of 128), small widths.
Times are CPU seconds of the process over its threads, with wall seconds beside them: other work on the machine changes
only the latter much.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import ds4v41
from ds4v41.synth import tiny_config, write_official

PLAN = Path(__file__).parents[1] / "tests" / "golden" / "released" / "config.json"
LISTS = ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id")


def released_plan(folder: Path, width: int, longest: int) -> Path:
    """A model with the layers of the release, in small."""
    text = json.loads(PLAN.read_text())["text_config"]
    values: dict[str, Any] = {name: text[name] for name in LISTS}
    layers = values["num_hidden_layers"] = text["num_hidden_layers"]
    values["compress_ratios"] = values["compress_ratios"][:layers]
    values |= {
        "hidden_size": width, "moe_intermediate_size": width, "q_lora_rank": width // 2, "num_attention_heads": 4,
        "head_dim": 64, "sliding_window": text["sliding_window"], "max_position_embeddings": longest,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 64,
        "candidate_topk_blocks": 256, "candidate_block_size": 8, "engram_layer_ids": (1, 14), "engram_vocab_size": 2000,
        "num_nextn_predict_layers": 0, "dspark_target_layer_ids": (),
    }  # fmt: skip
    write_official(folder, tiny_config(**values), seed=1)
    return folder


def prefill(model: ds4v41.Model, ids: np.ndarray, decoder: str, chunk: int, by_op: bool = False) -> dict[str, Any]:
    with model.session(len(ids) + 8, retain=256, chunk=chunk, decoder=decoder) as session:  # type: ignore[arg-type]
        if by_op:
            session.start_ledger()
        wall, cpu = time.perf_counter(), time.process_time()
        row = session.prefill(ids)
        wall, cpu = time.perf_counter() - wall, (time.process_time() - cpu) / model.threads
        assert row is not None
        out: dict[str, Any] = {"cpu": cpu, "wall": wall, "row": row.tobytes(), "chunk": session.chunk}
        if by_op:
            out["ops"] = {r.op: r.seconds for r in session.ledger().by_op()}
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--lengths", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lengths = [int(n) for n in args.lengths.split(",") if n]
    rows: list[tuple[str, float, str, str]] = []

    def note(name: str, value: float, unit: str, comment: str) -> None:
        rows.append((name, value, unit, comment))
        print(f"{name:44} {value:10.4g} {unit:8} {comment}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        path = args.model or released_plan(Path(folder) / "m", args.width, max([args.tokens, *lengths]) + 16)
        with ds4v41.Model.open(path) as model:
            c = model.config
            name = f"{c.num_hidden_layers} layers, hidden {c.hidden_size}"
            rng = np.random.default_rng(3)
            load = f"load {os.getloadavg()[0]:.1f}, {model.threads} threads"
            ratios = []
            for pair in range(args.pairs):
                ids = rng.integers(10, c.vocab_size, args.tokens).astype(np.int32)
                order = ("cone", "all") if pair % 2 == 0 else ("all", "cone")
                got = {decoder: prefill(model, ids, decoder, args.chunk) for decoder in order}
                assert got["cone"]["row"] == got["all"]["row"], "the logits differ"
                ratios.append(got["cone"]["cpu"] / got["all"]["cpu"])
                seconds = ", ".join(f"{k} {v['cpu']:.1f} s CPU ({v['wall']:.1f} wall)" for k, v in got.items())
                comment = f"{seconds}; equal logits; {load}"
                note(f"{name}: {args.tokens} tokens, cone / all", ratios[-1], "ratio", comment)
            if ratios:
                note(f"{name}: {args.tokens} tokens, median", statistics.median(ratios), "ratio", "cone / all")
            for n in lengths:
                ids = rng.integers(10, c.vocab_size, n).astype(np.int32)
                got = {"x": prefill(model, ids, "cone", args.chunk, by_op=True)}["x"]
                select = got["ops"]["select"] + got["ops"]["index_query"]
                share = select / sum(got["ops"].values())
                note(f"{name}: {n} tokens", 1e3 * got["cpu"] / n, "ms/token",
                     f"chunk {got['chunk']}; selection {100 * share:.1f} % of the operations' time; {load}")
    if args.out is not None:
        with open(args.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["name", "value", "unit", "comment"])
            writer.writerows((name, f"{value:.6g}", unit, comment) for name, value, unit, comment in rows)


if __name__ == "__main__":
    main()
