"""The plan of a conversion: every tensor of the output with its type, place and size, before a byte is written.

A plan is exact to the byte. For a folder that holds only a config.json it is made from the configuration alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ..errors import OptionError, shown
from .config import ModelConfig
from .gguf_dialect import ALIGNMENT
from .gguf_header import row_bytes, type_ids, type_table
from .gguf_tensors import stored_shape
from .spec import TensorSpec, expert_specs, is_stacked, stacked_table
from .tensors import Tensor

RECIPES = ("q4", "mxfp4", "f16")
EXACT_TYPES = ("F16", "BF16", "F32")
"""Types that the f16 recipe tries, in this order, until one holds every value of a tensor."""

_QUANTIZATION = {
    "q4": "Q4_K gate/up/down; Q8_0 attention/shared/head",
    "mxfp4": "MXFP4 gate/up/down; Q8_0 attention/shared/head",
    "f16": "exact: MXFP4 for fp4 experts; else F16, BF16 or F32, whichever holds every value",
}
_DRAFTER_QUANTIZATION = {
    "q4": "Q4_K routed experts; Q8_0 attention/shared/main_proj/markov",
    "mxfp4": "MXFP4 routed experts; Q8_0 attention/shared/main_proj/markov",
    "f16": _QUANTIZATION["f16"],
}
# The two indexer and Engram projections stay F16, although their role is that of the other linear layers.
_F16_LINEAR = ("indexer.wq_b.weight", "engram.wkv.weight")
_Q8_DENSE = ("markov_head.embed.weight", "markov_head.head.weight")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the output. `shape` is outermost first, `offset` counts from the start of the data."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    spec: TensorSpec = field(repr=False)
    source_type: str
    """Storage type in the official folder (assumed from the configuration when there are no weights)."""

    @property
    def padded_bytes(self) -> int:
        """Bytes up to the next tensor."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def sources(self) -> list[TensorSpec]:
        """The official tensors that it is made of, in order."""
        return expert_specs(self.spec) if is_stacked(self.spec) else [self.spec]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion writes. `header` says whether `data_start` is exact, or how it was found."""

    kind: str
    """"model" or "drafter"."""
    recipe: str
    quantization: str
    tensors: tuple[PlannedTensor, ...]
    data_start: int
    header: str
    """"exact", "released" (known from the published file) or "estimated" (no tokenizer at hand)."""
    notes: tuple[str, ...] = ()

    @property
    def main_bytes(self) -> int:
        """Extent of everything but the Engram tables, padding included."""
        return sum(t.padded_bytes for t in self.tensors if t.spec.part != "engram")

    @property
    def engram_bytes(self) -> int:
        """Extent of the Engram tables, padding included."""
        return sum(t.padded_bytes for t in self.tensors if t.spec.part == "engram")

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_start + self.main_bytes + self.engram_bytes

    def bytes_by_type(self) -> dict[str, tuple[int, int]]:
        """Tensor type -> (number of tensors, bytes without padding)."""
        table: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors:
            n, nbytes = table.get(tensor.type, (0, 0))
            table[tensor.type] = (n + 1, nbytes + tensor.nbytes)
        return table

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`; offsets are absolute."""
        return {
            "kind": self.kind,
            "recipe": self.recipe,
            "quantization": self.quantization,
            "n_tensors": len(self.tensors),
            "data_start": self.data_start,
            "header": self.header,
            "main_bytes": self.main_bytes,
            "engram_bytes": self.engram_bytes,
            "file_bytes": self.file_bytes,
            "bytes_by_type": {name: {"tensors": n, "bytes": b} for name, (n, b) in self.bytes_by_type().items()},
            "notes": list(self.notes),
            "tensors": [
                {
                    "name": t.name,
                    "official": t.spec.name,
                    "type": t.type,
                    "source_type": t.source_type,
                    "shape": list(t.shape),
                    "offset": self.data_start + t.offset,
                    "bytes": t.nbytes,
                }
                for t in self.tensors
            ],
        }

    def __repr__(self) -> str:
        return (
            f"Plan({self.kind}, {self.recipe}: {len(self.tensors)} tensors, file {self.file_bytes:,} bytes = header "
            f"{self.data_start:,} ({self.header}) + main {self.main_bytes:,} + Engram {self.engram_bytes:,})"
        )


def quantization_text(kind: str, recipe: str) -> str:
    """The text of the metadata key `quantization`."""
    return (_QUANTIZATION if kind == "model" else _DRAFTER_QUANTIZATION)[recipe]


def check_recipe(recipe: str) -> None:
    """OptionError for a recipe that does not exist."""
    if recipe not in RECIPES:
        raise OptionError(f"unknown recipe {shown(recipe)}: choose from {', '.join(RECIPES)}")


ExactType = Callable[[TensorSpec], str]
"""Finds the first of EXACT_TYPES that holds every value of a tensor of the source."""


