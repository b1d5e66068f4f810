"""Models that follow from a seed and lie in no file: made where they are used, for benchmarks (`Model.synthetic`).

Every tensor is a row of units (blocks, or single numbers) whose bytes follow from the seed, the tensor's name and the
unit's number (`metal/synth_units.h`): a kernel writes them into a device's memory, threads into the host's. Means and
spreads are those of `synth.py`, so routing, selection and the Engram gate are alive. Engram rows are made when they are
asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _ext
from .checkpoint import Checkpoint, ModelConfig, Tensor, TensorSpec, tensor_table
from .checkpoint.convert_plan import plan_tensors
from .checkpoint.header import ITEM_BYTES
from .checks import choice, positive_int
from .engram import MOST_READS
from .errors import MemoryPlanError
from .machine import available_memory, human
from .synth import (
    _SIGMA_CODES,
    _bf16,
    _e4m3_quantiles,
    _fp4_pairs,
    _items,
    _normal_quantiles,
    _scale_exponent,
    _statistics,
)
from .synth_gguf import SHAPES, slice_config, synthetic_vocabulary
from .weights import is_vector

RECIPES = ("q4", "mxfp4", "fp8fp4", "bf16")
"""Types of the weights: those of the GGUF recipes, or those of official folders."""
VALUES, BLOCK, Q4_K, ROW = range(4)
"""Kinds of units."""
_NUMBERS = 4096
ROW_STD = 0.5
"""Spread of an Engram row."""
Progress = Callable[[int, int], None]
U32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Units:
    """How the bytes of a tensor are made; `table` is what its random words choose from."""

    kind: int
    unit_bytes: int
    heads: int
    codes: int
    table: U32

    def for_ext(self, key: int) -> tuple[int, int, int, int, int]:
        """As the extension takes it."""
        return self.kind, self.unit_bytes, self.heads, self.codes, key


@dataclass(frozen=True, slots=True)
class Made:
    """One piece of memory: a tensor, or the same matrix of all experts of a layer one behind the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    spec: TensorSpec
    parts: tuple[str, ...] = ()
    """Names of equal parts, when they are tensors of their own."""
    is_scale: bool = False


