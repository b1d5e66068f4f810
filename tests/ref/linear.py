"""Linear layers: the arithmetic depends on how the weight is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .formats import F32, Mode, bf16_round, f32, quantise_q8, store

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


def fma_round(acc: F32, product: np.ndarray) -> F32:
    """acc + product with one rounding to float32; `product` [float64] is the exact product of two bfloat16 numbers.

    The sum in float64 may round itself. Rounding to odd there makes the second rounding right. Subnormals are flushed.
    """
    a = acc.astype(np.float64)
    total = a + product
    back = total - a
    lost = (a - (total - back)) + (product - back)  # exactly what the sum lost
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    away = (lost > 0) == (total > 0)  # the exact sum is larger in magnitude than `total`
    odd = np.where((lost != 0) & even, np.where(away, bits + 1, bits - 1), bits)
    out = f32(odd.view(np.float64))
    return np.where(np.abs(out) < np.float32(2.0**-126), np.copysign(np.float32(0), out), out)


def product_matrix(x: F32, values: F32) -> F32:
    """The product in the matrix class: x [n, in] times values [out, in] transposed, float32, bit for bit.

    Both sides are rounded to bfloat16. Pair p (elements 2p and 2p + 1) goes to accumulator p mod 16, ascending, its
    second product first. In the end neighbouring accumulators are added, then neighbouring sums.
    """
    missing = -x.shape[1] % 32
    x, w = (bf16_round(np.pad(v, ((0, 0), (0, missing)))).astype(np.float64) for v in (x, values))
    acc = np.zeros((len(x), len(w), 16), np.float32)
    for start in range(0, x.shape[1], 32):
        for part in (1, 0):
            place = slice(start + part, start + 32, 2)
            acc = fma_round(acc, x[:, None, place] * w[None, :, place])
    while acc.shape[2] > 1:
        acc = acc[:, :, 0::2] + acc[:, :, 1::2]
    return acc[:, :, 0]
