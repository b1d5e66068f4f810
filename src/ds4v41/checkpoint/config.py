"""The model configuration: the published `config.json`, flat, typed and checked.

`ModelConfig.from_hf` is the only door: it reads the nested published layout, checks every value and every relation
between values, and reports all faults in one `ConfigError`. Code behind it may rely on the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..errors import ConfigError
from . import config_relations, config_rules
from .config_rules import FLOATS, INTS, OPTIONAL_INTS, VISION_INTS
from .engram_hash import bucket_primes, hash_multipliers

MODEL_TYPE = "deepseek_v41"
TEXT_MODEL_TYPE = "deepseek_v41_text"
VISION_MODEL_TYPE = "deepseek_v41_vision"
QUANT_BLOCK = 32
"""Rows and columns of one fp8 weight block, and elements of one fp4 weight or activation group."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checked configuration. Names are the published ones; nested groups are flattened with a prefix."""

    # token ids
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int | None
    image_token_id: int | None
    # sizes
    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    max_position_embeddings: int
    sliding_window: int
    # numbers
    rms_norm_eps: float
    swiglu_limit: float
    routed_scaling_factor: float
    hidden_act: str
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    # rotary position
    rope_theta: float
    compress_rope_theta: float
    rope_scaling_factor: float
    rope_scaling_beta_fast: float
    rope_scaling_beta_slow: float
    rope_scaling_original_max_position_embeddings: int
    # experts
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    # compressed attention; compress_ratios has one entry a layer, the draft stages (all 0) are cut off
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    # hyper-connections
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    # Engram
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    # drafter (zeros and empty without one)
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    # storage: None = bf16 weights
    quant_method: str | None
    expert_dtype: str | None
    # image tower (zeros without one)
    vision_layers: int
    vision_hidden_size: int
    vision_num_attention_heads: int
    vision_intermediate_size: int
    vision_patch_size: int
    vision_downsample_ratio: int
    vision_max_image_tokens: int
    vision_min_pixels: int
    vision_rope_theta: float
    # where it came from, and the keys there that mean nothing to this library
    source: str = field(default="", compare=False)
    ignored_keys: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> ModelConfig:
        """Read the published layout (`text_config`, `vision_config`, `quantization_config` inside `config`).

        `source` names the origin in messages, usually a path. Raises ConfigError with every problem found.
        """
        values, ignored, problems = config_rules.read_hf(config)
        problems += config_relations.check(values)
        if problems:
            n = len(problems)
            shown = "\n".join(f"  - {p}" for p in problems[:40]) + ("" if n <= 40 else f"\n  ... and {n - 40} more")
            raise ConfigError(
                f"{source}: {n} problem{'s' if n > 1 else ''} in the model configuration:\n{shown}\n"
                "Use the config.json that was published with these weights.",
                problems,
            )
        ratios = values.pop("compress_ratios")[: values["num_hidden_layers"]]
        return cls(compress_ratios=ratios, **values, source=source, ignored_keys=tuple(ignored))

    def to_hf(self) -> dict[str, Any]:
        """The published layout; `from_hf(c.to_hf(), ...) == c`."""
        text: dict[str, Any] = {"model_type": TEXT_MODEL_TYPE}
        names = [*INTS, *FLOATS, *OPTIONAL_INTS, *config_rules.FIXED, *config_rules.INT_LISTS]
        for name in names:
            if not name.startswith(("rope_scaling_", "vision_")) and name not in config_rules.TOP_INTS:
                value = getattr(self, name)
                text[name] = list(value) if isinstance(value, tuple) else _plain(value, name)
        text["compress_ratios"] = [*self.compress_ratios, *([0] * self.num_nextn_predict_layers)]
        text["candidate_source_layer_id"] = self.candidate_source_layer_id
        text |= {"tie_word_embeddings": False, "attention_bias": False}
        text["rope_scaling"] = {"rope_type": "yarn"} | {
            name.removeprefix("rope_scaling_"): _plain(getattr(self, name), name)
            for name in (*INTS, *FLOATS)
            if name.startswith("rope_scaling_")
        }
        return {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": MODEL_TYPE,
            "dtype": "bfloat16",
            **{name: getattr(self, name) for name in config_rules.TOP_INTS if getattr(self, name) is not None},
            **self._quantization_to_hf(),
            "text_config": text,
            "vision_config": self._vision_to_hf(),
        }

    def _quantization_to_hf(self) -> dict[str, Any]:
        if self.quant_method is None:
            return {}
        quantization: dict[str, Any] = {
            "quant_method": self.quant_method,
            "activation_scheme": "dynamic",
            "weight_block_size": [QUANT_BLOCK, QUANT_BLOCK],
            "scale_fmt": "ue8m0",
        }
        if self.expert_dtype is not None:
            quantization["expert_dtype"] = self.expert_dtype
        return {"quantization_config": quantization}

    def _vision_to_hf(self) -> dict[str, Any]:
        vision: dict[str, Any] = {"model_type": VISION_MODEL_TYPE, "num_hidden_layers": self.vision_layers}
        if self.vision_layers:
            vision |= {name: getattr(self, f"vision_{name}") for name in VISION_INTS}
            vision |= {"rope_theta": _plain(self.vision_rope_theta, "rope_theta"), "max_wh_ratio": None}
        return vision

    # ---- who reads what -------------------------------------------------------------------------------------

    def kv_source_of(self, layer: int) -> int | None:
        """The layer whose compressed entries and index keys `layer` reads; None for a window-only layer."""
        return self._last_source(self.kv_source_layer_ids, layer)

    def index_source_of(self, layer: int) -> int | None:
        """The layer whose selection `layer` uses; None for a window-only layer."""
        return self._last_source(self.index_source_layer_ids, layer)

    def _last_source(self, sources: tuple[int, ...], layer: int) -> int | None:
        if not 0 <= layer < self.num_hidden_layers:
            raise IndexError(f"layer {layer} is out of range: the model has layers 0..{self.num_hidden_layers - 1}")
        if self.compress_ratios[layer] == 0:
            return None
        return max(source for source in sources if source <= layer)

    def uses_candidates(self, layer: int) -> bool:
        """Does `layer` score only the blocks that the candidate source kept? (The source itself does not.)"""
        source = self.candidate_source_layer_id
        return source is not None and layer > source and layer in self.index_source_layer_ids

    # ---- Engram; i_engram counts Engram layers, it is not a layer number --------------------------------------

    @property
    def n_engram_columns(self) -> int:
        """Table rows read per token and Engram layer: n-gram sizes 2..max, times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def engram_primes(self, i_engram: int) -> list[int]:
        """Bucket count of every column, `[n_engram_columns]`, in order (size 2 heads 0.., size 3, ...)."""
        table = bucket_primes(self.engram_vocab_size, len(self.engram_layer_ids), self.n_engram_columns)
        return list(table[i_engram])

    def engram_offsets(self, i_engram: int) -> list[int]:
        """First table row of every column, `[n_engram_columns]`."""
        return [0, *accumulate(self.engram_primes(i_engram)[:-1])]

    def engram_multipliers(self, i_engram: int) -> list[int]:
        """Hash multiplier of look-back 0, 1, ..., `[engram_max_ngram_size]`."""
        layer = self.engram_layer_ids[i_engram]
        return list(hash_multipliers(layer, self.engram_max_ngram_size, self.engram_compressed_vocab_size))

    # ---- derived sizes --------------------------------------------------------------------------------------

    @property
    def hc_mix_rows(self) -> int:
        """Rows of an hyper-connection mixer: pre and post (hc_mult each) and hc_mult^2 of comb."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def engram_in_dim(self) -> int:
        """Width of the concatenated table rows of one token and layer."""
        return self.n_engram_columns * self.engram_head_dim


def _plain(value: Any, name: str) -> Any:
    """Bases, factors and betas are published as whole numbers where they are whole; other numbers stay floats."""
    if isinstance(value, float) and name.startswith(("rope_", "compress_rope")) and value.is_integer():
        return int(value)
    return value
