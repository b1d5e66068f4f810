"""What all files made from one set of weights have in common, whatever their types: the norms of the model's layers.

Every recipe keeps them exactly (bf16 values, as bf16 or f32), so a drafter's file can say which model it was made with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from .config import ModelConfig
from .tensors import Tensor

_EXACT = {"F32": "<f4", "BF16": "<u2"}


def lineage(config: ModelConfig, tensors: Mapping[str, Tensor]) -> str | None:
    """64 hex digits, BLAKE2b of the final norm and every layer's two norms as f32; None when they are not all here, or
    not all of a type that keeps them exactly."""
    names = ["norm.weight"]
    for layer in range(config.num_hidden_layers):
        names += [f"layers.{layer}.attn_norm.weight", f"layers.{layer}.ffn_norm.weight"]
    digest = hashlib.blake2b(digest_size=32, person=b"ds4v41 lineage")
    for name in names:
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype not in _EXACT:
            return None
        values = np.frombuffer(tensor.read(), _EXACT[tensor.dtype])
        if tensor.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        digest.update(values.astype("<f4").tobytes())
    return digest.hexdigest()
