"""Converters: an official safetensors folder to ds4's GGUF dialect, main model and DSpark drafter.

    plan = convert("DeepSeek-V4.1-Flash", "out.gguf", "q4", dry_run=True)

Weights are read, encoded and written in pieces of some 16 MiB by three overlapping stages, so memory stays bounded; the
output appears under its name only when it is complete and on disk.

Where the data start depends on the header, and so on the tokenizer: with the released tokenizer the header is some
4.7 MB of token and merge strings, 0.5 MB of token types, 0.5 MB of token map and 0.07 MB for everything else, which
pads to 5,832,704 bytes. Without a tokenizer a plan takes that number for the released configuration and an estimate
for any other, and says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any

from ..checks import path_of
from ..errors import CheckpointError, OptionError, TokenizerError, shown
from . import convert_source
from .config import ModelConfig
from .convert_plan import Plan, PlannedTensor, check_recipe, plan_tensors, quantization_text
from .convert_source import Bytes, Piece, SourceFiles
from .files import read_json, stat_path
from .gguf_dialect import (
    ALIGNMENT,
    ARCHITECTURE,
    BOOL,
    DRAFTER_ARCHITECTURE,
    I32,
    STRING,
    TARGET_KEY,
    U32,
    Record,
    config_records,
    drafter_records,
    engram_records,
)
from .gguf_writer import CompleteFile, pack_header, pack_tensor
from .lineage import lineage
from .safetensors import CONFIG, TOKENIZER, open_folder
from .spec import TensorSpec
from .tensors import Checkpoint, Tensor

Progress = Callable[[int, int, str], None]
"""Called after each piece with the bytes written, the bytes of the whole file and the tensor's name."""

RELEASED_DATA_START = 5_832_704
_RELEASED_TRAITS = {
    "vocab_size": 129_280,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "n_routed_experts": 384,
    "moe_intermediate_size": 2304,
    "engram_compressed_vocab_size": 99_092,
    "engram_num_embeddings": (384_006_168, 384_016_682),
}
_SOURCE_URL = "https://huggingface.co/deepseek-ai/DeepSeek-V4.1-Flash"
_TOKENIZER_BYTES_PER_ID = 37
"""Token and merge strings of the released tokenizer, lengths included, per vocabulary id: for estimates."""
_REVISION = re.compile(r"[0-9a-f]{40}")
_MAX_JSON = 512 << 20
_MAX_CONFIG = 16 << 20


