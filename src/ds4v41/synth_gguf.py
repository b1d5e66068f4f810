"""Synthetic GGUF files: slices of the released shape (or a tiny one) with random blocks, for benchmarks.

    report = write_gguf("slice.gguf", "released", layers=6, experts=48, recipe="q4", drafter_experts=16)
    write_drafter("drafter.gguf", report.config, "q4")

The weights are made in their quantised form from pools of random blocks, so writing is as fast as the disk. They make
no sense but they are sane: every tensor has the mean and spread that `synth.py` gives it, so activations stay near 1,
and routing, selection and the Engram gate are alive. A slice keeps every kind of layer of the model.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint.config import ModelConfig
from .checkpoint.convert import _header, _require_space, _vocabulary_records
from .checkpoint.convert_plan import Plan, PlannedTensor, plan_tensors, quantization_text
from .checkpoint.gguf_dialect import (
    ALIGNMENT,
    ARCHITECTURE,
    DRAFTER_ARCHITECTURE,
    STRING,
    U32,
    Record,
    config_records,
    drafter_records,
)
from .checkpoint.gguf_writer import CompleteFile
from .checks import choice, path_of, positive_int
from .errors import OptionError
from .synth import _e4m3_quantiles, _fp4_pairs, _normal_quantiles, _special_ids, _statistics, tiny_config
from .synth_tokenizer import synthetic_tokenizer

SHAPES = ("released", "tiny")
SYNTH_RECIPES = ("q4", "mxfp4")
MIN_LAYERS, MAX_LAYERS = 6, 40
DEFAULT_ENGRAM_ROWS = 100_000
_POOL_BYTES = 8 << 20
_PIECE_BYTES = 64 << 20

_RELEASED: dict[str, Any] = {
    "image_token_id": 129_264,
    "vocab_size": 129_280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "max_position_embeddings": 1_048_576,
    "sliding_window": 128,
    "rope_scaling_original_max_position_embeddings": 65_536,
    "num_experts_per_tok": 6,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99_092,
    "num_nextn_predict_layers": 0,
}
_RELEASED_LISTS: dict[str, Any] = {
    "compress_ratios": (0, 0, *[2] * 18, *[1] * 20),
    "kv_source_layer_ids": (2, 8, 14, 20),
    "index_source_layer_ids": (2, 8, 14, 20, 24, 28, 32, 36),
    "candidate_source_layer_id": 20,
    "engram_layer_ids": (1, 14),
}
_NO_DRAFTER: dict[str, Any] = {
    "num_nextn_predict_layers": 0,
    "dspark_block_size": 0,
    "dspark_noise_token_id": 0,
    "dspark_target_layer_ids": (),
    "dspark_markov_rank": 0,
    "dspark_n_routed_experts": 0,
    "dspark_num_experts_per_tok": 0,
}

_DRAFTERS: dict[str, dict[str, Any]] = {
    "released": {"dspark_noise_token_id": 128_799, "dspark_markov_rank": 256, "dspark_num_experts_per_tok": 3},
    "tiny": {"dspark_noise_token_id": 3, "dspark_markov_rank": 16, "dspark_num_experts_per_tok": 2},
}


@dataclass(frozen=True, slots=True)
class SliceReport:
    """What was written."""

    path: Path
    config: ModelConfig
    kinds: tuple[str, ...]
    """Kind of every layer, in order."""
    file_bytes: int
    main_bytes: int
    engram_bytes: int


def layer_lists(layers: int) -> dict[str, Any]:
    """The per-layer lists of a slice of the released shape.

    6 layers are the least in which every kind occurs: window only (with Engram), ratio-2 source (with Engram), ratio-2
    reuse, ratio-1 candidate source, ratio-1 reuse, ratio-1 reindex. More layers add reuse layers of both ratios in
    turn; every sixth ratio-2 layer is a source and every fourth ratio-1 layer after the source selects anew, as in the
    release. 40 is the release itself.
    """
    layers = positive_int("layers", layers, MIN_LAYERS, MAX_LAYERS)
    if layers == MAX_LAYERS:
        return dict(_RELEASED_LISTS)
    n_window = 1 if layers < 12 else 2
    n_two = (layers - n_window) // 2 if layers > MIN_LAYERS else 2
    n_one = layers - n_window - n_two
    first_two, first_one = n_window, n_window + n_two
    two_sources = [first_two + i for i in range(0, n_two, 6)]
    reindex = [first_one + i for i in range(4, n_one, 4)] or [layers - 1]
    return {
        "compress_ratios": (*[0] * n_window, *[2] * n_two, *[1] * n_one),
        "kv_source_layer_ids": (*two_sources, first_one),
        "index_source_layer_ids": (*two_sources, first_one, *reindex),
        "candidate_source_layer_id": first_one,
        "engram_layer_ids": (n_window - 1, two_sources[-1]),
    }


def layer_kinds(config: ModelConfig) -> tuple[str, ...]:
    """Kind of every layer: "window", "ratio-2 source", "ratio-1 reuse", ..., with " + engram" where it has a table."""
    kinds = []
    for layer in range(config.num_hidden_layers):
        ratio = config.compress_ratios[layer]
        if ratio == 0:
            kind = "window"
        elif layer == config.candidate_source_layer_id:
            kind = f"ratio-{ratio} candidate source"
        elif layer in config.kv_source_layer_ids:
            kind = f"ratio-{ratio} source"
        else:
            kind = f"ratio-{ratio} {'reindex' if layer in config.index_source_layer_ids else 'reuse'}"
        kinds.append(kind + (" + engram" if layer in config.engram_layer_ids else ""))
    return tuple(kinds)


def slice_config(
    shape: str, layers: int, experts: int, engram_rows: int, drafter_experts: int = 0
) -> ModelConfig:
    """Configuration of a slice; `engram_rows` is about the number of rows of each Engram table. drafter_experts: routed
    experts of a stage of its drafter, 0 for a model that has none."""
    choice("shape", shape, tuple(SHAPES))
    base = _RELEASED if shape == "released" else {}
    lists = layer_lists(layers)
    top_k = base.get("num_experts_per_tok", 3)
    experts = positive_int("experts", experts, top_k, 384)
    columns = 3 * base.get("engram_n_heads", 2)
    engram_rows = positive_int("engram_rows", engram_rows, 64 * columns, 1 << 40)
    drafter_experts = positive_int("drafter_experts", drafter_experts, 0)
    return tiny_config(
        **{k: v for k, v in base.items() if k not in _NO_DRAFTER},
        **lists,
        **_drafter_fields(shape, layers, drafter_experts),
        num_hidden_layers=layers,
        n_routed_experts=experts,
        engram_vocab_size=engram_rows // columns,
    )


def _drafter_fields(shape: str, layers: int, experts: int) -> dict[str, Any]:
    if not experts:
        return _NO_DRAFTER
    fields = _DRAFTERS[shape]
    least = fields["dspark_num_experts_per_tok"]
    if not least <= experts <= 384:
        raise OptionError(f"drafter_experts: expected 0, or {least} to 384, found {experts}")
    return {
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": (layers - 3, layers - 2, layers - 1),
        "dspark_n_routed_experts": experts,
        **fields,
    }


def write_gguf(
    out: str | os.PathLike[str],
    shape: str = "released",
    *,
    layers: int = MIN_LAYERS,
    experts: int = 48,
    recipe: str = "q4",
    engram_rows: int = DEFAULT_ENGRAM_ROWS,
    drafter_experts: int = 0,
    seed: int = 1,
    overwrite: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> SliceReport:
    """Write a synthetic model in ds4's GGUF dialect. `progress(bytes done, bytes in all, tensor name)`.

    With `drafter_experts` its configuration has a drafter, which `write_drafter` makes.

    Raises OptionError for options that make no model, CheckpointError when the file cannot be written.
    """
    choice("recipe", recipe, SYNTH_RECIPES)
    seed = positive_int("seed", seed, 0)
    config = slice_config(shape, layers, experts, engram_rows, drafter_experts)
    plan, header = _plan(config, recipe)
    path = path_of("out", out)
    _write(path, plan, header, config, seed, overwrite, progress)
    return SliceReport(path, config, layer_kinds(config), plan.file_bytes, plan.main_bytes, plan.engram_bytes)


def write_drafter(
    out: str | os.PathLike[str],
    config: ModelConfig,
    recipe: str = "q4",
    *,
    seed: int = 1,
    overwrite: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> int:
    """Write a drafter of random blocks for a synthetic model; returns the bytes of the file. Errors as `write_gguf`."""
    choice("recipe", recipe, SYNTH_RECIPES)
    seed = positive_int("seed", seed, 0)
    if not config.num_nextn_predict_layers:
        raise OptionError("this model has no drafter; give drafter_experts= when it is written")
    tensors, notes = plan_tensors(config, "drafter", recipe, None, None)
    text = quantization_text("drafter", recipe)
    records = [
        Record("general.architecture", STRING, DRAFTER_ARCHITECTURE),
        Record("general.name", STRING, "synthetic drafter"),
        Record("general.alignment", U32, ALIGNMENT),
        *drafter_records(config),
        Record(f"{ARCHITECTURE}.dspark.quantization", STRING, text),
    ]
    draft = Plan("drafter", recipe, text, tensors, 0, "exact", tuple(notes))
    header = _header(draft, records)
    plan = replace(draft, data_start=len(header))
    _write(path_of("out", out), plan, header, config, seed, overwrite, progress)
    return plan.file_bytes


def _write(
    path: Path,
    plan: Plan,
    header: bytes,
    config: ModelConfig,
    seed: int,
    overwrite: bool,
    progress: Callable[[int, int, str], None] | None,
) -> None:
    _require_space(path, plan.file_bytes)
    pools = _Pools(seed)
    with CompleteFile(path, overwrite) as file:
        file.write(header)
        for tensor in plan.tensors:
            for piece in pools.tensor(tensor, config):
                file.write(piece)
                if progress is not None:
                    progress(file.position, plan.file_bytes, tensor.name)
            file.pad(ALIGNMENT)


def _plan(config: ModelConfig, recipe: str) -> tuple[Plan, bytes]:
    tensors, notes = plan_tensors(config, "model", recipe, None, None)
    text = quantization_text("model", recipe)
    records = _records(config, text)
    draft = Plan("model", recipe, text, tensors, 0, "exact", tuple(notes))
    header = _header(draft, records)
    return replace(draft, data_start=len(header)), header


def synthetic_vocabulary(config: ModelConfig) -> list[Record]:
    """A made-up tokenizer and its token map, as a file has them."""
    special = _special_ids(config)
    tokenizer = synthetic_tokenizer(config.vocab_size, config.engram_compressed_vocab_size, special)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(tokenizer)
        return _vocabulary_records(path, config)


def _records(config: ModelConfig, quantization: str) -> list[Record]:
    stored = json.dumps(config.to_hf(), sort_keys=True, separators=(",", ":"))
    return [
        Record("general.architecture", STRING, ARCHITECTURE),
        Record("general.name", STRING, "synthetic"),
        Record("general.alignment", U32, ALIGNMENT),
        Record(f"{ARCHITECTURE}.config", STRING, stored),
        *synthetic_vocabulary(config),
        *config_records(config),
        Record(f"{ARCHITECTURE}.quantization", STRING, quantization),
        Record(f"{ARCHITECTURE}.calibration", STRING, "none (random blocks)"),
    ]


# ---- values -------------------------------------------------------------------------------------------------------


class _Pools:
    """Random blocks by type and spread, from which tensors are cut at random places."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made: dict[tuple[str, float, float], NDArray[np.uint8]] = {}

    def tensor(self, tensor: PlannedTensor, config: ModelConfig) -> Iterator[NDArray[np.uint8]]:
        """The bytes of one tensor, piece by piece."""
        rng = np.random.default_rng([self._seed, zlib.crc32(tensor.name.encode())])
        mean, std = _statistics(tensor.spec)
        kind = tensor.type
        if tensor.spec.role == "engram_table":
            kind, mean, std = f"row{config.engram_head_dim}", 0.0, 0.5
        if tensor.nbytes <= 1 << 20:  # short vectors do not repeat
            yield _blocks(kind, mean, std, tensor.nbytes, rng)[: tensor.nbytes]
            return
        pool = self._pool(kind, mean, std)
        unit = _BLOCK_BYTES.get(kind) or config.engram_head_dim * 33 // 32
        n_units, left = pool.size // unit, tensor.nbytes
        while left:
            parts, size = [], 0
            while size < min(left, _PIECE_BYTES):
                start = int(rng.integers(0, n_units // 2)) * unit
                part = pool[start : start + min(left - size, pool.size - start)]
                parts.append(part)
                size += part.size
            yield np.concatenate(parts)
            left -= size

    def _pool(self, kind: str, mean: float, std: float) -> NDArray[np.uint8]:
        key = (kind, mean, std)
        if key not in self._made:
            rng = np.random.default_rng([self._seed, zlib.crc32(repr(key).encode())])
            self._made[key] = _blocks(kind, mean, std, _POOL_BYTES, rng)
        return self._made[key]


_BLOCK_BYTES = {"F32": 4, "F16": 2, "Q8_0": 34, "Q4_K": 144, "MXFP4": 17}


def _blocks(kind: str, mean: float, std: float, n_bytes: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """About n_bytes (at least, rounded up to a block) of a type, as bytes. Quantised types have mean 0."""
    if kind.startswith("row"):
        return _engram_rows(int(kind[3:]), std, n_bytes, rng)
    if kind in ("F32", "F16"):
        values = rng.standard_normal(-(-n_bytes // _BLOCK_BYTES[kind]), dtype=np.float32) * np.float32(std)
        values += np.float32(mean)
        return values.astype("<f4" if kind == "F32" else "<f2").view(np.uint8)
    n = -(-n_bytes // _BLOCK_BYTES[kind])
    makers: dict[str, Callable[[int, float, np.random.Generator], NDArray[np.uint8]]] = {
        "Q8_0": _q8_0,
        "Q4_K": _q4_k,
        "MXFP4": _mxfp4,
    }
    return makers[kind](n, std, rng).reshape(-1)


def _q8_0(n: int, std: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Scale with some spread, then normal codes of standard deviation 45 (largest about 127)."""
    table = np.clip(np.rint(_normal_quantiles(256) * 45.0), -127, 127).astype(np.int8).view(np.uint8)
    out = np.empty((n, 34), np.uint8)
    out[:, :2] = _halves(std / 45.0 * rng.uniform(0.8, 1.2, n))
    out[:, 2:] = table[_codes(rng, n, 32)]
    return out


def _q4_k(n: int, std: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Uniform nibbles (deviation 4.61 around 7.5), six-bit scales and minima near each other, minima that centre."""
    out = np.empty((n, 144), np.uint8)
    d = std / (4.61 * 48.0) * rng.uniform(0.8, 1.2, n)
    out[:, 0:2] = _halves(d)
    out[:, 2:4] = _halves(d * 7.5)
    scale = rng.integers(40, 57, (n, 8), dtype=np.uint8)
    low = scale[:, :4] | (scale[:, 4:] >> 4) << 6  # the same six bits serve as scale and as minimum
    out[:, 4:8] = low
    out[:, 8:12] = low
    out[:, 12:16] = (scale[:, 4:] & 15) | (scale[:, 4:] & 15) << 4
    out[:, 16:] = _codes(rng, n, 128)
    return out


def _mxfp4(n: int, std: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    exponent = int(np.floor(np.log2(std / 2.0) + 0.5))
    out = np.empty((n, 17), np.uint8)
    out[:, 0] = (127 + exponent + rng.integers(-1, 2, n)).astype(np.uint8)
    out[:, 1:] = _fp4_pairs(std)[_codes(rng, n, 16)]
    return out


def _engram_rows(dim: int, std: float, n_bytes: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    groups = dim // 32
    n = -(-n_bytes // (dim + groups))
    exponent = int(np.floor(np.log2(std / 48.0) + 0.5))
    out = np.empty((n, dim + groups), np.uint8)
    out[:, :dim] = _e4m3_quantiles(std)[_codes(rng, n, dim)]
    out[:, dim:] = (127 + exponent + rng.integers(-1, 2, (n, groups))).astype(np.uint8)
    return out.reshape(-1)


def _codes(rng: np.random.Generator, *shape: int) -> NDArray[np.uint8]:
    return np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape)


def _halves(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.asarray(values).astype("<f2").view(np.uint8).reshape(-1, 2)
