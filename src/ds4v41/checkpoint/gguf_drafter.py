"""Reader of DSpark drafter files, in both key styles that are in use.

`deepseek41-dspark` files have keys below `deepseek41.dspark.`; others carry bare `dspark.*` keys and the architecture
`deepseek4-dspark`. A drafter file does not hold the model's configuration, so the target's is needed to check it: the
pairing is by shape and by the numbers that both state.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

import numpy as np

from ..errors import CheckpointError
from .config import ModelConfig
from .gguf_dialect import BARE_DRAFTER_ARCHITECTURE, DRAFTER_ARCHITECTURE, TARGET_KEY
from .gguf_header import GgufHeader, read_header
from .gguf_tensors import bind_tensors
from .tensors import Checkpoint, raise_problems

_PREFIXES = ("deepseek41.dspark.", "dspark.")
_ADVICE = (
    "Use the drafter that was made for this model: make it from the official checkpoint with "
    "`ds4v41 convert drafter OFFICIAL_DIR OUT.gguf`."
)
# Names of a value, the usual one first, and the field of the configuration that it must repeat.
_FIELDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("block_size",), "dspark_block_size"),
    (("markov_rank",), "dspark_markov_rank"),
    (("noise_token_id",), "dspark_noise_token_id"),
    (("target_layer_ids",), "dspark_target_layer_ids"),
    (("stage_count", "n_layers"), "num_nextn_predict_layers"),
    (("n_routed_experts", "expert_count"), "dspark_n_routed_experts"),
    (("num_experts_per_tok", "expert_used_count"), "dspark_num_experts_per_tok"),
    (("expert_feed_forward_length",), "moe_intermediate_size"),
)
# The number of stages and the expert width follow from the tensors; older files leave them out.
_MAY_BE_ABSENT = frozenset({"num_nextn_predict_layers", "moe_intermediate_size"})


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What a drafter file says about itself. Values that the file does not state are None."""

    architecture: str
    key_style: str
    """"deepseek41.dspark." or "dspark."."""
    values: dict[str, int | tuple[int, ...]]
    """By name of the configuration field, e.g. dspark_block_size."""
    quantization: str | None
    target: str | None = None
    """Lineage of the model that it was made with, if the file says so."""
    problems: tuple[str, ...] = ()


def read_drafter_info(header: GgufHeader) -> DrafterInfo:
    """The stated numbers, with both key styles and their synonyms. Raises CheckpointError when it is no drafter."""
    if header.architecture not in (DRAFTER_ARCHITECTURE, BARE_DRAFTER_ARCHITECTURE):
        raise CheckpointError(
            f"{header.path}: expected a DSpark drafter (architecture {DRAFTER_ARCHITECTURE!r} or "
            f"{BARE_DRAFTER_ARCHITECTURE!r}), found {header.architecture!r}. {_ADVICE}"
        )
    style = next((p for p in _PREFIXES if any(key.startswith(p) for key in header.metadata)), _PREFIXES[0])
    values: dict[str, int | tuple[int, ...]] = {}
    problems: list[str] = []
    for names, field in _FIELDS:
        stated = [name for name in names if style + name in header.metadata]
        if not stated:
            if field not in _MAY_BE_ABSENT:
                problems.append(f"{header.path}: metadata key {style}{names[0]} is missing")
            continue
        for name in stated:
            _take(header, style + name, field, values, problems)
    quantization = header.get(style + "quantization")
    text = quantization if isinstance(quantization, str) else None
    target = header.get(TARGET_KEY)
    made_with = target if isinstance(target, str) else None
    return DrafterInfo(header.architecture, style, values, text, made_with, tuple(problems))


def _take(
    header: GgufHeader, key: str, field: str, values: dict[str, int | tuple[int, ...]], problems: list[str]
) -> None:
    found = header.metadata[key]
    raw = found.value
    value: int | tuple[int, ...]
    if field == "dspark_target_layer_ids":
        if not isinstance(raw, np.ndarray) or raw.dtype.kind == "f":
            problems.append(f"{header.path}: byte {found.offset}: {key}: expected an array of integers")
            return
        value = tuple(int(i) for i in raw)
    elif isinstance(raw, int) and not isinstance(raw, bool):
        value = raw
    else:
        problems.append(f"{header.path}: byte {found.offset}: {key}: expected an integer, found {raw!r}")
        return
    if values.setdefault(field, value) != value:
        problems.append(f"{header.path}: byte {found.offset}: {key} is {value}, but another key says {values[field]}")


def open_drafter(path: str | PathLike[str], config: ModelConfig, *, strict: bool = True) -> Checkpoint:
    """Open a drafter file for the model of `config`; touches no tensor data.

    The result holds the official `mtp.*` names, experts stacked. Raises CheckpointError with every problem found; with
    strict=False they go to `Checkpoint.problems`.
    """
    header = read_header(path)
    info = read_drafter_info(header)
    problems = [*header.problems, *info.problems]
    if not config.num_nextn_predict_layers:
        problems.append(f"{header.path}: the model's configuration has no drafter (num_nextn_predict_layers is 0)")
    for field, value in info.values.items():
        expected = getattr(config, field)
        if value != expected:
            problems.append(f"{header.path}: the drafter states {field} {value}, the model has {expected}")
    if any(".hc_head_" in t.name or t.name.startswith("hc_head_") for t in header.tensors):
        problems.append(f"{header.path}: hc_head tensors: this is a drafter of DeepSeek V4, not of V4.1")
    tensors = bind_tensors(header, config, ("drafter",), problems)
    if strict:
        raise_problems(str(header.path), problems, _ADVICE)
    checkpoint = Checkpoint(path=header.path, dialect="gguf", config=config, tensors=tensors, problems=problems)
    checkpoint.target_lineage = info.target
    return checkpoint
