"""Checkpoints: reading and checking the files that hold a model, in both dialects.

`open_checkpoint` finds out what a path is. Opening reads headers only; weights are mapped when they are first used.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from ..errors import CheckpointError
from .config import ModelConfig
from .files import kind_of, open_error, stat_path
from .spec import TensorSpec, stacked_table, tensor_table
from .tensors import Checkpoint, FileSegment, Tensor

__all__ = [
    "Checkpoint",
    "FileSegment",
    "ModelConfig",
    "Tensor",
    "TensorSpec",
    "open_checkpoint",
    "stacked_table",
    "tensor_table",
]

_GGUF_MAGIC = b"GGUF"


def open_checkpoint(
    path: str | PathLike[str], *, strict: bool = True, parts: Sequence[str] = ("main", "engram")
) -> Checkpoint:
    """Open an official safetensors folder, one .safetensors file beside its config.json, or a GGUF file.

    Raises CheckpointError or ConfigError with every problem found. With strict=False faults of tensors are kept in
    `Checkpoint.problems` instead, as long as there is a usable configuration. `parts` are what an official folder must
    have (("main",) when the Engram tables are elsewhere); a GGUF file always has all.
    """
    where = Path(path)
    info = stat_path(where)
    if stat.S_ISDIR(info.st_mode):
        from .safetensors import open_folder

        return open_folder(where, strict=strict, parts=parts)
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError(f"{where}: expected a checkpoint folder or file, found {kind_of(info)}")
    if where.suffix == ".gguf" or _magic(where) == _GGUF_MAGIC:
        from .gguf import open_gguf

        return open_gguf(where, strict=strict)
    if where.suffix == ".safetensors":
        from .safetensors import open_folder

        return open_folder(where, strict=strict, parts=parts)
    raise CheckpointError(
        f"{where}: this is neither a GGUF file (it does not begin with {_GGUF_MAGIC.decode()}) nor a .safetensors "
        "file; give the folder that holds config.json and the .safetensors files, or a .gguf file"
    )


def _magic(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise open_error(path, error) from error