def plan_tensors(
    config: ModelConfig,
    kind: str,
    recipe: str,
    source: Mapping[str, Tensor] | None,
    exact_type: ExactType | None,
) -> tuple[tuple[PlannedTensor, ...], list[str]]:
    """All tensors in writing order, and notes on types that differ from the recipe's usual ones.

    `source` are the tensors of the official folder (None: plan from the configuration alone, with the types that it
    implies). `exact_type` looks at the weights for the f16 recipe; without it F16 is assumed.
    """
    check_recipe(recipe)
    parts = ("main", "engram") if kind == "model" else ("drafter",)
    planned: list[PlannedTensor] = []
    notes: dict[str, int] = {}
    offset = 0
    for spec in dialect_order(stacked_table(config, parts)):
        if spec.optional and not _has_optional(spec, config, source):
            continue
        source_type = _source_type(spec, config, source)
        type_name, note = _type_of(spec, recipe, source_type, exact_type)
        if note:
            notes[note] = notes.get(note, 0) + 1
        shape = stored_shape(spec, config)
        nbytes = row_bytes(type_name, shape[-1]) * prod(shape[:-1])
        tensor = PlannedTensor(spec.gguf_name, type_name, shape, offset, nbytes, spec, source_type)
        planned.append(tensor)
        offset += tensor.padded_bytes
    return tuple(planned), [f"{count} tensors: {note}" for note, count in notes.items()]


def dialect_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The writing order of the dialect: the attention norm stands between the two mixers of a layer."""
    ordered: list[TensorSpec] = []
    for spec in specs:
        if spec.name.endswith(".attn_norm.weight"):
            mixer = spec.name.removesuffix("attn_norm.weight") + "hc_attn_scale"
            at = next((i for i in range(len(ordered) - 1, -1, -1) if ordered[i].name == mixer), len(ordered) - 1)
            ordered.insert(at + 1, spec)
        else:
            ordered.append(spec)
    return ordered


def _has_optional(spec: TensorSpec, config: ModelConfig, source: Mapping[str, Tensor] | None) -> bool:
    """Image biases: there when the folder has them, or when the configuration has an image tower."""
    return config.vision_layers > 0 if source is None else spec.name in source


def _source_type(spec: TensorSpec, config: ModelConfig, source: Mapping[str, Tensor] | None) -> str:
    if source is not None:
        return source[expert_specs(spec)[0].name if is_stacked(spec) else spec.name].dtype
    if spec.role == "engram_table":
        return "F8_E4M3"
    if spec.role == "expert" and config.expert_dtype == "fp4":
        return "I8"
    if spec.scale == "block32x32" and config.quant_method is not None:
        return "F8_E4M3"
    return "F32" if spec.role in ("hc", "sink", "router_bias") else "BF16"


def _type_of(spec: TensorSpec, recipe: str, source_type: str, exact_type: ExactType | None) -> tuple[str, str]:
    """Type of a tensor in a recipe, and a note when it is not the usual one."""
    if spec.role == "engram_table":
        return "I8", ""
    if len(spec.shape) == 1 or spec.role in ("norm", "router") or spec.name.endswith("confidence_head.proj.weight"):
        return "F32", ""
    if recipe == "f16":
        return _exact(spec, source_type, exact_type)
    wanted = _wanted(spec, recipe)
    for type_name in _alternatives(wanted, source_type):
        block = type_table()[type_ids()[type_name]][1]
        if spec.shape[-1] % block == 0:
            note = "" if type_name == wanted else f"rows of {spec.shape[-1]} do not fit {wanted}, stored as {type_name}"
            return type_name, note
    raise AssertionError("F16 fits every row")


def _wanted(spec: TensorSpec, recipe: str) -> str:
    if spec.role == "expert":
        return {"q4": "Q4_K", "mxfp4": "MXFP4"}[recipe]
    if spec.role in ("head", "shared", "grouped") or spec.name.endswith(_Q8_DENSE):
        return "Q8_0"
    if spec.role == "linear" and not spec.name.endswith(_F16_LINEAR):
        return "Q8_0"
    return "F16"


def _alternatives(wanted: str, source_type: str) -> tuple[str, ...]:
    """What to take when a row is not a multiple of the block: fp4 codes fit MXFP4 without loss."""
    if wanted == "Q4_K":
        return ("Q4_K", "MXFP4", "Q8_0", "F16") if source_type == "I8" else ("Q4_K", "Q8_0", "F16")
    return (wanted, "Q8_0", "F16") if wanted == "MXFP4" else (wanted, "F16")


def _twin(spec: TensorSpec) -> TensorSpec | None:
    """Gate for up and up for gate: readers take both in one pass, so both have one type."""
    for name, other in ((".w1.weight", ".w3.weight"), (".w3.weight", ".w1.weight")):
        if spec.name.endswith(name):
            return replace(spec, name=spec.name.removesuffix(name) + other)
    return None


def _exact(spec: TensorSpec, source_type: str, exact_type: ExactType | None) -> tuple[str, str]:
    if source_type == "I8":
        return "MXFP4", ""
    if exact_type is None:
        return "F16", "assumed to be exact in F16: the weights are not here"
    found = exact_type(spec)
    if twin := _twin(spec):
        found = max(found, exact_type(twin), key=EXACT_TYPES.index)
    return found, "" if found == "F16" else f"not exact in F16, stored as {found}"
