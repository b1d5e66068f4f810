"""A model on paper: tokens a second from the bytes of a step, a machine's read rate and a cost for each dispatch.

    python benchmarks/paper.py [--recipe q4|mxfp4] [--context 8192] [--rows 1] [--json]

Predictions, not measurements. The bytes are those that the ledger counts (csrc/engine/ledger.cpp), computed from the
released configuration without a file; tests/model/test_paper.py holds both against each other. docs/paper-model.md
says where every figure about a machine comes from, and which are assumptions.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from ds4v41.checkpoint import ModelConfig
from ds4v41.checkpoint.convert_plan import plan_tensors
from ds4v41.synth_gguf import slice_config

Costs = dict[str, tuple[int, float]]
"""Dispatches and bytes of a step, by operation."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a prediction needs to know."""

    name: str
    read_gb_s: float
    """Rate that plain copies or reads reach, not the data sheet's."""
    dispatch_us: float
    source: str


@dataclass(frozen=True, slots=True)
class Published:
    """A figure that others measured on the M3 Ultra (80 GPU cores, 512 GB), Q4 weights."""

    what: str
    context: int
    rows: int
    seconds: float


COPY_SHARE = 705 / 819
"""Of the M3 Ultra's data-sheet rate, what copies reach; assumed for machines whose rate nobody gave us."""
MACHINES = (
    Machine("M3 Ultra", 705.0, 1.75, "copy rate and cost of a serialised dispatch (1.65 to 1.84 us) by the ds4 fork"),
    Machine("M5 Ultra", 1228 * COPY_SHARE, 1.75, "ASSUMED: twice the 614 GB/s given for M5 Max, M3 Ultra's copy share"),
    Machine("H200", 4270.0, 2.7, "copy rate measured, read plus written; a dispatch: fitted (paper_h200.py)"),
)
PUBLISHED = (
    Published("serial, 8k, mean", 8192, 1, 1 / 35.91),
    Published("serial, 62k, mean", 62_000, 1, 1 / 35.71),
    Published("serial, 300k, mean", 300_000, 1, 1 / 34.18),
    Published("six-row verification, 8k", 8192, 6, 0.0870),
)
PUBLISHED_BYTES = {1: 13.77e9, 6: 37.657e9}
"""Rows of a step to bytes, as the fork counts them."""


def released() -> ModelConfig:
    """The released configuration."""
    return slice_config("released", 40, 384, 384_000_000)


def experts_of(config: ModelConfig, rows: int) -> float:
    """Distinct experts of a layer that `rows` tokens choose, if they choose independently and evenly."""
    n, k = config.n_routed_experts, config.num_experts_per_tok
    return float(n * (1 - (1 - k / n) ** rows))


