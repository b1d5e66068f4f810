"""Reading `config.json`: names, types and bounds of single keys. `config_relations` checks keys against each other.

Nothing here raises: problems are collected, so that one look shows all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Values = dict[str, Any]

_DIM = (1, 65536)
# Lower and upper bound of each whole number. The upper ones keep every product of sizes far below 2^63.
INTS: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": _DIM,
    "moe_intermediate_size": _DIM,
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 4096),
    "head_dim": (32, 4096),
    "qk_rope_head_dim": (2, 4096),
    "q_lora_rank": _DIM,
    "o_lora_rank": _DIM,
    "o_groups": (1, 4096),
    "max_position_embeddings": (1, 2**24),
    "sliding_window": (1, 65536),
    "rope_scaling_original_max_position_embeddings": (1, 2**24),
    "n_routed_experts": (1, 4096),
    "num_experts_per_tok": (1, 256),
    "index_n_heads": (1, 1024),
    "index_head_dim": (32, 4096),
    "index_topk": (1, 4096),
    "hc_mult": (1, 8),
    "hc_sinkhorn_iters": (1, 1000),
    "engram_max_ngram_size": (2, 16),
    "engram_vocab_size": (1, 2**31),
    "engram_n_heads": (1, 256),
    "engram_head_dim": (32, 4096),
    "engram_pad_token_id": (0, 2**24),
    "engram_compressed_vocab_size": (1, 2**24),
}
# Whole numbers that may be left out, and then are 0: candidates without a candidate source, the drafter without stages.
OPTIONAL_INTS: dict[str, tuple[int, int]] = {
    "candidate_topk_blocks": (0, 2**24),
    "candidate_block_size": (0, 65536),
    "num_nextn_predict_layers": (0, 64),
    "dspark_block_size": (0, 64),
    "dspark_noise_token_id": (0, 2**24),
    "dspark_markov_rank": (0, 65536),
    "dspark_n_routed_experts": (0, 4096),
    "dspark_num_experts_per_tok": (0, 256),
}
FLOATS: dict[str, tuple[float, float]] = {
    "rms_norm_eps": (0.0, 1.0),
    "swiglu_limit": (1e-6, 1e30),
    "routed_scaling_factor": (1e-6, 1e6),
    "rope_theta": (1.0, 1e12),
    "compress_rope_theta": (1.0, 1e12),
    "rope_scaling_factor": (1.0, 1e6),
    "rope_scaling_beta_fast": (1e-6, 1e6),
    "rope_scaling_beta_slow": (1e-6, 1e6),
    "hc_eps": (0.0, 1.0),
}
# The architecture has one choice here; another value means another architecture.
FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
FIXED_OPTIONAL: dict[str, Any] = {"tie_word_embeddings": False, "attention_bias": False}
INT_LISTS = (
    "compress_ratios",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "engram_layer_ids",
    "engram_num_embeddings",
    "dspark_target_layer_ids",
)
TOP_INTS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
VISION_INTS: dict[str, tuple[int, int]] = {
    "hidden_size": _DIM,
    "num_attention_heads": (1, 4096),
    "intermediate_size": _DIM,
    "patch_size": (1, 1024),
    "downsample_ratio": (1, 64),
    "max_image_tokens": (1, 2**24),
    "min_pixels": (0, 2**31),
}
_MAX_LIST = 4096
_INFORMATIVE = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version"}
_INFORMATIVE_TEXT = {"model_type", "attention_dropout", "initializer_range", "use_cache"}


class _Section:
    """Reads typed values out of one JSON object and notes what is wrong."""

    def __init__(self, data: Any, where: str, problems: list[str]) -> None:
        self._where = f"{where}." if where else ""
        self._problems = problems
        self.readable = isinstance(data, Mapping)
        self.data: Mapping[str, Any] = data if self.readable else {}
        self.seen: set[str] = set()
        if not self.readable:
            problems.append(f"{where or 'the configuration'}: expected a JSON object, found {_show(data)}")

    def problem(self, key: str, text: str) -> None:
        self._problems.append(f"{self._where}{key}: {text}")

    def has(self, key: str) -> bool:
        self.seen.add(key)
        return self.data.get(key) is not None

    def missing(self, key: str, expected: str) -> None:
        if self.readable:
            found = "null" if key in self.data else "nothing (the key is missing)"
            self.problem(key, f"expected {expected}, found {found}")

    def whole(self, key: str, bounds: tuple[int, int], *, integral_float: bool = False) -> int | None:
        expected = f"a whole number from {bounds[0]} to {bounds[1]}"
        if not self.has(key):
            self.missing(key, expected)
            return None
        value = self.data[key]
        if integral_float and isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not bounds[0] <= value <= bounds[1]:
            self.problem(key, f"expected {expected}, found {_show(value)}")
            return None
        return value

    def number(self, key: str, bounds: tuple[float, float]) -> float | None:
        expected = f"a number from {bounds[0]:g} to {bounds[1]:g}"
        if not self.has(key):
            self.missing(key, expected)
            return None
        value = self.data[key]
        if type(value) not in (int, float) or not bounds[0] <= value <= bounds[1]:  # NaN fails the comparison
            self.problem(key, f"expected {expected}, found {_show(value)}")
            return None
        return float(value)

    def fixed(self, key: str, only: Any, *, optional: bool = False) -> Any:
        if not self.has(key):
            if not optional:
                self.missing(key, _show(only))
            return only if optional else None
        value = self.data[key]
        if type(value) is not type(only) or value != only:
            self.problem(key, f"expected {_show(only)} (the only value this library supports), found {_show(value)}")
            return None
        return value

    def wholes(self, key: str) -> tuple[int, ...] | None:
        expected = f"a list of at most {_MAX_LIST} whole numbers >= 0"
        if not self.has(key):
            self.missing(key, expected)
            return None
        value = self.data[key]
        good = isinstance(value, list | tuple) and len(value) <= _MAX_LIST
        if not good or not all(type(item) is int and 0 <= item < 2**40 for item in value):
            self.problem(key, f"expected {expected}, found {_show(value)}")
            return None
        return tuple(value)


def read_hf(config: Any) -> tuple[Values, list[str], list[str]]:
    """Returns (readable values under flat names, ignored keys, problems)."""
    problems: list[str] = []
    values: Values = {}
    top = _Section(config, "", problems)
    top.seen |= _INFORMATIVE
    if not top.readable:
        return values, [], problems
    top.fixed("model_type", "deepseek_v41")
    bounds = (0, 2**24)
    for key in TOP_INTS:
        if key in ("pad_token_id", "image_token_id") and not top.has(key):
            values[key] = None
        else:
            _put(values, key, top.whole(key, bounds))
    ignored = _read_text(top, values, problems)
    _read_quantization(top, values, problems)
    ignored += _read_vision(top, values, problems)
    return values, [*(key for key in top.data if key not in top.seen), *ignored], problems


def _put(values: Values, key: str, value: Any) -> None:
    if value is not None:
        values[key] = value


def _read_text(top: _Section, values: Values, problems: list[str]) -> list[str]:
    if not top.has("text_config"):
        top.missing("text_config", "a JSON object with the language model's sizes")
        return []
    text = _Section(top.data["text_config"], "text_config", problems)
    text.seen |= _INFORMATIVE_TEXT
    for key, span in INTS.items():
        if not key.startswith("rope_scaling_"):
            _put(values, key, text.whole(key, span))
    for name, limits in FLOATS.items():
        if not name.startswith("rope_scaling_"):
            _put(values, name, text.number(name, limits))
    for key, only in FIXED.items():
        _put(values, key, text.fixed(key, only))
    for key, only in FIXED_OPTIONAL.items():
        text.fixed(key, only, optional=True)
    _read_optional(text, values)
    ignored = _read_rope_scaling(text, values, problems)
    return [*(f"text_config.{key}" for key in text.data if key not in text.seen), *ignored]


def _read_optional(text: _Section, values: Values) -> None:
    """Lists, and the keys that may be absent when the part that they describe is absent."""
    for key in INT_LISTS:
        if key != "dspark_target_layer_ids":
            _put(values, key, text.wholes(key))
    has_candidates = text.has("candidate_source_layer_id")
    if has_candidates:
        _put(values, "candidate_source_layer_id", text.whole("candidate_source_layer_id", (0, 1023)))
    else:
        values["candidate_source_layer_id"] = None
    stages = text.whole("num_nextn_predict_layers", (0, 64)) if text.has("num_nextn_predict_layers") else 0
    _put(values, "num_nextn_predict_layers", stages)
    for key, span in OPTIONAL_INTS.items():
        needed = has_candidates if key.startswith("candidate_") else bool(stages)
        if key != "num_nextn_predict_layers":
            lowest = 1 if needed and key != "dspark_noise_token_id" else 0
            absent = not text.has(key) and not needed
            _put(values, key, 0 if absent else text.whole(key, (lowest, span[1])))
    absent = not text.has("dspark_target_layer_ids") and not stages
    _put(values, "dspark_target_layer_ids", () if absent else text.wholes("dspark_target_layer_ids"))


def _read_rope_scaling(text: _Section, values: Values, problems: list[str]) -> list[str]:
    if not text.has("rope_scaling"):
        text.missing("rope_scaling", "a JSON object with the YaRN keys")
        return []
    scaling = _Section(text.data["rope_scaling"], "text_config.rope_scaling", problems)
    if not scaling.has("rope_type") and scaling.has("type"):  # the older spelling of the same key
        scaling.fixed("type", "yarn")
    else:
        scaling.fixed("rope_type", "yarn")
    for name, limits in FLOATS.items():
        if name.startswith("rope_scaling_"):
            _put(values, name, scaling.number(name.removeprefix("rope_scaling_"), limits))
    longest = "original_max_position_embeddings"  # some files store this whole number as a float
    found = scaling.whole(longest, INTS[f"rope_scaling_{longest}"], integral_float=True)
    _put(values, f"rope_scaling_{longest}", found)
    return [f"text_config.rope_scaling.{key}" for key in scaling.data if key not in scaling.seen]


def _read_quantization(top: _Section, values: Values, problems: list[str]) -> None:
    values |= {"quant_method": None, "expert_dtype": None}
    if not top.has("quantization_config"):
        return
    section = _Section(top.data["quantization_config"], "quantization_config", problems)
    if not section.readable:
        return
    values["quant_method"] = section.fixed("quant_method", "fp8")
    section.fixed("scale_fmt", "ue8m0")
    section.fixed("activation_scheme", "dynamic", optional=True)
    if section.wholes("weight_block_size") not in (None, (32, 32)):
        section.problem("weight_block_size", f"expected [32, 32], found {_show(section.data['weight_block_size'])}")
    if section.has("expert_dtype"):
        values["expert_dtype"] = section.fixed("expert_dtype", "fp4")


def _read_vision(top: _Section, values: Values, problems: list[str]) -> list[str]:
    values |= {f"vision_{key}": 0 for key in VISION_INTS}
    values |= {"vision_layers": 0, "vision_rope_theta": 0.0}
    if not top.has("vision_config"):
        return []
    section = _Section(top.data["vision_config"], "vision_config", problems)
    section.seen |= {"model_type", "max_wh_ratio"}
    layers = section.whole("num_hidden_layers", (0, 1024))
    if layers:
        values["vision_layers"] = layers
        for key, span in VISION_INTS.items():
            _put(values, f"vision_{key}", section.whole(key, span))
        _put(values, "vision_rope_theta", section.number("rope_theta", (1.0, 1e12)))
        if section.data.get("max_wh_ratio") is not None:
            section.problem("max_wh_ratio", f"expected null, found {_show(section.data['max_wh_ratio'])}")
    return [f"vision_config.{key}" for key in section.data if layers and key not in section.seen]


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object of {len(value)} keys"
    try:
        text = f"a list of {len(value)}" if isinstance(value, list | tuple) and len(value) > 16 else repr(value)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits, deep nesting
        text = "a value too long to show"
    if isinstance(value, bool | None):
        text = {True: "true", False: "false", None: "null"}[value]
    elif isinstance(value, float) and not math.isfinite(value):
        text = f"{value} (not a finite number)"
    return text if len(text) <= 120 else text[:117] + "..."
