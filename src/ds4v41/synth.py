"""Synthetic checkpoints: random weights of any shape in the official format, for tests and benchmarks.

The weights make no sense, but they are sane: normal values of a size that keeps activations near 1 through all layers,
so that every branch of the model is alive. A tensor depends on the seed, its own name and its shape alone.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import floor, log2, prod
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint.config import ModelConfig
from .checkpoint.engram_hash import bucket_primes
from .checkpoint.header import ITEM_BYTES
from .checkpoint.spec import PARTS, TensorSpec, tensor_table
from .checks import path_of
from .errors import OptionError, shown
from .synth_tokenizer import default_compressed_size, synthetic_tokenizer

STORAGES = ("bf16", "fp8fp4")
_CHUNK = 1 << 22  # elements made at a time
_BASE: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 4,
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 96,
    "o_lora_rank": 32,
    "o_groups": 2,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "rms_norm_eps": 1e-20,
    "swiglu_limit": 10.0,
    "routed_scaling_factor": 1.5,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling_factor": 16.0,
    "rope_scaling_beta_fast": 32.0,
    "rope_scaling_beta_slow": 1.0,
    "rope_scaling_original_max_position_embeddings": 256,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1),
    "kv_source_layer_ids": (2, 5),
    "index_source_layer_ids": (2, 4, 5, 7),
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 16,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": (1, 4),
    "engram_num_embeddings": (),
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 500,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 0,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 3,
    "dspark_target_layer_ids": (5, 6, 7),
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
    "quant_method": None,
    "expert_dtype": None,
    "vision_layers": 0,
    "vision_hidden_size": 0,
    "vision_num_attention_heads": 0,
    "vision_intermediate_size": 0,
    "vision_patch_size": 0,
    "vision_downsample_ratio": 0,
    "vision_max_image_tokens": 0,
    "vision_min_pixels": 0,
    "vision_rope_theta": 0.0,
}


def tiny_config(**overrides: Any) -> ModelConfig:
    """A small configuration in which every part of the model occurs, with fields replaced by name.

    Engram table heights and the number of compressed ids follow from the rest unless they are given. Raises OptionError
    for an unknown field and ConfigError for a combination that makes no model.
    """
    known = {item.name for item in fields(ModelConfig)}
    if unknown := sorted(set(overrides) - known):
        raise OptionError(f"unknown configuration fields {', '.join(unknown)}; fields are those of ModelConfig")
    values = _BASE | {name: tuple(v) if isinstance(v, list) else v for name, v in overrides.items()}
    if "engram_num_embeddings" not in overrides:
        columns = (values["engram_max_ngram_size"] - 1) * values["engram_n_heads"]
        primes = bucket_primes(values["engram_vocab_size"], len(values["engram_layer_ids"]), columns)
        values["engram_num_embeddings"] = tuple(sum(layer) for layer in primes)
    if "engram_compressed_vocab_size" not in overrides:
        values["engram_compressed_vocab_size"] = default_compressed_size(values["vocab_size"])
    return ModelConfig.from_hf(ModelConfig(**values).to_hf(), "synthetic configuration")


def write_official(
    path: str | os.PathLike[str],
    config: ModelConfig,
    seed: int,
    storage: str = "bf16",
    parts: Sequence[str] = PARTS,
    *,
    shard_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ModelConfig:
    """Write a random checkpoint into the folder `path`, which must be empty or absent. Returns its configuration.

    Storage "bf16" keeps plain weights, "fp8fp4" the released types; the storage keys of the configuration are set to
    match. With `shard_bytes` the tensors go to several files with an index. `progress(bytes done, bytes in all)`.
    Memory use does not grow with the model. Raises OptionError for bad options.
    """
    if storage not in STORAGES:
        raise OptionError(f"storage must be one of {', '.join(STORAGES)}, not {shown(storage)}")
    if shard_bytes is not None and shard_bytes <= 0:
        raise OptionError(f"shard_bytes must be positive, not {shard_bytes}")
    quantised = storage == "fp8fp4"
    config = replace(config, quant_method="fp8" if quantised else None, expert_dtype="fp4" if quantised else None)
    config = ModelConfig.from_hf(config.to_hf(), "synthetic configuration")
    tokenizer = synthetic_tokenizer(config.vocab_size, config.engram_compressed_vocab_size, _special_ids(config))
    items = [item for spec in tensor_table(config, parts) for item in _items(spec, config, quantised)]
    folder = path_of("path", path)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise OptionError(f"{folder}: the folder is not empty; give a new one")
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    _write_shards(folder, _split(items, shard_bytes), seed, progress)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=1))
    return config


def _special_ids(config: ModelConfig) -> dict[int, str]:
    special = {config.bos_token_id: "<｜begin▁of▁sentence｜>"}
    special.setdefault(config.eos_token_id, "<｜end▁of▁sentence｜>")
    if config.num_nextn_predict_layers:
        special.setdefault(config.dspark_noise_token_id, "<|noise|>")
    for token_id, text in ((config.pad_token_id, "<｜▁pad▁｜>"), (config.image_token_id, "<|image|>")):
        if token_id is not None:
            special.setdefault(token_id, text)
    return special


# ---- what to write ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Item:
    """One stored tensor: a weight, or the scales of one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: TensorSpec
    is_scale: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def _items(spec: TensorSpec, config: ModelConfig, quantised: bool) -> Iterator[_Item]:
    if spec.optional and not config.vision_layers:
        return
    dtype = "F32" if spec.role in ("hc", "sink", "router_bias") else "BF16"
    if spec.role == "engram_table" or (quantised and "F8_E4M3" in spec.types):
        dtype = "F8_E4M3"
    elif quantised and "I8" in spec.types:
        dtype = "I8"
    yield _Item(spec.name, dtype, spec.storage_shape(dtype), spec)
    if spec.needs_scale(dtype):
        yield _Item(spec.scale_name, "F8_E8M0", spec.scale_shape, spec, is_scale=True)


