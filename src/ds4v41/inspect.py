"""What a checkpoint holds, without loading it: configuration, tensors by family, bytes resident and read, problems.

    report = inspect_checkpoint("DeepSeek-V4.1-Flash-Q4.gguf")
    rich.print(report)          # or report.to_json()

Works on everything that can be opened and on much that cannot: a file with faults is reported with its faults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint, ModelConfig, open_checkpoint
from .checks import path_of
from .errors import CheckpointError, ConfigError, OptionError

if TYPE_CHECKING:
    from rich.console import RenderableType

MemoryPlanner = Callable[[Checkpoint, int], Mapping[str, Any]]
"""Takes an opened checkpoint and a context length in tokens; returns the terms of the memory plan."""

# First match decides; names are official ones (scales included) or those of a drafter file.
_FAMILIES: tuple[tuple[str, str], ...] = (
    (r"^(vision|aligner)\.|^image_", "vision"),
    (r"engram\.embed\.", "engram tables"),
    (r"\.engram\.", "engram"),
    (r"^embed\.", "embedding"),
    (r"^head\.", "head"),
    (r"\.experts\.|_exps\.", "experts"),
    (r"shared_experts\.|_shexp\.", "shared expert"),
    (r"ffn\.gate\.|ffn_gate_inp|exp_probs_b", "router"),
    (r"markov_head|confidence_head|main_proj", "draft heads"),
    (r"hc_(attn|ffn)_", "hyper-connections"),
    (r"norm", "norms"),
    (r"compressor", "compressor"),
    (r"indexer", "indexer"),
    (r"attn", "attention"),
)


@dataclass(slots=True)
class Family:
    """All tensors of one family in one part. Bytes are those stored, scales included."""

    part: str
    """"model", "drafter" or "vision"."""
    name: str
    by_type: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Storage type -> (number of tensors, bytes)."""
    read_per_token: int = 0
    """Bytes read for one decoded token (a drafter: for one draft)."""

    @property
    def nbytes(self) -> int:
        """Bytes of all types."""
        return sum(nbytes for _, nbytes in self.by_type.values())

    @property
    def n_tensors(self) -> int:
        """Tensors of all types."""
        return sum(n for n, _ in self.by_type.values())

    @property
    def is_resident(self) -> bool:
        """Are the bytes mapped into memory? Engram tables stay on disk."""
        return self.name != "engram tables"


@dataclass(slots=True)
class Report:
    """What `inspect_checkpoint` found."""

    path: Path
    dialect: str
    """"official", "gguf", or "unknown" when the file could not be read."""
    kind: str
    """"model", "drafter" or "unknown"."""
    config: ModelConfig | None
    families: list[Family]
    facts: dict[str, Any] = field(default_factory=dict)
    """Further values: tokenizer, quantization, what a drafter states."""
    memory_plan: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def resident_bytes(self) -> int:
        """Weight bytes of the model (of the drafter, for a drafter file) that are mapped."""
        return sum(f.nbytes for f in self._own() if f.is_resident)

    @property
    def disk_bytes(self) -> int:
        """Bytes that stay on disk and are read row by row."""
        return sum(f.nbytes for f in self._own() if not f.is_resident)

    @property
    def read_per_token(self) -> int:
        """Weight bytes read for one decoded token (one draft, for a drafter file)."""
        return sum(f.read_per_token for f in self._own())

    def _own(self) -> Iterable[Family]:
        return (f for f in self.families if f.part == self.kind)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "path": str(self.path),
            "dialect": self.dialect,
            "kind": self.kind,
            "config": None if self.config is None else self.config.to_hf(),
            "families": [
                {
                    "part": f.part,
                    "family": f.name,
                    "tensors": f.n_tensors,
                    "bytes": f.nbytes,
                    "resident": f.is_resident,
                    "read_per_token": f.read_per_token,
                    "types": {name: {"tensors": n, "bytes": b} for name, (n, b) in f.by_type.items()},
                }
                for f in self.families
            ],
            "resident_bytes": self.resident_bytes,
            "disk_bytes": self.disk_bytes,
            "read_per_token": self.read_per_token,
            "facts": self.facts,
            "memory_plan": self.memory_plan,
            "problems": self.problems,
        }

    def __repr__(self) -> str:
        faults = f", {len(self.problems)} problems" if self.problems else ""
        return (
            f"Report({str(self.path)!r}, {self.dialect} {self.kind}, resident {_size(self.resident_bytes)}, "
            f"{_size(self.read_per_token)} a token{faults})"
        )

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        parts: list[RenderableType] = [f"[bold]{_escape(str(self.path))}[/]  {self.dialect} {self.kind}"]
        if self.config is not None:
            parts.append(_config_line(self.config))
        if self.families:
            parts.append(self._table())
        parts += [f"{key}: {_escape(str(value))}" for key, value in self.facts.items()]
        for key, value in (self.memory_plan or {}).items():
            parts.append(f"memory: {key}: {_escape(_size(value) if isinstance(value, int) else str(value))}")
        parts += [f"[red]problem:[/] {_escape(problem)}" for problem in self.problems]
        if not self.problems:
            parts.append("[green]no problems found[/]")
        return Group(*parts)

    def _table(self) -> RenderableType:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for title in ("part", "family", "types", "tensors", "bytes", "read a token"):
            table.add_column(title, justify="left" if title in ("part", "family", "types") else "right")
        for f in self.families:
            name = f.name if f.is_resident else f"{f.name} (on disk)"
            table.add_row(f.part, name, " ".join(f.by_type), str(f.n_tensors), _size(f.nbytes), _size(f.read_per_token))
        table.add_section()
        table.add_row(self.kind, "resident", "", "", _size(self.resident_bytes), _size(self.read_per_token))
        return table


