"""RMSNorm."""

from __future__ import annotations

import numpy as np

from .formats import F32, Mode, f32, store


def inverse_rms(x: F32, eps: float) -> F32:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which is kept with length 1."""
    wide = x.astype(np.float64)
    return f32(1 / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + eps))


def rms_norm(x: F32, weight: F32, eps: float, mode: Mode) -> F32:
    """weight * x / rms(x) over the last axis; the language model's eps is 1e-20, so tiny rows come out at full size."""
    return store(weight * (x * inverse_rms(x, eps)), mode)
