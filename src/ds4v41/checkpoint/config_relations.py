"""Relations between configuration keys. Each rule yields one sentence per contradiction that it finds.

A rule runs only when all the keys that it needs were readable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from .engram_hash import bucket_primes

Values = dict[str, Any]
Rule = Callable[[Values], Iterator[str]]

_MAX_ENGRAM_COLUMNS = 4096
"""Over all layers; a bound on the search for primes, far above any real model (released: 48)."""


def _sizes(v: Values) -> Iterator[str]:
    if v["num_attention_heads"] % v["o_groups"]:
        yield f"num_attention_heads ({v['num_attention_heads']}) must be a multiple of o_groups ({v['o_groups']})"
    if v["head_dim"] % 32:
        yield f"head_dim ({v['head_dim']}) must be a multiple of 32 (one scale per 32 window elements)"
    if v["index_head_dim"] % 32:
        yield f"index_head_dim ({v['index_head_dim']}) must be a multiple of 32 (one scale per 32 index elements)"
    rope = v["qk_rope_head_dim"]
    if rope % 2:
        yield f"qk_rope_head_dim ({rope}) must be even (it is rotated in pairs)"
    for name in ("head_dim", "index_head_dim"):
        if rope > v[name]:
            yield f"qk_rope_head_dim ({rope}) must not exceed {name} ({v[name]})"


def _experts(v: Values) -> Iterator[str]:
    if v["num_experts_per_tok"] > v["n_routed_experts"]:
        yield f"num_experts_per_tok ({v['num_experts_per_tok']}) exceeds n_routed_experts ({v['n_routed_experts']})"


def _fp4_experts(v: Values) -> Iterator[str]:
    for name in ("hidden_size", "moe_intermediate_size"):
        if v["expert_dtype"] == "fp4" and v[name] % 32:
            yield f"{name} ({v[name]}) must be a multiple of 32 when experts are fp4 (one scale per 32 elements)"


def _token_ids(v: Values) -> Iterator[str]:
    names = ["bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "engram_pad_token_id"]
    if v.get("num_nextn_predict_layers"):
        names.append("dspark_noise_token_id")
    for name in names:
        if (v.get(name) or 0) >= v["vocab_size"]:
            yield f"{name} ({v[name]}) is outside the vocabulary of {v['vocab_size']} ids"


def _ratios(v: Values) -> Iterator[str]:
    n, stages, ratios = v["num_hidden_layers"], v["num_nextn_predict_layers"], v["compress_ratios"]
    if len(ratios) not in (n, n + stages):
        yield (
            f"compress_ratios has {len(ratios)} entries, expected {n + stages} (num_hidden_layers + "
            f"num_nextn_predict_layers) or {n} (num_hidden_layers)"
        )
    for i, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2):
            yield f"compress_ratios[{i}] is {ratio}, expected 0, 1 or 2"
        elif ratio and n <= i < n + stages:
            yield f"compress_ratios[{i}] is {ratio}, expected 0: entries from {n} on are draft stages"


def _layer_list(name: str) -> Rule:
    def rule(v: Values) -> Iterator[str]:
        ids, n = v[name], v["num_hidden_layers"]
        if any(b <= a for a, b in pairwise(ids)):
            yield f"{name} must be strictly increasing, found {_short(ids)}"
        if outside := [i for i in ids if i >= n]:
            yield f"{name} names layers {_short(outside)}, but the model has layers 0..{n - 1}"

    return rule


def _sources(v: Values) -> Iterator[str]:
    """Every compressed layer must find its entries, of its own ratio, and a selection over just these entries."""
    n, ratios = v["num_hidden_layers"], v["compress_ratios"]
    if len(ratios) < n:
        return
    kv, index = set(v["kv_source_layer_ids"]), set(v["index_source_layer_ids"])
    for name, sources in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        for layer in sorted(i for i in sources if i < n and ratios[i] == 0):
            yield f"{name} names layer {layer}, whose compress ratio is 0 (it has no compressed entries)"
    if absent := sorted(kv - index):
        yield f"index_source_layer_ids must hold every KV source, but lacks {_short(absent)}"
    last_kv = last_index = None
    for layer in range(n):
        last_kv = layer if layer in kv else last_kv
        last_index = layer if layer in index else last_index
        if ratios[layer] == 0:
            continue
        if last_kv is None:
            yield f"layer {layer} has compress ratio {ratios[layer]}, but no KV source is at or before it"
        elif ratios[last_kv] != ratios[layer]:
            yield (
                f"layer {layer} has compress ratio {ratios[layer]}, but its KV source, layer {last_kv}, "
                f"has ratio {ratios[last_kv]}"
            )
        if last_index is None:
            yield f"layer {layer} has compress ratio {ratios[layer]}, but no index source is at or before it"


def _candidates(v: Values) -> Iterator[str]:
    source = v["candidate_source_layer_id"]
    if source is None:
        return
    n, ratios, kv, index = (
        v[k] for k in ("num_hidden_layers", "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")
    )
    if source >= n:
        yield f"candidate_source_layer_id ({source}) is out of range: the model has layers 0..{n - 1}"
        return
    if source not in index:
        yield f"candidate_source_layer_id ({source}) must be one of index_source_layer_ids {_short(index)}"
    if source not in kv:
        yield f"candidate_source_layer_id ({source}) must be one of kv_source_layer_ids {_short(kv)}"
    if source < len(ratios) and ratios[source] == 0:
        yield f"candidate_source_layer_id ({source}) has compress ratio 0: it has no entries to choose from"
    if later := [layer for layer in kv if layer > source]:
        users = [layer for layer in index if layer >= later[0]]
        yield (
            f"index layers {_short(users)} come after the candidate source {source} but read the entries of other KV "
            f"sources {_short(later)}: candidates of one source do not describe the entries of another"
        )


def _candidate_count(v: Values) -> Iterator[str]:
    blocks, size, topk = v["candidate_topk_blocks"], v["candidate_block_size"], v["index_topk"]
    if v["candidate_source_layer_id"] is not None and blocks * size < topk:
        yield f"candidate_topk_blocks ({blocks}) * candidate_block_size ({size}) must be at least index_topk ({topk})"


def _engram(v: Values) -> Iterator[str]:
    ids, rows = v["engram_layer_ids"], v["engram_num_embeddings"]
    if len(ids) != len(rows):
        yield f"engram_num_embeddings has {len(rows)} entries, expected one for each of {len(ids)} engram_layer_ids"
    columns = (v["engram_max_ngram_size"] - 1) * v["engram_n_heads"]
    if columns * len(ids) > _MAX_ENGRAM_COLUMNS:
        yield f"Engram has {columns} columns in {len(ids)} layers, at most {_MAX_ENGRAM_COLUMNS} in all are supported"
        return
    primes = bucket_primes(v["engram_vocab_size"], len(ids), columns)
    for i, (found, of_layer) in enumerate(zip(rows, primes, strict=False)):
        if found != sum(of_layer):
            yield (
                f"engram_num_embeddings[{i}] is {found}, expected {sum(of_layer)} (the sum of the {columns} primes "
                f"from {of_layer[0]} to {of_layer[-1]} of Engram layer {ids[i]})"
            )


def _engram_sizes(v: Values) -> Iterator[str]:
    if v["engram_head_dim"] % 32:
        yield f"engram_head_dim ({v['engram_head_dim']}) must be a multiple of 32 (one scale per 32 row elements)"


def _engram_vocab(v: Values) -> Iterator[str]:
    if v["engram_compressed_vocab_size"] > v["vocab_size"]:
        yield (
            f"engram_compressed_vocab_size ({v['engram_compressed_vocab_size']}) exceeds vocab_size "
            f"({v['vocab_size']}): a token map can only merge ids"
        )


def _drafter(v: Values) -> Iterator[str]:
    if not v["num_nextn_predict_layers"]:
        return
    if not v["dspark_target_layer_ids"]:
        yield "dspark_target_layer_ids is empty, but there are draft stages that read target layers"
    used, n = v["dspark_num_experts_per_tok"], v["dspark_n_routed_experts"]
    if used > n:
        yield f"dspark_num_experts_per_tok ({used}) exceeds dspark_n_routed_experts ({n})"


def _vision(v: Values) -> Iterator[str]:
    if v["vision_layers"] and v["vision_hidden_size"] % v["vision_num_attention_heads"]:
        yield (
            f"vision_config.hidden_size ({v['vision_hidden_size']}) must be a multiple of its "
            f"num_attention_heads ({v['vision_num_attention_heads']})"
        )


def _short(ids: tuple[int, ...] | list[int]) -> str:
    shown = ", ".join(str(i) for i in ids[:12])
    return f"[{shown}{', ...' if len(ids) > 12 else ''}]"


_KV = ("num_hidden_layers", "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")
_ENGRAM = ("engram_layer_ids", "engram_num_embeddings", "engram_max_ngram_size", "engram_n_heads", "engram_vocab_size")

RULES: list[tuple[tuple[str, ...], Rule]] = [
    (("num_attention_heads", "o_groups", "head_dim", "index_head_dim", "qk_rope_head_dim"), _sizes),
    (("num_experts_per_tok", "n_routed_experts"), _experts),
    (("hidden_size", "moe_intermediate_size", "expert_dtype"), _fp4_experts),
    (("vocab_size",), _token_ids),
    (("num_hidden_layers", "num_nextn_predict_layers", "compress_ratios"), _ratios),
    *(
        (("num_hidden_layers", name), _layer_list(name))
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids")
    ),
    (_KV, _sources),
    ((*_KV, "candidate_source_layer_id"), _candidates),
    (("candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size", "index_topk"), _candidate_count),
    (_ENGRAM, _engram),
    (("engram_head_dim",), _engram_sizes),
    (("engram_compressed_vocab_size", "vocab_size"), _engram_vocab),
    (
        (
            "num_nextn_predict_layers",
            "dspark_target_layer_ids",
            "dspark_num_experts_per_tok",
            "dspark_n_routed_experts",
        ),
        _drafter,
    ),
    (("vision_layers", "vision_hidden_size", "vision_num_attention_heads"), _vision),
]


def check(values: Values) -> list[str]:
    """All contradictions among the readable values."""
    return [problem for needs, rule in RULES if all(key in values for key in needs) for problem in rule(values)]
