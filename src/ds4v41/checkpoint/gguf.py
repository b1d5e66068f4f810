"""Reader of ds4's GGUF dialect: the main model file and the DSpark drafter file.

Opening reads the header only: every key and every tensor is checked against the configuration and the tensor table,
all faults are reported together, and the result is the same `Checkpoint` that the official folder gives, under the
official names. Routed experts are stacked here (`layers.3.ffn.experts.w1.weight`, [n_experts, rows, columns]), and the
Engram tables (I8, [rows, row bytes]) are outside of the mapped part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from ..errors import CheckpointError, ConfigError
from .config import ModelConfig
from .files import parse_json
from .gguf_dialect import (
    ALIGNMENT,
    ARCHITECTURE,
    BARE_DRAFTER_ARCHITECTURE,
    DRAFTER_ARCHITECTURE,
    U32,
    VISION_ARCHITECTURE,
    Record,
    check_records,
    config_records,
    engram_encoding,
    engram_records,
)
from .gguf_header import GgufHeader, StringArray, read_header
from .gguf_tensors import bind_tensors
from .tensors import Checkpoint, raise_problems

_ADVICE = (
    "The file is damaged, not complete, or was made for another model: download it again, or make it from the "
    "official checkpoint with `ds4v41 convert`."
)
_WHERE_TO_GET = (
    "Use the files of antirez/deepseek-v4.1-flash-gguf, or make one from the official checkpoint with "
    "`ds4v41 convert OFFICIAL_DIR OUT.gguf`."
)
_TOKENIZER = "tokenizer.ggml."
# Keys that only converters of the llama.cpp family write below `deepseek41.`.
_LLAMA_KEYS = ("embedding_length", "block_count", "context_length", "feed_forward_length", "attention.head_count")


def open_gguf(path: str | PathLike[str], *, strict: bool = True) -> Checkpoint:
    """Open a main model file. Touches no tensor data.

    Raises CheckpointError with every problem found.
    With strict=False faults of keys and tensors go to `Checkpoint.problems`, as long as the configuration is usable.
    """
    header = read_header(path)
    refuse_other_files(header)
    config = _stored_config(header)
    problems = list(header.problems)
    problems += check_container(header)
    problems += check_records(header, config_records(config))
    token_map = _token_map(header, config, problems)
    tokenizer = _tokenizer(header, config, problems)
    tensors = bind_tensors(header, config, ("main", "engram"), problems)
    if strict:
        raise_problems(str(header.path), problems, _ADVICE)
    return Checkpoint(
        path=header.path,
        dialect="gguf",
        config=config,
        tensors=tensors,
        tokenizer_metadata=tokenizer,
        stored_token_map=token_map,
        problems=problems,
    )


def refuse_other_files(header: GgufHeader) -> None:
    """CheckpointError for a GGUF file that is not a main model of this dialect, saying what it is and what to do."""
    path, architecture = header.path, header.architecture
    if _is_split(header):
        raise CheckpointError(
            f"{path}: this is one part of a split GGUF (key split.count); this library reads single files. "
            f"{_WHERE_TO_GET}"
        )
    if is_drafter(header):
        raise CheckpointError(
            f"{path}: this is a DSpark drafter (architecture {architecture!r}), not a model: open the model and give "
            "this file to Drafter.open(path, model)"
        )
    if architecture == VISION_ARCHITECTURE:
        raise CheckpointError(f"{path}: this is the image tower of a model ({architecture!r}), not a model itself")
    if architecture != ARCHITECTURE:
        raise CheckpointError(
            f"{path}: expected general.architecture {ARCHITECTURE!r}, found {architecture!r}: another model family. "
            f"{_WHERE_TO_GET}"
        )
    if f"{ARCHITECTURE}.hidden_size" not in header.metadata:
        foreign = [key for key in _LLAMA_KEYS if f"{ARCHITECTURE}.{key}" in header.metadata]
        found = f"key {ARCHITECTURE}.{foreign[0]}" if foreign else f"no key {ARCHITECTURE}.hidden_size"
        raise CheckpointError(
            f"{path}: this file uses the llama.cpp-style {ARCHITECTURE} dialect ({found}), whose keys and tensors are "
            f"laid out otherwise; this library reads ds4's dialect. {_WHERE_TO_GET}"
        )


def is_drafter(header: GgufHeader) -> bool:
    """Is this a DSpark file, in either key style?"""
    return header.architecture in (DRAFTER_ARCHITECTURE, BARE_DRAFTER_ARCHITECTURE)


def _is_split(header: GgufHeader) -> bool:
    count = header.get("split.count", 1)
    return isinstance(count, int) and count > 1


def _stored_config(header: GgufHeader) -> ModelConfig:
    key = f"{ARCHITECTURE}.config"
    found = header.metadata.get(key)
    if found is None or not isinstance(found.value, str):
        raise CheckpointError(
            f"{header.path}: metadata key {key} (the whole config.json as text) is missing. {_WHERE_TO_GET}"
        )
    where = f"{header.path}: byte {found.offset}: metadata key {key}"
    try:
        raw = parse_json(found.value.encode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}. {_ADVICE}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(raw).__name__}. {_ADVICE}")
    try:
        return ModelConfig.from_hf(raw, where)
    except ConfigError as error:
        raise CheckpointError(str(error), error.problems) from error


def check_container(header: GgufHeader, alignment: int | None = ALIGNMENT) -> list[str]:
    """Alignment and file size. `alignment` None: any."""
    problems = []
    if alignment is not None and header.alignment != alignment:
        problems.append(f"{header.path}: general.alignment is {header.alignment}, expected {alignment}")
    end = header.data_end
    padded = -(-end // header.alignment) * header.alignment
    if header.tensors and header.file_bytes > padded:
        extra = header.file_bytes - padded
        problems.append(f"{header.path}: byte {padded}: {extra} bytes follow after the last tensor, expected none")
    return problems


def _token_map(header: GgufHeader, config: ModelConfig, problems: list[str]) -> Sequence[int] | None:
    """The stored token map and the checks of all Engram keys."""
    if not config.engram_layer_ids:
        return None
    key = f"{ARCHITECTURE}.engram.token_map"
    encoding = header.get(f"{ARCHITECTURE}.engram.encoding")
    if encoding != engram_encoding(config):
        problems.append(
            f"{header.path}: Engram rows are encoded as {encoding!r}; this library reads {engram_encoding(config)!r}"
        )
    found = header.metadata.get(key)
    if found is None or not found.is_array or not isinstance(found.value, np.ndarray) or found.value.dtype.kind == "f":
        problems.append(f"{header.path}: metadata key {key} is missing or not an array of integers")
        return None
    values = found.value
    limit = config.engram_compressed_vocab_size
    if len(values) != config.vocab_size:
        problems.append(
            f"{header.path}: byte {found.offset}: {key}: expected {config.vocab_size} entries, found {len(values)}"
        )
        return None
    bad = np.flatnonzero((values < 0) | (values >= limit))
    if bad.size:
        i = int(bad[0])
        where = f"{header.path}: byte {found.offset}: {key}"
        problems.append(f"{where}: entry {i} is {values[i]}, expected less than {limit}")
        return None
    records = engram_records(config, values)
    problems += check_records(header, [r for r in records if not r.key.endswith((".token_map", ".encoding"))])
    return values.tolist()  # type: ignore[no-any-return]


class TokenizerMetadata(Mapping[str, Any]):
    """The `tokenizer.ggml.*` entries of a file, long arrays decoded when they are asked for.

    Keys: tokens (list of str), token_types (list of int), merges (list of "left right"), bos_token_id, eos_token_id,
    model, pre, add_bos_token, add_eos_token; those that the file lacks are absent.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._path = header.path
        self._values = {
            "token_types" if key == _TOKENIZER + "token_type" else key.removeprefix(_TOKENIZER): value
            for key, value in header.metadata.items()
            if key.startswith(_TOKENIZER)
        }

    def __getitem__(self, key: str) -> Any:
        found = self._values[key]
        value = found.value
        if isinstance(value, StringArray):
            try:
                return value.tolist()
            except UnicodeDecodeError as error:
                raise CheckpointError(
                    f"{self._path}: byte {found.offset}: {_TOKENIZER}{key} is not UTF-8 ({error.reason}). {_ADVICE}"
                ) from None
        return value.tolist() if isinstance(value, np.ndarray) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _tokenizer(header: GgufHeader, config: ModelConfig, problems: list[str]) -> TokenizerMetadata:
    for name, expected, length in (
        ("tokens", StringArray, config.vocab_size),
        ("token_type", np.ndarray, config.vocab_size),
        ("merges", StringArray, None),
    ):
        found = header.metadata.get(_TOKENIZER + name)
        if found is None or not isinstance(found.value, expected):
            kind = "strings" if expected is StringArray else "integers"
            problems.append(f"{header.path}: metadata key {_TOKENIZER}{name} is missing or not an array of {kind}")
        elif length is not None and len(found.value) != length:
            problems.append(
                f"{header.path}: byte {found.offset}: {_TOKENIZER}{name}: expected {length} entries (the vocabulary), "
                f"found {len(found.value)}"
            )
    ids = (("bos_token_id", config.bos_token_id), ("eos_token_id", config.eos_token_id))
    problems += check_records(header, [Record(_TOKENIZER + name, U32, value) for name, value in ids])
    return TokenizerMetadata(header)


def open_drafter_gguf(path: str | PathLike[str], config: ModelConfig, *, strict: bool = True) -> Checkpoint:
    """Open a DSpark file for the model of `config`; see `gguf_drafter`."""
    from .gguf_drafter import open_drafter

    return open_drafter(path, config, strict=strict)
