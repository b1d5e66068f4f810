"""A name for the weights of a checkpoint: cheap for any size, different for different weights."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator

from .checkpoint import Checkpoint, Tensor
from .errors import CheckpointError

SAMPLE_BYTES = 256
FEW = 4096
"""Up to so many tensors are sampled in three places; of more, each in one."""


def weights_id(checkpoint: Checkpoint) -> bytes:
    """32 bytes: BLAKE2b of the configuration, the token map of the n-gram hash, and of every tensor its name, type,
    shape and samples of its data. Tensors of vision and drafter are left out: no state depends on them.

    Reads at most 256 bytes in three places of each tensor (one place when there are more than 4,096 tensors).
    """
    digest = hashlib.blake2b(digest_size=32, person=b"ds4v41 weights")
    digest.update(repr(sorted(dataclasses.asdict(checkpoint.config).items())).encode())
    digest.update(repr(checkpoint.token_map).encode())
    if checkpoint.made is not None:
        digest.update(checkpoint.made.encode())
        return digest.digest()
    names = sorted(n for n in checkpoint.tensors if not n.startswith(("mtp.", "vision", "aligner", "image_")))
    files: dict[str, int] = {}
    try:
        for name in names:
            tensor = checkpoint.tensors[name]
            digest.update(f"{name}|{tensor.dtype}|{tensor.shape}|{tensor.nbytes}".encode())
            fd = files.get(str(tensor.file))
            if fd is None:
                fd = files[str(tensor.file)] = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
            for at in _places(name, tensor, len(names) > FEW):
                size = min(SAMPLE_BYTES, tensor.nbytes - at)
                sample = os.pread(fd, size, tensor.offset + at)
                if len(sample) != size:
                    raise CheckpointError(f"{tensor.file}: the file ends inside {name}; it was truncated, get it again")
                digest.update(sample)
    finally:
        for fd in files.values():
            os.close(fd)
    return digest.digest()


def _places(name: str, tensor: Tensor, one: bool) -> Iterator[int]:
    last = max(0, tensor.nbytes - SAMPLE_BYTES)
    if one:  # a place of its own for each tensor
        yield int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % (last + 1)
        return
    yield from sorted({0, last // 2, last})