def _split(items: list[_Item], shard_bytes: int | None) -> list[list[_Item]]:
    shards: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if shard_bytes is not None and shards[-1] and size + item.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    # Wide types first, so that every tensor is aligned to its own type.
    return [sorted(shard, key=lambda item: -ITEM_BYTES[item.dtype]) for shard in shards]


def _write_shards(
    folder: Path, shards: list[list[_Item]], seed: int, progress: Callable[[int, int], None] | None
) -> None:
    n, done = len(shards), 0
    total = sum(item.nbytes for shard in shards for item in shard)
    names = ["model.safetensors"] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    for name, shard in zip(names, shards, strict=True):
        with open(folder / name, "xb") as file:
            file.write(_header(shard))
            for item in shard:
                for chunk in _data(item, seed):
                    file.write(chunk.tobytes())
                done += item.nbytes
                if progress is not None:
                    progress(done, total)
    if n > 1:
        weight_map = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _header(shard: list[_Item]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for item in shard:
        offsets = [position, position + item.nbytes]
        entries[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": offsets}
        position += item.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ---- values -------------------------------------------------------------------------------------------------------

# Mean and standard deviation of vectors and row tables, by the end of the name.
_STATISTICS = {
    "norm.weight": (1.0, 0.15),
    "norm1.weight": (1.0, 0.15),
    "norm2.weight": (1.0, 0.15),
    "q_weight": (1.0, 0.15),
    "k_weight": (1.0, 0.15),
    "_base": (0.3, 0.7),
    "_scale": (0.7, 0.15),
    "attn_sink": (0.0, 1.0),
    "gate.bias": (0.0, 0.3),
    "gate.bias_vl": (0.0, 0.3),
    ".bias": (0.0, 0.1),
    "embed.weight": (0.0, 1.0),
    "image_start": (0.0, 1.0),
    "image_newline": (0.0, 1.0),
    "image_end": (0.0, 1.0),
}
# Standard deviation of matrices times sqrt(columns), where it is not 1. The first expert matrices are large, so that
# the clip of the activation is reached.
_GAINS = {
    "wq_b.weight": 1.5,
    "wo_b.weight": 0.4,
    "weights_proj.weight": 2.0,
    "gate.weight": 1.6,
    "w1.weight": 4.0,
    "w3.weight": 4.0,
    "w2.weight": 0.03,
    "head.weight": 3.0,
}


def _statistics(spec: TensorSpec) -> tuple[float, float]:
    for suffix, statistics in _STATISTICS.items():
        if spec.name.endswith(suffix):
            return statistics
    gain = 1.0
    if spec.role != "vision":
        gain = next((value for suffix, value in _GAINS.items() if spec.name.endswith(suffix)), 1.0)
    return 0.0, gain / float(np.sqrt(spec.shape[-1]))


def _data(item: _Item, seed: int) -> Iterator[NDArray[Any]]:
    """The stored bytes of one tensor, piece by piece."""
    rng = np.random.default_rng([seed, zlib.crc32(item.name.encode())])
    mean, std = _statistics(item.spec)
    n = prod(item.shape)
    for start in range(0, n, _CHUNK):
        size = min(_CHUNK, n - start)
        if item.is_scale:
            exponent = _scale_exponent(std, _SIGMA_CODES["I8" if item.spec.role == "expert" else "F8_E4M3"])
            yield (127 + exponent + rng.integers(-1, 2, size=size)).astype(np.uint8)
        elif item.dtype in _SIGMA_CODES:
            table = _fp4_pairs(std) if item.dtype == "I8" else _e4m3_quantiles(std)
            yield table[np.frombuffer(rng.bytes(size), dtype=np.uint8)]
        else:
            values = rng.standard_normal(size, dtype=np.float32) * np.float32(std) + np.float32(mean)
            yield values if item.dtype == "F32" else _bf16(values)


# The code value that stands for about one standard deviation: large enough to use the format, small enough not to clip.
_SIGMA_CODES = {"F8_E4M3": 48.0, "I8": 2.0}


def _scale_exponent(std: float, sigma_code: float) -> int:
    """Power of two of the block scales; each block then takes this one or a neighbour."""
    return floor(log2(std / sigma_code) + 0.5)


def _e4m3_quantiles(std: float) -> NDArray[np.uint8]:
    """[256] e4m3 codes: the quantiles of a normal distribution in units of the block scale."""
    unit = std / 2.0 ** _scale_exponent(std, _SIGMA_CODES["F8_E4M3"])
    magnitudes = np.array([_e4m3_value(code) for code in range(127)])
    return _nearest_codes(_normal_quantiles(256) * unit, magnitudes, sign=0x80)


def _fp4_pairs(std: float) -> NDArray[np.uint8]:
    """[256] bytes of two fp4 codes each (low nibble first), from the quantiles of a normal distribution."""
    unit = std / 2.0 ** _scale_exponent(std, _SIGMA_CODES["I8"])
    magnitudes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nibbles = _nearest_codes(_normal_quantiles(16) * unit, magnitudes, sign=8)
    pairs: NDArray[np.uint8] = (nibbles[:, None] << 4 | nibbles[None, :]).reshape(-1).astype(np.uint8)
    return pairs


def _normal_quantiles(n: int) -> NDArray[np.float64]:
    return np.array([NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)])


def _nearest_codes(values: NDArray[np.float64], magnitudes: NDArray[np.float64], sign: int) -> NDArray[np.uint8]:
    codes = np.abs(np.abs(values)[:, None] - magnitudes[None, :]).argmin(axis=1)
    signed: NDArray[np.uint8] = (codes | np.where(values < 0, sign, 0)).astype(np.uint8)
    return signed


def _e4m3_value(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even; the values are finite."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
