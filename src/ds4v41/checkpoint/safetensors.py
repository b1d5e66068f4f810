"""The official dialect: a folder with config.json and .safetensors files.

Which files count: those that model.safetensors.index.json names, else model.safetensors alone, else every
.safetensors file of the folder. Headers only are read; everything they say is checked against the files, against the
index and against the tensor table before anything is mapped, and all faults are reported together.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .config import ModelConfig
from .files import kind_of, open_error, read_json, stat_path
from .header import Entry, Header, read_header
from .tensors import Checkpoint, FileSegment, Tensor, raise_problems
from .validate import part_of, validate_official

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_CONFIG = 16 << 20
_MAX_INDEX = 100_000_000
_SHARD = re.compile(r"-(\d{5,6})-of-(\d{5,6})\.safetensors$")
_TEXT_PARTS = ("main", "engram")
_ADVICE = "Get the named files again, or check that all files are of one and the same model."


def read_config(folder: Path) -> ModelConfig:
    """The checked configuration of a folder. Raises CheckpointError or ConfigError."""
    path = folder / CONFIG
    if folder.is_dir() and not os.path.lexists(path):
        files = sorted(file.name for file in folder.glob("*.gguf"))[:3]
        instead = f"name the file itself: {', '.join(files)}" if files else "give an official folder, or a .gguf file"
        raise CheckpointError(f"{folder}: there is no {CONFIG} in this folder; {instead}")
    return ModelConfig.from_hf(read_json(path, _MAX_CONFIG), str(path))


def open_folder(path: str | PathLike[str], *, strict: bool = True, parts: Sequence[str] = _TEXT_PARTS) -> Checkpoint:
    """Open a folder, or one .safetensors file beside its config.json.

    `parts` are what must be there and right (a drafter is opened with ("drafter",)); tensors of other parts are
    listed when their files are there. Raises CheckpointError with all faults, ConfigError for the configuration; with
    strict=False faults of tensors go to `Checkpoint.problems`.
    """
    where = Path(path)
    info = stat_path(where)
    if not stat.S_ISDIR(info.st_mode) and not (stat.S_ISREG(info.st_mode) and where.suffix == ".safetensors"):
        raise CheckpointError(
            f"{where}: expected a folder with {CONFIG} and .safetensors files, or one .safetensors file, "
            f"found {kind_of(info)}"
        )
    is_folder = stat.S_ISDIR(info.st_mode)
    folder = where if is_folder else where.parent
    config = read_config(folder)
    reader = _Reader(folder, tuple(parts))
    if is_folder:
        reader.find_files()
    else:
        reader.files = {where: None}
    tensors = reader.read_tensors()
    problems = reader.problems
    problems += validate_official(config, tensors, parts, complete=reader.complete)
    generation = _generation(folder / GENERATION, problems)
    if strict:
        raise_problems(str(where), problems, _ADVICE)
    return Checkpoint(
        path=where,
        dialect="official",
        config=config,
        tensors=tensors,
        tokenizer=_find_tokenizer(folder),
        generation=generation,
        problems=problems,
    )


def _find_tokenizer(folder: Path) -> Path | None:
    """The folder's own, or the one beside it that several variants of a model share. Whether it belongs to the model
    is checked against the configuration when it is used."""
    places = (folder / TOKENIZER, folder.absolute().parent / TOKENIZER)
    return next((place for place in places if os.path.isfile(place)), None)


def _generation(path: Path, problems: list[str]) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    try:
        generation = read_json(path, _MAX_CONFIG)
    except CheckpointError as error:
        problems.append(str(error))
        return {}
    if not isinstance(generation, dict):
        problems.append(f"{path}: expected a JSON object")
        return {}
    return generation


class _Reader:
    """Finds the files of a folder and collects their tensors and faults."""

    def __init__(self, folder: Path, parts: tuple[str, ...]) -> None:
        self.folder = folder
        self.parts = parts
        self.problems: list[str] = []
        self.complete = True
        """False when tensors are missing because a file could not be read."""
        self.files: dict[Path, set[str] | None] = {}
        """Files to read, each with the names that the index puts there (None without an index)."""

    # ---- which files ----------------------------------------------------------------------------------------

    def find_files(self) -> None:
        present = self._listing()
        if INDEX in present:
            self._from_index(present)
        elif SINGLE in present:
            self.files = {self.folder / SINGLE: None}
            for name in present:
                if name.startswith("model-") and _SHARD.search(name):
                    self._problem(name, f"this shard lies beside {SINGLE}, and no {INDEX} says that it belongs to it")
        else:
            self._from_shards(present)

    def _listing(self) -> list[str]:
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            raise open_error(self.folder, error) from error
        return sorted(name for name in names if name.endswith(".safetensors") or name == INDEX)

    def _from_index(self, present: list[str]) -> None:
        weight_map = self._weight_map()
        if weight_map is None:
            self.complete = False
            return
        by_shard: dict[str, set[str]] = {}
        for tensor, shard in weight_map.items():
            by_shard.setdefault(shard, set()).add(tensor)
        for shard, names in sorted(by_shard.items()):
            wanted = any(part_of(name) in self.parts for name in names)
            if os.path.lexists(self.folder / shard):
                if wanted or set(self.parts) >= set(_TEXT_PARTS):
                    self.files[self.folder / shard] = names
            elif wanted:
                self._problem(shard, f"{INDEX} puts {len(names)} tensors there, but the file is missing")
                self.complete = False
        for name in present:
            if name != INDEX and name not in by_shard:
                self._problem(name, f"{INDEX} does not name this file; remove one of the two")

    def _weight_map(self) -> dict[str, str] | None:
        path = self.folder / INDEX
        try:
            index = read_json(path, _MAX_INDEX)
        except CheckpointError as error:
            self.problems.append(str(error))
            return None
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            self._problem(INDEX, "expected an object weight_map of tensor name -> file name")
            return None
        good: dict[str, str] = {}
        for tensor, shard in weight_map.items():
            if isinstance(shard, str) and shard.endswith(".safetensors") and shard == os.path.basename(shard):
                good[tensor] = shard
            else:
                self._problem(
                    INDEX,
                    f"weight_map[{tensor[:200]!r}]: expected the name of a .safetensors file here, "
                    f"found {repr(shard)[:200]}",
                )
        return good

    def _from_shards(self, present: list[str]) -> None:
        if not present:
            raise CheckpointError(
                f"{self.folder}: there is no .safetensors file beside {CONFIG}; expected {INDEX} and its shards, "
                f"or {SINGLE}"
            )
        self.files = {self.folder / name: None for name in present}
        for total in sorted({match[2] for name in present if (match := _SHARD.search(name))}):
            found = {int(match[1]) for name in present if (match := _SHARD.search(name)) and match[2] == total}
            absent = [i for i in range(1, min(int(total), 10_000) + 1) if i not in found]
            if absent and set(self.parts) >= set(_TEXT_PARTS):
                shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
                self.problems.append(f"{self.folder}: {len(absent)} of {int(total)} shards are missing: {shown}")
                self.complete = False

    # ---- what is in them ------------------------------------------------------------------------------------

    def read_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for path, expected in self.files.items():
            header = read_header(path)
            self.problems += header.problems
            if header.problems:
                self.complete = False
            if header.readable and not header.problems and expected is not None:
                self._compare_with_index(header, expected)
            for tensor in _tensors_of(header):
                first = tensors.setdefault(tensor.name, tensor)
                if first is not tensor:
                    self.problems.append(
                        f"{path}: byte {tensor.offset}: tensor {tensor.name} is in {first.file.name} too"
                    )
        return tensors

    def _compare_with_index(self, header: Header, expected: set[str]) -> None:
        found = {entry.name: entry for entry in header.entries}
        for name in sorted(expected - found.keys()):
            self.problems.append(f"{header.path}: {INDEX} puts tensor {name} here, but the file does not hold it")
        for name in sorted(found.keys() - expected):
            self.problems.append(
                f"{header.path}: byte {found[name].start}: tensor {name} is here, but {INDEX} does not put it here"
            )

    def _problem(self, file: str, text: str) -> None:
        self.problems.append(f"{self.folder / file}: {text}")


def _tensors_of(header: Header) -> list[Tensor]:
    """Tensors of one file. Ranges between Engram tables are mapped as one segment each; the tables never are."""
    tensors: list[Tensor] = []
    if header.stat is None:
        return tensors
    run: list[Entry] = []
    for entry in header.entries:
        if part_of(entry.name) == "engram":
            tensors += _mapped(header, run)
            tensors.append(_tensor(entry, header.path, None))
            run = []
        else:
            run.append(entry)
    return tensors + _mapped(header, run)


def _mapped(header: Header, run: list[Entry]) -> list[Tensor]:
    if not run or header.stat is None:
        return []
    segment = FileSegment(header.path, run[0].start, max(entry.end for entry in run), header.stat)
    return [_tensor(entry, header.path, segment) for entry in run]


def _tensor(entry: Entry, path: Path, segment: FileSegment | None) -> Tensor:
    return Tensor(entry.name, entry.dtype, entry.shape, path, entry.start, entry.end - entry.start, segment)
