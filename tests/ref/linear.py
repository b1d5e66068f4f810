"""Linear layers: the arithmetic depends on how the weight is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .formats import F32, Mode, f32, quantise_q8, store

K_BLOCK = 32


@dataclass(frozen=True)
class Weight:
    """A weight matrix: its values (exact in float32) and the type it is stored in."""

    values: F32  # [out, in]
    kind: Literal["bf16", "fp8", "fp4"]


def product_fp32(x: F32, values: F32) -> F32:
    """x [n, in] times values [out, in] transposed, fp32 result: promoted weights (router, head, ratio-2 compressor)."""
    return f32(x.astype(np.float64) @ values.T.astype(np.float64))


def product_quantised(x: F32, values: F32) -> F32:
    """The product with a quantised weight before its last rounding, [n, out].

    x goes through Q8. Scales are powers of two, so a block sum of scaled values is the scaled sum of code products; the
    blocks of 32 are added in order of K in fp32.
    """
    quantised = quantise_q8(x).values
    total = np.zeros((len(x), len(values)), dtype=np.float32)
    for start in range(0, x.shape[1], K_BLOCK):
        block = slice(start, start + K_BLOCK)
        total = total + product_fp32(quantised[:, block], values[:, block])
    return total


def linear(x: F32, weight: Weight, mode: Mode) -> F32:
    """x [n, in] -> [n, out], rounded once. Activations are quantised in mode fp8 for fp8 and fp4 weights only."""
    if mode == "fp8" and weight.kind in ("fp8", "fp4"):
        return store(product_quantised(x, weight.values), mode)
    return store(product_fp32(x, weight.values), mode)


def grouped_linear(x: F32, weight: Weight, groups: int, mode: Mode) -> F32:
    """First output projection: x [n, in] in `groups` runs, each with its own rows of weight [out, in / groups].

    Never quantises x, whatever type the file stores the weight in. Returns [n, out].
    """
    runs = x.reshape(len(x), groups, -1)
    rows = weight.values.reshape(groups, -1, weight.values.shape[1])
    out = np.einsum("ngi,goi->ngo", runs.astype(np.float64), rows.astype(np.float64), optimize=True)
    return store(out.reshape(len(x), -1), mode)