def convert(
    source: str | PathLike[str],
    out: str | PathLike[str],
    recipe: str = "q4",
    *,
    progress: Progress | None = None,
    dry_run: bool = False,
    threads: int | None = None,
    tokenizer: str | PathLike[str] | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> Plan:
    """Convert the main model of an official folder to one GGUF file; returns what was (or would be) written.

    Recipes: "q4" (experts Q4_K, other large matrices Q8_0), "mxfp4" (experts MXFP4, without loss from fp4), "f16"
    (everything exact: F16, or BF16 or F32 where F16 does not hold every value; fp4 experts as MXFP4).
    Engram rows are copied without change, codes then scales. `tokenizer` is a tokenizer.json to use instead of the
    folder's; `revision` the 40-hex commit of the source to record. Raises CheckpointError (nothing is left behind),
    ConfigError, OptionError.
    """
    job = _Job(source, out, recipe, "model", threads, tokenizer, revision)
    return job.run(progress, dry_run, overwrite)


def convert_drafter(
    source: str | PathLike[str],
    out: str | PathLike[str],
    recipe: str = "q4",
    *,
    progress: Progress | None = None,
    dry_run: bool = False,
    threads: int | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> Plan:
    """Convert the DSpark drafter (`mtp.*`) of an official folder; only the shards that hold it need to be there."""
    job = _Job(source, out, recipe, "drafter", threads, None, revision)
    return job.run(progress, dry_run, overwrite)


class _Job:
    """One conversion: source folder, options, plan, header."""

    def __init__(
        self,
        source: str | PathLike[str],
        out: str | PathLike[str],
        recipe: str,
        kind: str,
        threads: int | None,
        tokenizer: str | PathLike[str] | None,
        revision: str | None,
    ) -> None:
        check_recipe(recipe)
        self.folder, self.out = path_of("source", source), path_of("out", out)
        self.recipe, self.kind = recipe, kind
        self.threads = _thread_count(threads)
        self.revision = _revision(self.folder, revision)
        if not os.path.isdir(self.folder):
            stat_path(self.folder)
            raise CheckpointError(f"{self.folder}: expected an official checkpoint folder (config.json and weights)")
        self.raw_config: dict[str, Any] = _json_object(self.folder / CONFIG, _MAX_CONFIG)
        self.config = ModelConfig.from_hf(self.raw_config, str(self.folder / CONFIG))
        if kind == "drafter" and not self.config.num_nextn_predict_layers:
            raise CheckpointError(f"{self.folder}: this model has no drafter (num_nextn_predict_layers is 0)")
        self.checkpoint = self._open_weights()
        own = self.folder / TOKENIZER
        self.tokenizer: Path | None = own if os.path.isfile(own) else None
        if tokenizer is not None:
            self.tokenizer = path_of("tokenizer", tokenizer)

    def _open_weights(self) -> Checkpoint | None:
        """The checked weights, or None for a folder without any."""
        names = os.listdir(self.folder)
        if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
            return None
        parts = ("main", "engram") if self.kind == "model" else ("drafter",)
        return open_folder(self.folder, parts=parts)

    def run(self, progress: Progress | None, dry_run: bool, overwrite: bool) -> Plan:
        with SourceFiles() as files:
            plan, records = self.plan(files)
            if dry_run:
                return plan
            if self.checkpoint is None:
                raise CheckpointError(f"{self.folder}: no .safetensors file here: only dry_run=True is possible")
            if self.kind == "model" and self.tokenizer is None:
                raise CheckpointError(
                    f"{self.folder}: no {TOKENIZER} here, and the file needs it (vocabulary, Engram token map): put it "
                    "into the folder or name one with tokenizer="
                )
            header = _header(plan, records)
            _require_space(self.out, plan.file_bytes)
            with CompleteFile(self.out, overwrite) as file:
                file.write(header)
                _write_tensors(plan, self.checkpoint.tensors, files, file, self.threads, progress)
        return plan

    def plan(self, files: SourceFiles) -> tuple[Plan, list[Record]]:
        source = None if self.checkpoint is None else self.checkpoint.tensors
        tensors, notes = plan_tensors(self.config, self.kind, self.recipe, source, self._exact_type(source, files))
        records, how = self._records()
        draft = Plan(self.kind, self.recipe, quantization_text(self.kind, self.recipe), tensors, 0, how, tuple(notes))
        start = len(_header(draft, records))
        if how != "exact":
            start, more = self._guess_start(start)
            notes.append(more)
        text = quantization_text(self.kind, self.recipe)
        return Plan(self.kind, self.recipe, text, tensors, start, how, tuple(notes)), records

    def _exact_type(
        self, source: Mapping[str, Tensor] | None, files: SourceFiles
    ) -> Callable[[TensorSpec], str] | None:
        if source is None or self.recipe != "f16":
            return None
        known: dict[str, str] = {}

        def exact_type(spec: TensorSpec) -> str:
            if spec.name not in known:
                known[spec.name] = convert_source.find_exact_type(spec, source, files, self.threads)
            return known[spec.name]

        return exact_type

    def _guess_start(self, without_tokenizer: int) -> tuple[int, str]:
        if _is_released(self.config):
            return RELEASED_DATA_START, f"no {TOKENIZER} here: the data start is that of the published file"
        entries = self.config.vocab_size * (_TOKENIZER_BYTES_PER_ID + 8)
        start = -(-(without_tokenizer + entries) // ALIGNMENT) * ALIGNMENT
        return start, f"no {TOKENIZER} here: the header size is estimated, all sizes and relative offsets are exact"

    def _records(self) -> tuple[list[Record], str]:
        """Metadata in writing order, and how exact its size is."""
        general = _general_records(self.config, self.kind, self.folder, self.revision)
        quantization = Record("quantization", STRING, quantization_text(self.kind, self.recipe))
        calibration = Record("calibration", STRING, "none (least squared error)")
        if self.kind == "drafter":
            tail = _prefixed(f"{ARCHITECTURE}.dspark.", (quantization, calibration))
            made_with = None if self.checkpoint is None else lineage(self.config, self.checkpoint.tensors)
            known = [] if made_with is None else [Record(TARGET_KEY, STRING, made_with)]
            return [*general, *drafter_records(self.config), *tail, *known], "exact"
        stored = json.dumps(self.raw_config, sort_keys=True, separators=(",", ":"))
        records = [*general, Record(f"{ARCHITECTURE}.config", STRING, stored)]
        how = "exact"
        if self.tokenizer is not None:
            records += _vocabulary_records(self.tokenizer, self.config)
        else:
            how = "released" if _is_released(self.config) else "estimated"
        records += config_records(self.config)
        return records + _prefixed(f"{ARCHITECTURE}.", (quantization, calibration)), how


def _prefixed(prefix: str, records: tuple[Record, ...]) -> list[Record]:
    return [Record(prefix + record.key, record.kind, record.value) for record in records]


def _thread_count(threads: int | None) -> int:
    if threads is None:
        return min(64, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024:
        raise OptionError(f"threads is {shown(threads)}, expected a whole number from 1 to 1024")
    return threads


def _revision(folder: Path, given: str | None) -> str:
    """The commit of the source: as given, or as the download tools leave it beside the files, or "unknown"."""
    if given is not None:
        if not isinstance(given, str) or not _REVISION.fullmatch(given):
            raise OptionError(f"revision is {shown(given)}, expected a commit of 40 hexadecimal digits")
        return given
    if folder.parent.name == "snapshots" and _REVISION.fullmatch(folder.name):
        return folder.name
    note = folder / ".cache" / "huggingface" / "download" / f"{CONFIG}.metadata"
    try:
        with open(note, encoding="utf-8", errors="replace") as file:
            line = file.readline(64).strip()
    except OSError:
        return "unknown"
    return line if _REVISION.fullmatch(line) else "unknown"


def _json_object(path: Path, limit: int) -> dict[str, Any]:
    raw = read_json(path, limit)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def _is_released(config: ModelConfig) -> bool:
    return all(getattr(config, name) == value for name, value in _RELEASED_TRAITS.items())


def _general_records(config: ModelConfig, kind: str, folder: Path, revision: str) -> list[Record]:
    released = _is_released(config)
    name = "DeepSeek V4.1 Flash" if released else folder.resolve().name or "unnamed"
    architecture = ARCHITECTURE if kind == "model" else DRAFTER_ARCHITECTURE
    return [
        Record("general.architecture", STRING, architecture),
        Record("general.name", STRING, name if kind == "model" else f"{name} DSpark"),
        Record("general.source.url", STRING, _SOURCE_URL if released else "unknown"),
        Record("general.source.revision", STRING, revision),
        Record("general.alignment", U32, ALIGNMENT),
    ]


def _vocabulary_records(path: Path, config: ModelConfig) -> list[Record]:
    """Engram constants with the token map, then the tokenizer: all that depends on tokenizer.json."""
    from tokenizers import Tokenizer

    from .tokenmap import compressed_token_map

    token_map, size = compressed_token_map(path, config.vocab_size)
    if config.engram_layer_ids and size != config.engram_compressed_vocab_size:
        raise TokenizerError(
            f"{path}: its {config.vocab_size} ids make {size} compressed ids, but the configuration says "
            f"engram_compressed_vocab_size {config.engram_compressed_vocab_size}; use the model's own {TOKENIZER}"
        )
    raw = _json_object(path, _MAX_JSON)
    backend = Tokenizer.from_file(str(path))
    tokens = [backend.id_to_token(i) for i in range(config.vocab_size)]
    if None in tokens:
        raise TokenizerError(f"{path}: no token has id {tokens.index(None)}; the model has {config.vocab_size} ids")
    special = {item["id"] for item in raw.get("added_tokens", ()) if item.get("special")}
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in raw["model"]["merges"]]
    prefix = "tokenizer.ggml."
    return [
        *engram_records(config, token_map),
        Record(prefix + "model", STRING, "gpt2"),
        Record(prefix + "pre", STRING, _pre_tokenizer_name(raw, path)),
        Record(prefix + "tokens", STRING, tokens, True),
        Record(prefix + "token_type", I32, [3 if i in special else 1 for i in range(len(tokens))], True),
        Record(prefix + "merges", STRING, merges, True),
        Record(prefix + "bos_token_id", U32, config.bos_token_id),
        Record(prefix + "eos_token_id", U32, config.eos_token_id),
        Record(prefix + "add_bos_token", BOOL, True),
        Record(prefix + "add_eos_token", BOOL, False),
    ]


def _pre_tokenizer_name(raw: Mapping[str, Any], path: Path) -> str:
    """The name by which readers know the rules that cut text into words: the release's, or plain GPT-2."""
    rules = raw.get("pre_tokenizer") or {}
    steps = rules.get("pretokenizers", [rules])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Split", "Split", "Split", "ByteLevel"] and steps[0].get("pattern") == {"Regex": r"\p{N}{1,3}"}:
        return "joyai-llm"
    raise TokenizerError(f"{path}: the pre-tokenizer {kinds} has no name in the GGUF dialect; use the model's own file")


def _header(plan: Plan, records: list[Record]) -> bytes:
    entries = (pack_tensor(t.name, t.shape, t.type, t.offset) for t in plan.tensors)
    return pack_header(records, entries, len(plan.tensors), ALIGNMENT)


def _require_space(out: Path, n_bytes: int) -> None:
    folder = out.parent
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder; make it first")
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise CheckpointError(
            f"{folder}: {n_bytes:,} bytes are needed, {free:,} are free ({n_bytes - free:,} short): free some space or "
            "choose another place"
        )


def _write_tensors(
    plan: Plan,
    source: Mapping[str, Tensor],
    files: SourceFiles,
    file: CompleteFile,
    n_threads: int,
    progress: Progress | None,
) -> None:
    """Reading is one piece ahead, writing one piece behind the encoder."""
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        pending: Future[None] | None = None
        for planned, piece, last, (codes, scales) in _read_ahead(plan, source, files, reader):
            encoded = convert_source.encode(piece, codes, scales, planned.type, n_threads)
            if pending is not None:
                pending.result()
            pending = writer.submit(_append, plan, planned, file, encoded, last)
            if progress is not None:
                progress(file.position, plan.file_bytes, planned.name)
        if pending is not None:
            pending.result()
    if file.position != plan.file_bytes:
        raise AssertionError(f"wrote {file.position} bytes, planned {plan.file_bytes}")
    if progress is not None:
        progress(file.position, plan.file_bytes, plan.tensors[-1].name)


def _append(plan: Plan, planned: PlannedTensor, file: CompleteFile, encoded: Bytes, last: bool) -> None:
    file.write(encoded)
    if last:
        end = plan.data_start + planned.offset + planned.nbytes
        if file.position != end:
            raise AssertionError(f"{planned.name} ends at byte {file.position}, planned {end}")
        file.pad(ALIGNMENT)


Read = tuple[Bytes, Bytes | None]
Step = tuple[PlannedTensor, Piece, bool]


def _read_ahead(
    plan: Plan, source: Mapping[str, Tensor], files: SourceFiles, reader: ThreadPoolExecutor
) -> Iterator[tuple[PlannedTensor, Piece, bool, Read]]:
    """Each piece with its bytes; `last` marks the last piece of a tensor."""
    ahead: tuple[Step, Future[Read]] | None = None
    for step in _steps(plan, source):
        following = (step, reader.submit(step[1].read, files))
        if ahead is not None:
            yield (*ahead[0], ahead[1].result())
        ahead = following
    if ahead is not None:
        yield (*ahead[0], ahead[1].result())


def _steps(plan: Plan, source: Mapping[str, Tensor]) -> Iterator[Step]:
    for planned in plan.tensors:
        previous: Piece | None = None
        for piece in convert_source.tensor_pieces(planned, source):
            if previous is not None:
                yield planned, previous, False
            previous = piece
        if previous is not None:
            yield planned, previous, True