class MemorySegment:
    """What a tensor without a file lies in (see `FileSegment`)."""

    def __init__(self, memory: _ext.synth.Memory) -> None:
        self.memory = memory
        self._array = memory.array()

    def bytes(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A view; of a device with memory of its own it is a name that only the extension follows."""
        return self._array[offset : offset + nbytes]

    def copy(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """From wherever it lies."""
        return self.memory.read(offset, nbytes)


# ---- units ----------------------------------------------------------------------------------------------------------


def mix(x: int) -> int:
    """The hash of the generator."""
    mask = 0xFFFFFFFF
    x ^= x >> 16
    x = x * 0x7FEB352D & mask
    x ^= x >> 15
    x = x * 0x846CA68B & mask
    return x ^ x >> 16


def key_of(seed: int, name: str) -> int:
    """Of a tensor."""
    return mix(zlib.crc32(name.encode()) ^ mix((seed & 0xFFFFFFFF) ^ mix(seed >> 32)))


@lru_cache(maxsize=64)
def units_of(dtype: str, mean: float, std: float, nbytes: int, dim: int = 0) -> Units:
    """The units of a stored type. dim: codes of an Engram row ("row"); e8m0 scales are named after what they scale:
    "F8_E8M0 of I8"."""
    if dtype in ("F32", "F16", "BF16"):
        return Units(VALUES, ITEM_BYTES[dtype], 0, 0, _numbers(dtype, mean, std))
    if dtype.startswith("F8_E8M0 of "):
        table = _spread_exponents(_scale_exponent(std, _SIGMA_CODES[dtype.removeprefix("F8_E8M0 of ")]), _NUMBERS)
        return Units(VALUES, 1, 0, 0, table)
    if dtype == "Q8_0":
        codes = np.clip(np.rint(_normal_quantiles(256) * 45.0), -127, 127).astype(np.int8).view(np.uint8)
        return Units(BLOCK, 34, 2, 32, _table(_halves(std / 45.0 * np.linspace(0.8, 1.2, 256)), codes))
    if dtype == "Q4_K":
        d = std / (4.61 * 48.0) * np.linspace(0.8, 1.2, 256)
        return Units(Q4_K, 144, 16, 128, _table(_halves(d) | _halves(7.5 * d) << 16, np.arange(256)))
    if dtype == "MXFP4":
        return Units(BLOCK, 17, 1, 16, _table(_spread_exponents(_scale_exponent(std, 2.0), 256), _fp4_pairs(std)))
    if dtype == "row":
        heads = _spread_exponents(_scale_exponent(std, 48.0), 256)
        return Units(ROW, dim + dim // 32, dim // 32, dim, _table(heads, _e4m3_quantiles(std)))
    codes = _fp4_pairs(std) if dtype == "I8" else _e4m3_quantiles(std)
    size = next(n for n in (32, 16, 8, 4, 2, 1) if nbytes % n == 0)
    return Units(BLOCK, size, 0, size, _table(np.zeros(256), codes))


def _numbers(dtype: str, mean: float, std: float) -> U32:
    values = (mean + std * _normal_quantiles(_NUMBERS)).astype(np.float32)
    if dtype == "F16":
        return values.astype("<f2").view(np.uint16).astype(np.uint32)
    if dtype == "BF16":
        return _bf16(values).astype(np.uint32)
    return values.view(np.uint32)


def _table(heads: NDArray[Any], codes: NDArray[Any]) -> U32:
    return np.concatenate([heads.astype(np.uint32), codes.astype(np.uint32)])


def _halves(values: NDArray[np.float64]) -> U32:
    return values.astype("<f2").view(np.uint16).astype(np.uint32)


def _spread_exponents(exponent: int, n: int) -> U32:
    """e8m0 codes: an exponent and its neighbours, a third each."""
    return (126 + exponent + 3 * np.arange(n) // n).astype(np.uint32)


# ---- the model ------------------------------------------------------------------------------------------------------


def plan(config: ModelConfig, recipe: str) -> list[Made]:
    """Everything that lies in memory."""
    if recipe in ("q4", "mxfp4"):
        planned, _ = plan_tensors(config, "model", recipe, None, None)
        return [Made(t.spec.name, t.type, t.shape, t.nbytes, t.spec) for t in planned if t.spec.role != "engram_table"]
    out: list[Made] = []
    stacks: dict[str, list[Any]] = {}
    for spec in tensor_table(config, ("main",)):
        for item in _items(spec, config, recipe == "fp8fp4"):
            head, expert, tail = item.name.partition(".experts.")
            if expert:
                stacks.setdefault(f"{head}.experts.{tail.partition('.')[2]}", []).append(item)
            else:
                out.append(Made(item.name, item.dtype, item.shape, item.nbytes, spec, (), item.is_scale))
    for name, items in stacks.items():
        one = items[0]
        parts = tuple(item.name for item in items)
        total = one.nbytes * len(items)
        out.append(Made(name, one.dtype, (len(items), *one.shape), total, one.spec, parts, one.is_scale))
    return out


def units_for(made: Made) -> Units:
    """How a tensor of the plan is made."""
    mean, std = _statistics(made.spec)
    dtype = made.dtype
    if made.is_scale:
        dtype = f"F8_E8M0 of {'I8' if made.spec.role == 'expert' else 'F8_E4M3'}"
    return units_of(dtype, mean, std, made.nbytes)


def config_of(shape: str, layers: int, experts: int, recipe: str, engram_rows: int | None) -> ModelConfig:
    """Raises OptionError for options that make no model."""
    choice("shape", shape, SHAPES)
    choice("recipe", recipe, RECIPES)
    rows = (384_000_000 if shape == "released" else 100_000) if engram_rows is None else engram_rows
    config = slice_config(shape, layers, experts, rows)
    if recipe == "fp8fp4":
        config = replace(config, quant_method="fp8", expert_dtype="fp4")
        config = ModelConfig.from_hf(config.to_hf(), "synthetic configuration")
    return config


def make(
    config: ModelConfig, recipe: str, seed: int, place: str, threads: int, name: str, progress: Progress | None
) -> Checkpoint:
    """The checkpoint in memory of `place` ("cpu", "metal" or "cuda"); short vectors are always the host's.

    Raises MemoryPlanError when it does not fit."""
    items = plan(config, recipe)
    total, done = sum(made.nbytes for made in items), 0
    if place != "cuda" and total > available_memory():  # that device has memory of its own, and says itself
        raise MemoryPlanError(
            f"the weights take {human(total)}, {human(available_memory())} are available; ask for fewer layers= or "
            "experts="
        )
    tensors: dict[str, Tensor] = {}
    for made in items:
        where = "cpu" if is_vector(made.spec) else place
        segment = MemorySegment(_filled(made, seed, where, threads))
        tensors.update((tensor.name, tensor) for tensor in _tensors(made, segment, name))
        done += made.nbytes
        if progress is not None:
            progress(done, total)
    token_map, metadata = _vocabulary(config)
    return Checkpoint(
        path=Path(name),
        dialect="gguf" if recipe in ("q4", "mxfp4") else "official",
        config=config,
        tensors=tensors,
        tokenizer_metadata=metadata,
        stored_token_map=token_map,
        made=f"{name}, generator 1",
    )


def _filled(made: Made, seed: int, where: str, threads: int) -> _ext.synth.Memory:
    units = units_for(made)
    memory = _ext.synth.Memory(where, made.nbytes, threads)
    memory.fill(units.for_ext(key_of(seed, made.name)), units.table, 0, made.nbytes // units.unit_bytes)
    return memory


def _tensors(made: Made, segment: MemorySegment, name: str) -> Iterator[Tensor]:
    if not made.parts:
        yield Tensor(made.name, made.dtype, made.shape, Path(name), 0, made.nbytes, segment)
        return
    size = made.nbytes // len(made.parts)
    for i, part in enumerate(made.parts):
        yield Tensor(part, made.dtype, made.shape[1:], Path(name), i * size, size, segment)


def engram(config: ModelConfig, seed: int, threads: int | None = None, cache: int = 0) -> _ext.Engram | None:
    """Tables whose rows are made when they are asked for; None for a model without."""
    if not config.engram_layer_ids:
        return None
    dim = config.engram_head_dim
    units = units_of("row", 0.0, ROW_STD, 0, dim)
    tables = [
        (n_rows, dim, units.for_ext(key_of(seed, f"layers.{layer}.engram.embed.weight")), units.table)
        for layer, n_rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
    ]
    return _ext.synth.engram(tables, MOST_READS if threads is None else threads, cache)


def options(layers: Any, experts: Any, seed: Any) -> tuple[int, int, int]:
    """The three as Python's own numbers. OptionError for what is not a number in range."""
    return (
        positive_int("layers", layers, 1, 1024),
        positive_int("experts", experts, 1, 4096),
        positive_int("seed", seed, 0, (1 << 64) - 1),
    )


def _vocabulary(config: ModelConfig) -> tuple[list[int], dict[str, Any]]:
    """Token map of the Engram hash, and the tokenizer as a GGUF file would have it."""
    records = {record.key.rpartition(".")[2]: record.value for record in synthetic_vocabulary(config)}
    metadata = {name: records[name] for name in ("tokens", "merges", "pre")} | {"token_types": records["token_type"]}
    return [int(i) for i in records["token_map"]], metadata
