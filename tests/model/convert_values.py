"""Independent decoding of the official storage types, to check conversions against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4v41.checkpoint import Tensor, TensorSpec

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def e4m3(codes: Bytes) -> Floats:
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float64)
    value = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * np.exp2(exponent.astype(np.float64) - 7))
    result: Floats = (value * np.where(codes & 128, -1.0, 1.0)).astype(np.float32)
    return result


def e8m0(codes: Bytes) -> Floats:
    result: Floats = np.exp2(codes.astype(np.float64) - 127).astype(np.float32)
    return result


def fp4(packed: Bytes) -> Floats:
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return table[pairs.reshape(*packed.shape[:-1], -1)]


def official_values(spec: TensorSpec, source: Mapping[str, Tensor]) -> Floats:
    tensor = source[spec.name]
    raw = np.frombuffer(tensor.read(), np.uint8)
    if tensor.dtype == "BF16":
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return values.reshape(spec.shape)
    if tensor.dtype == "F32":
        return raw.view("<f4").reshape(spec.shape)
    stored = source[spec.scale_name]
    scales = e8m0(np.frombuffer(stored.read(), np.uint8)).reshape(stored.shape)
    if tensor.dtype == "I8":
        return fp4(raw.reshape(tensor.shape)) * np.repeat(scales, 32, axis=1)
    wide = np.repeat(np.repeat(scales, 32, axis=0), 32, axis=1)
    return e4m3(raw.reshape(tensor.shape)) * wide[: spec.shape[0], : spec.shape[1]]


def rms(values: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values.astype(np.float64)))))
