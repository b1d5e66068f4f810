"""Compressed rows: one latent for every `ratio` tokens."""

from __future__ import annotations

import numpy as np

from .formats import F32, Mode, quantise_q4c, store
from .linear import Weight, linear, product_fp32
from .norm import rms_norm
from .rope import rotate_tail


def latent_ratio1(x: F32, wkv: Weight, norm: F32, eps: float, mode: Mode) -> F32:
    """One latent per token: x [n, D] -> [n, hd]. A plain bf16 projection and a norm."""
    return rms_norm(linear(x, wkv, mode), norm, eps, mode)


def pool_inputs(x: F32, wkv: Weight, wgate: Weight) -> tuple[F32, F32]:
    """Values and gates [n, hd] of single tokens, both fp32; those of an open group are kept between steps."""
    return product_fp32(x, wkv.values), product_fp32(x, wgate.values)


def pool(values: F32, gates: F32, norm: F32, eps: float, mode: Mode) -> F32:
    """Latents from complete groups: values, gates [groups, ratio, hd] -> [groups, hd].

    The softmax over the tokens of a group is taken for each channel alone; there is no positional bias.
    """
    share = np.exp(gates.astype(np.float64) - gates.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    return rms_norm(store((values * share).sum(axis=1), mode), norm, eps, mode)


def compressed_rows(latent: F32, cos: F32, sin: F32, mode: Mode) -> F32:
    """Latents [m, hd] as attention reads them: tail rotated at the group's first token, then Q4c over the whole row."""
    return quantise_q4c(rotate_tail(latent, cos, sin, mode)).values
