"""Reading official weights in pieces for a conversion: positional reads into buffers, nothing mapped, so that memory
stays bounded whatever the size of a tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .convert_plan import EXACT_TYPES, PlannedTensor
from .spec import GROUP, TensorSpec, expert_specs, is_stacked
from .tensors import Tensor

Bytes = NDArray[np.uint8]
PIECE_BYTES = 16 << 20
"""Source bytes read at a time."""


def native() -> Any:
    """The compiled row encoders (module `convert` of the extension)."""
    try:
        extension = import_module("ds4v41._ext")
    except ImportError as error:
        raise CheckpointError(
            "converting needs the compiled extension of ds4v41, which this installation lacks: install the wheel, or "
            "build it with `pip install .`"
        ) from error
    return extension.convert


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one official tensor. The first row begins a block of 32 rows."""

    tensor: Tensor
    scale: Tensor | None
    first_row: int
    n_rows: int
    n_columns: int
    """Logical columns."""

    def read(self, files: SourceFiles) -> tuple[Bytes, Bytes | None]:
        """The bytes of codes and scales."""
        row = self.tensor.nbytes // self.tensor.shape[0] if len(self.tensor.shape) > 1 else self.tensor.nbytes
        codes = files.read(self.tensor, self.first_row * row, self.n_rows * row)
        if self.scale is None:
            return codes, None
        per_block = GROUP if self.scale.shape[0] != self.tensor.shape[0] else 1
        scale_row = self.scale.nbytes // self.scale.shape[0]
        first, last = self.first_row // per_block, -(-(self.first_row + self.n_rows) // per_block)
        return codes, files.read(self.scale, first * scale_row, (last - first) * scale_row)


class SourceFiles:
    """Open descriptors of the shards, closed together."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, tensor: Tensor, start: int, n_bytes: int) -> Bytes:
        """Bytes [start, start + n_bytes) of a tensor. Raises CheckpointError when the file is too short."""
        buffer = np.empty(n_bytes, dtype=np.uint8)
        view, done = buffer.data, 0
        descriptor = self._open(tensor.file)
        while done < n_bytes:
            position = tensor.offset + start + done
            try:
                n = os.preadv(descriptor, [view[done:]], position)
            except OSError as error:
                raise CheckpointError(
                    f"{tensor.file}: byte {position}: reading {tensor.name} failed: {error.strerror or error}"
                ) from error
            if n == 0:
                raise CheckpointError(
                    f"{tensor.file}: the file ends at byte {position}, inside {tensor.name}; get it again"
                )
            done += n
        return buffer

    def _open(self, path: Path) -> int:
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            try:
                descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
            self._descriptors[path] = descriptor
        return descriptor


def pieces(spec: TensorSpec, source: Mapping[str, Tensor]) -> Iterator[Piece]:
    """The pieces of one official tensor (not a stacked one), in row order."""
    tensor = source[spec.name]
    scale = source.get(spec.scale_name) if spec.needs_scale(tensor.dtype) else None
    n_rows, n_columns = spec.shape if len(spec.shape) == 2 else (1, spec.shape[0])
    row = max(1, tensor.nbytes // n_rows)
    step = max(GROUP, PIECE_BYTES // row // GROUP * GROUP)
    for first in range(0, n_rows, step):
        yield Piece(tensor, scale, first, min(step, n_rows - first), n_columns)


def tensor_pieces(planned: PlannedTensor, source: Mapping[str, Tensor]) -> Iterator[Piece]:
    """The pieces of a planned tensor, expert by expert."""
    for spec in planned.sources:
        yield from pieces(spec, source)


def encode(piece: Piece, codes: Bytes, scales: Bytes | None, type_name: str, n_threads: int) -> Bytes:
    """The output bytes of a piece. Raises CheckpointError that names tensor and position for values that do not fit."""
    module = native()
    if type_name == "I8":
        if scales is None:
            raise CheckpointError(f"{piece.tensor.file}: {piece.tensor.name} has no scales")
        out = np.empty(piece.n_rows * (piece.n_columns + piece.n_columns // GROUP), dtype=np.uint8)
        rows = (codes, scales, piece.n_rows, piece.n_columns, out)
        _guard(piece, lambda: module.pack_engram_rows(*rows, threads=n_threads))
        return out
    out = np.empty(piece.n_rows * module.row_bytes(type_name, piece.n_columns), dtype=np.uint8)
    source_type = piece.tensor.dtype
    arguments = (source_type, codes, scales, piece.n_rows, piece.n_columns, type_name, out)
    _guard(piece, lambda: module.transcode(*arguments, threads=n_threads))
    return out


def find_exact_type(spec: TensorSpec, source: Mapping[str, Tensor], files: SourceFiles, n_threads: int) -> str:
    """The first of EXACT_TYPES that holds every value of a tensor (of all experts of a stacked one)."""
    parts = expert_specs(spec) if is_stacked(spec) else [spec]
    candidates = list(EXACT_TYPES)
    for part in parts:
        for piece in pieces(part, source):
            codes, scales = piece.read(files)
            while candidates[0] != EXACT_TYPES[-1] and not _holds(piece, codes, scales, candidates[0], n_threads):
                candidates.pop(0)
    return candidates[0]


def _holds(piece: Piece, codes: Bytes, scales: Bytes | None, type_name: str, n_threads: int) -> bool:
    module = native()
    arguments = (piece.tensor.dtype, codes, scales, piece.n_rows, piece.n_columns, type_name, None)
    try:
        return bool(module.transcode(*arguments, threads=n_threads) == 0)
    except ValueError as error:
        if str(error.args[0]).endswith(f"too large for {type_name}"):
            return False
        raise _fault(piece, error) from error


def _guard(piece: Piece, work: Any) -> None:
    try:
        work()
    except ValueError as error:
        raise _fault(piece, error) from error


def _fault(piece: Piece, error: ValueError) -> CheckpointError:
    if len(error.args) != 3:
        return CheckpointError(f"{piece.tensor.file}: {piece.tensor.name}: {error}")
    text, row, column = error.args
    return CheckpointError(
        f"{piece.tensor.file}: {piece.tensor.name}: {text} at row {piece.first_row + row}, column {column}; expected "
        "finite numbers that the output type can hold. The weights are damaged: get this file again."
    )
