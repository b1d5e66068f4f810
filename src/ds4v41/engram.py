"""Engram tables of a model: where they are, how they are read, and what that costs."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import _ext
from .checkpoint import Checkpoint, ModelConfig, Tensor
from .checkpoint.files import stat_path
from .checkpoint.tensors import raise_problems
from .checkpoint.validate import validate_official
from .checks import choice, path_of, positive_int
from .errors import CheckpointError, MemoryPlanError, OptionError, TokenizerError, shown
from .machine import available_memory, human, parse_bytes

MOST_READS = 64
"""Reads at the same time, unless `engram_threads` says otherwise: more than a token has, or one would wait for another.
Threads are started when reads are slow enough to need them, so a machine with few cores needs no smaller number."""
CACHE_SHARE = 64
MOST_CACHE = 4 << 30
TablePlace = tuple[int, int, str, int, int, str, int, int]
"""Rows, codes a row, then path, offset and bytes a row of the codes and of the scales ("", 0, 0: in the same rows)."""
_ADVICE = "engram_path takes a copy of the checkpoint's folder or file, or a folder with the shards of the tables."


@dataclass(frozen=True, slots=True)
class EngramOptions:
    """How the tables are read. See `Model.open`."""

    mode: Literal["disk", "ram"] = "disk"
    path: Path | None = None
    cache: int | None = None
    threads: int | None = None
    direct: bool = False

    @classmethod
    def checked(cls, mode: Any, path: Any, cache: Any, threads: Any, direct: Any) -> EngramOptions:
        """From the options of `Model.open`. Raises OptionError."""
        choice("engram", mode, ("disk", "ram"))
        if not isinstance(direct, bool):
            raise OptionError(f"engram_direct: expected True or False, found {shown(direct)}")
        return cls(
            mode,
            None if path is None else path_of("engram_path", path),
            None if cache is None else parse_bytes("engram_cache", cache),
            None if threads is None else positive_int("engram_threads", threads, 1, 256),
            direct,
        )

    def n_threads(self) -> int:
        """Most reads at the same time. The threads only wait, so there may be more of them than cores."""
        return self.threads if self.threads is not None else MOST_READS

    def cache_bytes(self, tables: int) -> int:
        """Budget of the hot rows; by default a 64th of the free memory, at most 4 GiB and an eighth of the tables."""
        if self.mode == "ram":
            return 0
        if self.cache is not None:
            return self.cache
        return min(available_memory() // CACHE_SHARE, MOST_CACHE, tables // 8)


@dataclass(frozen=True, slots=True)
class EngramStats:
    """What reading the tables cost so far, for all sessions of a model together."""

    mode: str
    """"disk", "ram", or "made": rows of a synthetic model, made when they are asked for; no byte comes from a disk."""
    table_bytes: int
    cache_bytes: int
    cached_rows: int
    rows: int
    """Rows asked for."""
    unique: int
    """Of them, after duplicates within one request."""
    hits: int
    """Of the unique ones, found in the hot-row cache."""
    reads: int
    bytes_read: int
    read_seconds: float
    """Sum over all reads, most of them at the same time and behind the computation."""
    latency: tuple[float, float, float]
    """Seconds that a read took: median, 90th and 99th percentile, to a fifth."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the unique rows that were in the cache; None before the first."""
        return self.hits / self.unique if self.unique else None


def stats_of(engram: _ext.Engram) -> EngramStats:
    """The counters of the extension's object."""
    c = engram.counters()
    return EngramStats(
        mode="made" if engram.made else "ram" if engram.in_memory else "disk",
        table_bytes=engram.bytes,
        cache_bytes=engram.cache_bytes,
        cached_rows=engram.cached,
        rows=c["rows"],
        unique=c["unique"],
        hits=c["hits"],
        reads=c["reads"],
        bytes_read=c["bytes"],
        read_seconds=c["read_seconds"],
        latency=(percentile(c["latency"], 0.5), percentile(c["latency"], 0.9), percentile(c["latency"], 0.99)),
    )


def percentile(counts: list[int], share: float) -> float:
    """Seconds from the extension's latency counts: bucket b holds reads of less than 2^(b/4) microseconds."""
    left = share * sum(counts)
    for bucket, n in enumerate(counts):
        left -= n
        if n and left <= 0:
            return float(2.0 ** (bucket / 4) * 1e-6)
    return 0.0