def _weights(config: ModelConfig, recipe: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of every tensor by official name, and of one row of the embedding table."""
    tensors, _ = plan_tensors(config, "model", recipe, None, None)
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.spec.name] = tensor.nbytes
    return sizes, {t.spec.name: t.nbytes // t.shape[0] for t in tensors if t.spec.name == "embed.weight"}


def _layer(config: ModelConfig, sizes: dict[str, int], i: int, context: int, rows: int) -> Costs:
    def size(*names: str) -> int:
        return sum(sizes.get(f"layers.{i}.{name}", 0) for name in names)

    def caches(row_bytes: int, entries: int) -> int:
        return rows * entries * row_bytes  # each row of the step reads its own; a few entries more for later rows

    ratio = config.compress_ratios[i]
    visible = (context + 1) // ratio if ratio else 0
    window = min(context + 1, config.sliding_window) * (config.head_dim + config.head_dim // 32)
    chosen = min(config.index_topk, visible) * (config.head_dim // 2 + config.head_dim // 16)
    experts = sum(sizes[f"layers.{i}.ffn.experts.{w}.weight"] for w in ("w1", "w2", "w3"))
    shared = size(*(f"ffn.shared_experts.{w}.weight" for w in ("w1", "w2", "w3")))
    costs: Costs = {
        "hc_read": (2, size("hc_attn_fn", "hc_ffn_fn")),
        "hc_write": (2, 0),
        "attn_in": (1, size("attn.wq_a.weight", "attn.wkv.weight")),
        "attn_query": (1, size("attn.wq_b.weight")),
        "attend": (1, rows * (window + chosen)),
        "attn_out": (1, size("attn.wo_a.weight", "attn.wo_b.weight")),
        "route": (1, size("ffn.gate.weight")),
        "moe": (1, shared + experts * experts_of(config, rows) / config.n_routed_experts),
    }
    if i in config.engram_layer_ids:
        costs["engram"] = (1, size("engram.wkv.weight"))
    if i in config.kv_source_layer_ids:
        names = ("compressor.wkv", "compressor.wgate", "indexer.wk")
        costs["compress"] = (1, size(*(f"attn.{name}.weight" for name in names)))
    if i in config.index_source_layer_ids:
        costs["index_query"] = (1, size("attn.indexer.wq_b.weight", "attn.indexer.weights_proj.weight"))
        block = config.candidate_block_size
        if config.uses_candidates(i):
            visible = min(visible, min(config.candidate_topk_blocks, -(-visible // block)) * block)
        costs["select"] = (1, caches(config.index_head_dim // 2 + config.index_head_dim // 32, visible))
    return costs


def step(config: ModelConfig, recipe: str, context: int, rows: int = 1) -> Costs:
    """A step of `rows` tokens behind `context` others."""
    sizes, embed_row = _weights(config, recipe)
    total: Costs = {"embed": (1, rows * embed_row["embed.weight"]), "head": (1, sizes["head.weight"])}
    for i in range(config.num_hidden_layers):
        for op, (dispatches, n_bytes) in _layer(config, sizes, i, context, rows).items():
            before = total.get(op, (0, 0.0))
            total[op] = (before[0] + dispatches, before[1] + n_bytes)
    return total


def bytes_of(costs: Costs) -> float:
    """Bytes of a step."""
    return sum(n_bytes for _, n_bytes in costs.values())


def seconds(costs: Costs, machine: Machine) -> float:
    """Every byte once at the machine's read rate, every dispatch one after the other, nothing overlapped."""
    dispatches = sum(n for n, _ in costs.values())
    return bytes_of(costs) / (machine.read_gb_s * 1e9) + dispatches * machine.dispatch_us * 1e-6


def report(recipe: str, context: int, rows: int) -> dict[str, object]:
    """Predictions, and the published figures beside what the same arithmetic gives for them."""
    config = released()
    costs = step(config, recipe, context, rows)
    checks = []
    for p in PUBLISHED:
        predicted = seconds(step(config, "q4", p.context, p.rows), MACHINES[0])
        checks.append({"what": p.what, "published_ms": 1e3 * p.seconds, "predicted_ms": 1e3 * predicted,
                       "share": predicted / p.seconds})  # fmt: skip
    share = checks[0]["share"]
    assert isinstance(share, float)
    return {
        "recipe": recipe,
        "context": context,
        "rows": rows,
        "gb": bytes_of(costs) / 1e9,
        "dispatches": sum(n for n, _ in costs.values()),
        "gb_by_op": {op: n / 1e9 for op, (_, n) in sorted(costs.items(), key=lambda item: -item[1][1])},
        "predicted_steps_s": {
            m.name: {"bound": 1 / t, "at_published_share": share / t, "source": m.source}
            for m, t in ((m, seconds(costs, m)) for m in MACHINES)
        },
        "published": checks,
        "published_and_own_gb": {
            n: [size / 1e9, bytes_of(step(config, "q4", 8192, n)) / 1e9] for n, size in PUBLISHED_BYTES.items()
        },
    }


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=("q4", "mxfp4"), default="q4")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = report(args.recipe, args.context, args.rows)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        if isinstance(value, (dict, list)):
            print(f"{name}:")
            for line in value.items() if isinstance(value, dict) else value:
                print(f"  {line}")
        else:
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