def inspect_checkpoint(
    path: str | PathLike[str], *, context: int | None = None, plan_memory: MemoryPlanner | None = None
) -> Report:
    """Report on a folder or file of any dialect; touches no tensor data.

    `context` (tokens) adds a memory plan made by `plan_memory`. Raises CheckpointError only when the path itself cannot
    be read (missing, a pipe, no permission); what is wrong inside is in `Report.problems`.
    """
    if context is not None and plan_memory is None:
        raise OptionError("context= asks for a memory plan, which needs plan_memory=")
    where = path_of("path", path)
    if os.path.isfile(where) and (drafter := _drafter_report(where)) is not None:
        return drafter
    try:
        checkpoint = open_checkpoint(where, strict=False)
    except (CheckpointError, ConfigError) as error:
        if not os.path.exists(where) or not (os.path.isfile(where) or os.path.isdir(where)):
            raise
        problems = list(error.problems) or [str(error)]
        return Report(where, "unknown", "unknown", None, [], problems=problems)
    report = _model_report(where, checkpoint)
    if context is not None and plan_memory is not None:
        report.memory_plan = dict(plan_memory(checkpoint, context))
    return report


def family_of(name: str) -> str:
    """Family of a tensor by its official name, or by its name in a drafter file."""
    return _family_of_pattern(re.sub(r"\d+", "0", name))


@lru_cache(maxsize=4096)
def _family_of_pattern(name: str) -> str:
    return next((family for pattern, family in _FAMILIES if re.search(pattern, name)), "other")


def _part_of(name: str) -> str:
    if name.startswith("mtp."):
        return "drafter"
    return "vision" if family_of(name) == "vision" else "model"


def _collect(tensors: Iterable[tuple[str, str, int]]) -> list[Family]:
    """Families in order of appearance, from (name, type, bytes); Engram tables last."""
    families: dict[tuple[str, str], Family] = {}
    for name, type_name, nbytes in tensors:
        key = (_part_of(name), family_of(name))
        family = families.setdefault(key, Family(*key))
        n, before = family.by_type.get(type_name, (0, 0))
        family.by_type[type_name] = (n + 1, before + nbytes)
    order = {"model": 0, "drafter": 1, "vision": 2}
    return sorted(families.values(), key=lambda f: (order[f.part], not f.is_resident))


def _model_report(path: Path, checkpoint: Checkpoint) -> Report:
    config = checkpoint.config
    families = _collect((t.name, t.dtype, t.nbytes) for t in checkpoint.tensors.values())
    for family in families:
        family.read_per_token = _read_per_token(family, config)
    facts: dict[str, Any] = {"tokenizer": _tokenizer_fact(checkpoint)}
    if checkpoint.generation:
        facts["generation"] = dict(checkpoint.generation)
    return Report(path, checkpoint.dialect, "model", config, families, facts, problems=list(checkpoint.problems))


def _tokenizer_fact(checkpoint: Checkpoint) -> str:
    if checkpoint.tokenizer is not None:
        return str(checkpoint.tokenizer)
    metadata = checkpoint.tokenizer_metadata
    return "none" if metadata is None else f"in the file ({len(metadata)} entries)"


def _read_per_token(family: Family, config: ModelConfig) -> int:
    """Embedding: one row. Experts: the chosen ones. Engram tables: the hashed rows. Everything else: all of it."""
    if family.part == "vision":
        return 0
    drafter = family.part == "drafter"
    if family.name == "embedding":
        return family.nbytes // config.vocab_size
    if family.name == "experts":
        chosen = config.dspark_num_experts_per_tok if drafter else config.num_experts_per_tok
        n = config.dspark_n_routed_experts if drafter else config.n_routed_experts
        return family.nbytes * chosen // n
    if family.name == "engram tables":
        rows = sum(config.engram_num_embeddings)
        return family.nbytes // rows * config.n_engram_columns * len(config.engram_layer_ids) if rows else 0
    return family.nbytes


def _drafter_report(path: Path) -> Report | None:
    """The report on a DSpark GGUF file, which has no configuration of its own; None for anything else."""
    from .checkpoint.gguf import is_drafter
    from .checkpoint.gguf_drafter import read_drafter_info
    from .checkpoint.gguf_header import MAGIC, read_header

    try:
        with open(path, "rb") as file:
            if file.read(4) != MAGIC:
                return None
        header = read_header(path)
    except (OSError, CheckpointError):
        return None  # open_checkpoint reports what is wrong
    if not is_drafter(header):
        return None
    info = read_drafter_info(header)
    families = _collect((t.name, t.type_name, t.nbytes) for t in header.tensors)
    chosen, n = info.values.get("dspark_num_experts_per_tok"), info.values.get("dspark_n_routed_experts")
    for family in families:
        family.read_per_token = family.nbytes
        if family.name == "experts" and isinstance(chosen, int) and isinstance(n, int) and n > 0:
            family.read_per_token = family.nbytes * chosen // n
    facts: dict[str, Any] = {"architecture": info.architecture, "quantization": info.quantization, **info.values}
    problems = [*header.problems, *info.problems]
    return Report(path, "gguf", "drafter", None, families, facts, problems=problems)


def _config_line(config: ModelConfig) -> str:
    return (
        f"{config.num_hidden_layers} layers of {config.hidden_size}, {config.n_routed_experts} experts (top "
        f"{config.num_experts_per_tok}) of {config.moe_intermediate_size}, {config.num_attention_heads} heads of "
        f"{config.head_dim}, vocabulary {config.vocab_size}, context {config.max_position_embeddings}, "
        f"{config.num_nextn_predict_layers} draft stages, {config.vision_layers} image blocks"
    )


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