def tables_of(tensors: Mapping[str, Tensor], config: ModelConfig) -> list[TablePlace]:
    """Where the rows of every table are, as the extension wants it."""
    found = []
    for layer, n_rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        weight = tensors[f"layers.{layer}.engram.embed.weight"]
        scale = tensors.get(f"layers.{layer}.engram.embed.scale")  # GGUF has codes and scales in one row
        scales = ("", 0, 0) if scale is None else (str(scale.file), scale.offset, scale.nbytes // n_rows)
        codes = (str(weight.file), weight.offset, weight.nbytes // n_rows)
        found.append((n_rows, config.engram_head_dim, *codes, *scales))
    return found


def open_engram(
    checkpoint: Checkpoint, options: EngramOptions, weights: int = 0, faults: dict[str, Any] | None = None
) -> _ext.Engram | None:
    """Open the tables; with mode "ram" read them, interruptibly. None for a model without Engram.

    `weights` are bytes that will be needed beside tables in memory; `faults` is for tests.

    Raises EngramError, CheckpointError, MemoryPlanError.
    """
    config = checkpoint.config
    if not config.engram_layer_ids:
        return None
    tensors = checkpoint.tensors if options.path is None else tensors_at(options.path, config)
    tables = tables_of(tensors, config)
    size = sum(n_rows * (dim + dim // 32) for n_rows, dim, *_ in tables)
    if options.mode == "ram" and size + weights > available_memory():
        raise MemoryPlanError(
            f'engram="ram": the tables take {human(size)} beside {human(weights)} of weights, '
            f'{human(available_memory())} are available; use engram="disk", with engram_cache= for the rows that are '
            "read often"
        )
    return _ext.Engram(
        tables,
        ram=options.mode == "ram",
        direct=options.direct,
        threads=options.n_threads(),
        cache_bytes=options.cache_bytes(size),
        faults=faults,
    )


def hash_of(checkpoint: Checkpoint) -> _ext.EngramHash:
    """The n-gram hash of a checkpoint. Raises TokenizerError when there is nothing to make the token map from."""
    config, token_map = checkpoint.config, checkpoint.token_map
    if token_map is None:
        raise TokenizerError(
            f"{checkpoint.path}: the n-gram hash needs the token map, which is made from tokenizer.json; put the "
            "model's tokenizer.json into this folder"
        )
    tables = range(len(config.engram_layer_ids))
    return _ext.EngramHash(
        max_ngram=config.engram_max_ngram_size,
        n_heads=config.engram_n_heads,
        token_map=token_map,
        pad=token_map[config.engram_pad_token_id],
        multipliers=[config.engram_multipliers(i) for i in tables],
        primes=[config.engram_primes(i) for i in tables],
        offsets=[config.engram_offsets(i) for i in tables],
    )


def tensors_at(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The tables that lie apart from the checkpoint: in a GGUF file, a .safetensors file, or a folder of those.

    Types and sizes are checked against the configuration. Raises CheckpointError with every problem found.
    """
    problems: list[str] = []
    if path.suffix == ".gguf":
        from .checkpoint.gguf_header import read_header as read_gguf
        from .checkpoint.gguf_tensors import bind_tensors

        header = read_gguf(path)
        problems += header.problems
        tensors = bind_tensors(header, config, ("engram",), problems)
        # The file may hold the rest of the model too.
        problems = [problem for problem in problems if "unexpected tensor" not in problem]
    else:
        tensors = _safetensors_at(path, problems)
        problems += validate_official(config, tensors, ("engram",))
    raise_problems(str(path), problems, _ADVICE)
    return tensors


def _safetensors_at(path: Path, problems: list[str]) -> dict[str, Tensor]:
    from .checkpoint.header import read_header

    folder = stat.S_ISDIR(stat_path(path).st_mode)
    files = sorted(path.glob("*.safetensors")) if folder else [path]
    if not files:
        raise CheckpointError(f"{path}: there is no .safetensors file here. {_ADVICE}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        header = read_header(file)
        for entry in header.entries:
            if ".engram.embed." in entry.name:
                tensors[entry.name] = Tensor(
                    entry.name, entry.dtype, entry.shape, file, entry.start, entry.end - entry.start
                )
        problems += header.problems
    return tensors
