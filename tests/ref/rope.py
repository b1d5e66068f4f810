"""Rotary positions with and without YaRN."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .formats import F32, Mode, f32, store


class Yarn(NamedTuple):
    """YaRN parameters: factor, original length, and the two rotation counts that bound the ramp."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float


def yarn_bounds(rotary_dim: int, base: float, yarn: Yarn) -> tuple[int, int]:
    """First and last frequency index of the ramp."""

    def dimension(rotations: float) -> float:
        return rotary_dim * math.log(yarn.original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), rotary_dim - 1)
    return low, high


def yarn_ramp(rotary_dim: int, low: int, high: int) -> F32:
    """Share of the stretched frequency per pair, [rotary_dim / 2]: 0 up to `low`, 1 from `high` on."""
    index = np.arange(rotary_dim // 2, dtype=np.float32)
    return f32(np.clip((index - np.float32(low)) / np.float32(max(high - low, 0.001)), 0, 1))


def frequencies(rotary_dim: int, base: float, yarn: Yarn | None) -> F32:
    """Angle per position of each pair, [rotary_dim / 2], in fp32."""
    exponent = f32(np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim))
    plain = np.float32(1) / f32(np.float64(base) ** exponent.astype(np.float64))
    if yarn is None:
        return plain
    ramp = yarn_ramp(rotary_dim, *yarn_bounds(rotary_dim, base, yarn))
    return plain / np.float32(yarn.factor) * ramp + plain * (np.float32(1) - ramp)


def angles(positions: NDArray[np.integer], freq: F32) -> tuple[F32, F32]:
    """cos and sin, each [n, rotary_dim / 2]. The product position * frequency is formed in fp32, error included."""
    angle = (f32(positions)[:, None] * freq).astype(np.float64)
    return f32(np.cos(angle)), f32(np.sin(angle))


def rotate_tail(x: F32, cos: F32, sin: F32, mode: Mode, *, inverse: bool = False) -> F32:
    """Rotate adjacent pairs of the last 2 * cos.shape[-1] elements.

    x [n, width] or [n, heads, width]; cos, sin [n, pairs]. `inverse` takes the conjugate rotation.
    """
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    start = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., start::2], x[..., start + 1 :: 2]
    out = x.copy()
    out[..., start::2] = store(even * cos - odd * sin, mode)
    out[..., start + 1 :: 2] = store(even * sin + odd * cos, mode)
    return out
