"""The metadata of ds4's GGUF dialect: which keys a file of a given model holds, and how a file is checked against them.

The keys are the raw names of the published configuration below `deepseek41.`; `deepseek41.config` repeats the whole
config.json. Writer and reader use the same list (`config_records`, `engram_records`), so a file that this library
writes is by construction one that it accepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig
from .gguf_header import GgufHeader, MetadataValue

ARCHITECTURE = "deepseek41"
DRAFTER_ARCHITECTURE = "deepseek41-dspark"
BARE_DRAFTER_ARCHITECTURE = "deepseek4-dspark"
VISION_ARCHITECTURE = "deepseek4-vision"
ALIGNMENT = 16_384
"""One page of Apple silicon, so that the Engram tables can be left out of a mapping without cutting a page."""
SCALE_GROUP = 32

U32, I32, F32, BOOL, STRING, U64 = 4, 5, 6, 7, 8, 10
"""Value types of GGUF metadata."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_source_layer_id",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "rope_theta",
    "compress_rope_theta",
)
_REALS = ("rms_norm_eps", "hc_eps", "swiglu_limit", "routed_scaling_factor")
_NAMES = ("scoring_func", "hidden_act", "topk_method")
_LISTS = ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")
_ROPE = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class Record:
    """One metadata entry: `value` is a scalar, or a sequence when `is_array`."""

    key: str
    kind: int
    value: Any
    is_array: bool = False


def config_records(config: ModelConfig) -> list[Record]:
    """The entries that repeat single values of the configuration, in writing order."""
    records = [_size(name, getattr(config, name)) for name in _SIZES if getattr(config, name) is not None]
    records += [Record(_key(name), F32, getattr(config, name)) for name in _REALS]
    records += [Record(_key(name), STRING, getattr(config, name)) for name in _NAMES]
    records.append(Record(_key("norm_topk_prob"), BOOL, config.norm_topk_prob))
    records += [Record(_key(name), U32, tuple(getattr(config, name)), True) for name in _LISTS]
    records += [Record(_key(f"rope_scaling.{name}"), F32, getattr(config, f"rope_scaling_{name}")) for name in _ROPE]
    return records


def engram_records(config: ModelConfig, token_map: Sequence[int] | NDArray[Any]) -> list[Record]:
    """The Engram entries: hash constants and the token map. Nothing for a model without Engram layers."""
    layers = config.engram_layer_ids
    if not layers:
        return []
    primes = [prime for i in range(len(layers)) for prime in config.engram_primes(i)]
    multipliers = [multiplier for i in range(len(layers)) for multiplier in config.engram_multipliers(i)]
    return [
        Record(_key("engram.encoding"), STRING, engram_encoding(config)),
        Record(_key("engram.layer_ids"), U32, tuple(layers), True),
        Record(_key("engram.rows"), U32, tuple(config.engram_num_embeddings), True),
        Record(_key("engram.compressed_vocab_size"), U32, config.engram_compressed_vocab_size),
        Record(_key("engram.pad_id"), U32, int(token_map[config.engram_pad_token_id])),
        Record(_key("engram.token_map"), U32, token_map, True),
        Record(_key("engram.primes"), U32, primes, True),
        Record(_key("engram.multipliers"), U64, multipliers, True),
    ]


def engram_row_bytes(config: ModelConfig) -> int:
    """Bytes of a table row: one e4m3 code for each of the head_dim values, then one e8m0 scale for each 32 of them.

    256 + 8 = 264 in the release; the same rule for every other width (32 + 1 = 33 for a head_dim of 32).
    """
    return config.engram_head_dim + config.engram_head_dim // SCALE_GROUP


def engram_encoding(config: ModelConfig) -> str:
    """Name of the row format; the width is part of it."""
    return f"e4m3_e8m0_{SCALE_GROUP}_row{engram_row_bytes(config)}"


TARGET_KEY = f"{ARCHITECTURE}.dspark.target_lineage"
"""Which model a drafter was made with (lineage.py); files of other makers do not have it."""


def drafter_records(config: ModelConfig) -> list[Record]:
    """The entries of a DSpark file that repeat the configuration, in writing order."""
    stages = config.num_nextn_predict_layers
    values: tuple[tuple[str, int | tuple[int, ...]], ...] = (
        ("block_size", config.dspark_block_size),
        ("markov_rank", config.dspark_markov_rank),
        ("noise_token_id", config.dspark_noise_token_id),
        ("target_layer_ids", tuple(config.dspark_target_layer_ids)),
        ("stage_count", stages),
        ("n_layers", stages),
        ("n_routed_experts", config.dspark_n_routed_experts),
        ("num_experts_per_tok", config.dspark_num_experts_per_tok),
        ("expert_feed_forward_length", config.moe_intermediate_size),
    )
    return [Record(_key(f"dspark.{name}"), U32, value, isinstance(value, tuple)) for name, value in values]


def _key(name: str) -> str:
    return f"{ARCHITECTURE}.{name}"


def _size(name: str, value: float) -> Record:
    """Whole numbers are u32 (the two rotary bases too); a base that is not whole has to be f32."""
    whole = int(value) == value
    return Record(_key(name), U32 if whole else F32, int(value) if whole else value)


# ---- checking ---------------------------------------------------------------------------------------------------


def check_records(header: GgufHeader, records: Iterable[Record]) -> list[str]:
    """Problems of the metadata: keys that are missing, of another kind, or that say something else than expected."""
    problems = []
    for record in records:
        found = header.metadata.get(record.key)
        if found is None:
            problems.append(f"{header.path}: metadata key {record.key} is missing, expected {_show(record.value)}")
        elif difference := _difference(record, found):
            problems.append(f"{header.path}: byte {found.offset}: metadata key {record.key}: {difference}")
    return problems


_INTEGERS = (0, 1, 2, 3, 4, 5, 10, 11)


def _difference(record: Record, found: MetadataValue) -> str:
    """What is wrong with a value, "" when it is right. Width and sign of an integer type do not matter."""
    if found.is_array != record.is_array or not _same_family(record.kind, found.kind):
        return f"expected {_kind(record.kind, record.is_array)}, found {_kind(found.kind, found.is_array)}"
    if record.is_array:
        return _array_difference(record, found)
    expected, value = record.value, found.value
    same = np.float32(expected) == np.float32(value) if record.kind == F32 else expected == value
    return "" if same else f"expected {_show(expected)} as in the configuration, found {_show(value)}"


def _array_difference(record: Record, found: MetadataValue) -> str:
    if len(found.value) != len(record.value):
        return f"expected {len(record.value)} entries, found {len(found.value)}"
    expected = np.asarray(record.value, dtype=np.uint64)
    differs = np.flatnonzero(np.asarray(found.value) != expected)
    if not differs.size:
        return ""
    i = int(differs[0])
    return f"entry {i}: expected {expected[i]} as in the configuration, found {found.value[i]}"


def _same_family(expected: int, found: int) -> bool:
    if expected in _INTEGERS:
        return found in _INTEGERS
    return found in (F32, 12) if expected == F32 else found == expected


def _kind(kind: int, is_array: bool) -> str:
    names = {F32: "a float", 12: "a float", BOOL: "a bool", STRING: "a string", 9: "an array"}
    name = names.get(kind, "an integer")
    return f"an array of {name.split()[-1]}s" if is_array else name


def _show(value: Any) -> str:
    text = repr(list(value)[:8]) if isinstance(value, (list, tuple, np.ndarray)) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
