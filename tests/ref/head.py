"""The output head."""

from __future__ import annotations

from .formats import F32, Mode
from .linear import product_fp32
from .norm import rms_norm


def logits(hidden: F32, norm: F32, head: F32, eps: float, mode: Mode) -> F32:
    """Collapsed stream [n, D] -> fp32 logits [n, vocabulary]; the norm's output is rounded, the product is not."""
    return product_fp32(rms_norm(hidden, norm, eps, mode), head)
