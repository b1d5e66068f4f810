"""What a reader returns in either dialect: tensors that know where their bytes are, and the checkpoint around them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, TokenizerError
from .config import ModelConfig
from .finite import find_non_finite

Bytes = NDArray[np.uint8]


class Segment(Protocol):
    """Memory in which tensors lie."""

    def bytes(self, offset: int, nbytes: int) -> Bytes:
        """Read-only view of a part."""

    def copy(self, offset: int, nbytes: int) -> Bytes | None:
        """A copy of a part where there is no file; None where there is, to be read there."""


class FileSegment:
    """A byte range [start, end) of one file, mapped read-only when it is first looked at, and then shared.

    `stat` is the state of the file when its header was read; a file that changed since is refused, because its
    tensors may be elsewhere now and reading past a new end would kill the process.
    """

    def __init__(self, path: Path, start: int, end: int, stat: os.stat_result) -> None:
        self.path, self.start, self.end = path, start, end
        self._stat = stat
        self._lock = threading.Lock()
        self._map: Bytes | None = None

    def bytes(self, offset: int, nbytes: int) -> Bytes:
        """Read-only view of `nbytes` bytes at absolute file offset `offset`."""
        with self._lock:
            if self._map is None:
                self._map = self._open()
        first = offset - self.start
        return self._map[first : first + nbytes]

    def copy(self, offset: int, nbytes: int) -> None:
        """See `Segment`."""

    def _open(self) -> Bytes:
        if self.start == self.end:
            return np.zeros(0, dtype=np.uint8)
        try:
            with open(self.path, "rb") as file:
                now = os.fstat(file.fileno())
                if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
                    raise CheckpointError(
                        f"{self.path}: the file changed after it was opened ({self._stat.st_size} bytes then, "
                        f"{now.st_size} bytes now); open the checkpoint again"
                    )
                length = self.end - self.start
                return np.memmap(file, dtype=np.uint8, mode="r", offset=self.start, shape=(length,))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot map bytes {self.start}..{self.end}: {error}") from error


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor. `shape` is the stored shape, [rows, columns], outermost first in both dialects."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Absolute position of the first byte in the file."""
    nbytes: int
    segment: Segment | None = field(default=None, repr=False, compare=False)
    """The mapped range that holds it; None for Engram tables, which are read from the file row by row."""

    def view(self) -> Bytes:
        """The stored bytes, [nbytes] uint8, read-only, mapped on first use. CheckpointError for Engram tables."""
        if self.segment is None:
            raise CheckpointError(
                f"{self.name} is an Engram table of {self.nbytes} bytes and is never mapped: read rows from "
                f"{self.file} at offset {self.offset}, or use Tensor.read"
            )
        return self.segment.bytes(self.offset, self.nbytes)

    def read(self, start: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes [start, start + nbytes) of the tensor by positional reads, mapped or not."""
        nbytes = self.nbytes - start if nbytes is None else nbytes
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise IndexError(f"{self.name}: bytes {start}..{start + nbytes} are outside of its {self.nbytes} bytes")
        if self.segment is not None and (found := self.segment.copy(self.offset + start, nbytes)) is not None:
            return found.tobytes()
        pieces: list[bytes] = []
        position, end = self.offset + start, self.offset + start + nbytes
        with open(self.file, "rb", buffering=0) as file:
            while position < end:
                piece = os.pread(file.fileno(), end - position, position)
                if not piece:
                    raise CheckpointError(
                        f"{self.file}: the file ends at offset {position}, inside {self.name}, which needs bytes up "
                        f"to {end}; the file was truncated, get it again"
                    )
                pieces.append(piece)
                position += len(piece)
        return b"".join(pieces)


@dataclass(slots=True)
class Checkpoint:
    """An opened checkpoint: everything is checked except the weight values (see `check`), nothing is loaded."""

    path: Path
    dialect: str
    """"official" (safetensors folder) or "gguf"."""
    config: ModelConfig
    tensors: dict[str, Tensor]
    """By official name. In the GGUF dialect the experts of a layer and role are one stacked tensor."""
    tokenizer: Path | None = None
    """tokenizer.json, if there is one."""
    generation: dict[str, Any] = field(default_factory=dict)
    """What generation_config.json says."""
    tokenizer_metadata: Mapping[str, Any] | None = None
    """Tokenizer data stored in the file itself (GGUF): tokens, types, merges, bos, eos."""
    target_lineage: str | None = None
    """Of a drafter's file: the lineage of the model that it was made with, if it says so."""
    problems: list[str] = field(default_factory=list)
    """Faults found when opened with strict=False; empty otherwise, since faults raise."""
    stored_token_map: Sequence[int] | None = None
    """Token map stored in the file itself (GGUF)."""
    made: str | None = None
    """Of a synthetic model in memory: what all its bytes follow from. There is no file, and the host may not be able to
    look at the tensors."""
    _token_map: list[int] | None = field(default=None, repr=False)

    @property
    def token_map(self) -> list[int] | None:
        """Compressed id of every token id, [vocab_size], for the Engram hash; made on first use.

        None when the checkpoint has neither a stored map nor a tokenizer. Raises TokenizerError when the tokenizer
        does not belong to the model.
        """
        if self._token_map is None:
            if self.stored_token_map is not None:
                self._token_map = list(self.stored_token_map)
            elif self.tokenizer is not None:
                self._token_map = self._make_token_map(self.tokenizer)
        return self._token_map

    def _make_token_map(self, tokenizer: Path) -> list[int]:
        from .tokenmap import compressed_token_map

        token_map, size = compressed_token_map(tokenizer, self.config.vocab_size)
        expected = self.config.engram_compressed_vocab_size
        if size != expected:
            raise TokenizerError(
                f"{tokenizer}: its {self.config.vocab_size} ids make {size} compressed ids, but the configuration says "
                f"engram_compressed_vocab_size {expected}; use the tokenizer.json that was published with the model"
            )
        return [int(i) for i in token_map]

    def check(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Look at every mapped weight for NaN and infinity; `progress(bytes done, bytes in all)` after each tensor.

        Raises CheckpointError that names the first such value of every bad tensor. Engram tables are not read: their
        rows are checked when they are used.
        """
        if self.made is not None:  # finite by the way they are made, and perhaps where only a device can look
            return
        mapped = [tensor for tensor in self.tensors.values() if tensor.segment is not None]
        total, done, problems = sum(tensor.nbytes for tensor in mapped), 0, []
        for tensor in mapped:
            bad = find_non_finite(tensor.view(), tensor.dtype, tensor.shape)
            if bad is not None:
                position, at_byte, value = bad
                problems.append(
                    f"{tensor.file}: byte {tensor.offset + at_byte}: {tensor.name} ({tensor.dtype}) holds {value} "
                    f"at position {list(position)}; expected finite numbers"
                )
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)
        raise_problems(str(self.path), problems, "The weights are damaged: get these files again.")


_MAX_SHOWN = 40


def raise_problems(source: str, problems: Sequence[str], advice: str) -> None:
    """Raise one CheckpointError for all problems (the first 40 are printed), or return when there are none."""
    if not problems:
        return
    n = len(problems)
    shown = "\n".join(f"  - {problem}" for problem in problems[:_MAX_SHOWN])
    more = f"\n  ... and {n - _MAX_SHOWN} more" if n > _MAX_SHOWN else ""
    raise CheckpointError(f"{source}: {n} problem{'s' if n > 1 else ''}:\n{shown}{more}\n{advice}", problems)
