"""Float64 reference of docs/sampling.md: written from the definition, by sorting everything, with numpy's log and exp.

It differs from the extension by rounding only, so tests leave a margin where two choices are closer than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Options:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None


def philox4x32_10(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Four output words for each counter: [n, 4] -> [n, 4], 32-bit values in uint64."""
    c0, c1, c2, c3 = (counter[:, i].copy() for i in range(4))
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c0
        p1 = np.uint64(0xCD9E8D57) * c2
        c0, c1 = (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0), p1 & low
        c2, c3 = (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def gumbel(seed: int, position: int, n_vocab: int) -> Floats:
    """The noise of tokens 0 .. n_vocab - 1 at one position."""
    n_quads = (n_vocab + 3) // 4
    counter = np.zeros((n_quads, 4), np.uint64)
    counter[:, 0] = np.arange(n_quads)
    counter[:, 1] = position & 0xFFFFFFFF
    counter[:, 2] = position >> 32
    words = philox4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:n_vocab]
    v = (words.astype(np.float64) + 0.5) / 2.0**32
    noise: Floats = -np.log(-np.log1p(-v))
    return noise


def adjust(
    logits: NDArray[np.float32],
    options: Options,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    allowed: Sequence[int] | None = None,
) -> Floats:
    """Logits after penalties, bias and mask."""
    out = logits.astype(np.float64)
    for token in set(prompt) | set(generated):
        r = options.repetition_penalty
        out[token] = out[token] / r if out[token] > 0 else out[token] * r
    for token in set(generated):
        count = list(generated).count(token)
        out[token] -= count * options.frequency_penalty + options.presence_penalty
    for token, value in (options.logit_bias or {}).items():
        out[token] += value
    if allowed is not None:
        banned = np.ones(out.size, bool)
        banned[list(allowed)] = False
        out[banned] = -np.inf
    return out


def kept(adjusted: Floats, options: Options) -> NDArray[np.bool_]:
    """Which tokens the filters leave."""
    out = np.zeros(adjusted.size, bool)
    if options.temperature == 0:
        out[int(np.argmax(adjusted))] = True
        return out
    tempered = (adjusted - adjusted.max()) / options.temperature
    order = [int(t) for t in np.lexsort((np.arange(adjusted.size), -adjusted)) if tempered[t] > -np.inf]
    if options.top_k:
        order = order[: options.top_k]
    weights = np.exp(tempered[order])
    if options.top_p < 1:
        share = np.cumsum(weights) / weights.sum()
        order = order[: int(np.argmax(share >= options.top_p - 1e-9)) + 1]
        weights = weights[: len(order)]
    out[[t for t, w in zip(order, weights, strict=True) if w >= options.min_p]] = True
    return out


def distribution(adjusted: Floats, options: Options) -> Floats:
    """Probability of every token after temperature and filters; 0 where a filter or a ban took it out."""
    on = kept(adjusted, options)
    out = np.zeros(adjusted.size)
    out[on] = np.exp((adjusted[on] - adjusted.max()) / (options.temperature or 1.0))
    return out / out.sum()


def draw(adjusted: Floats, options: Options, seed: int, position: int) -> tuple[int, float]:
    """The token, and how far its score is above the next one (infinity when nothing else was kept)."""
    on = kept(adjusted, options)
    if options.temperature == 0:
        return int(np.argmax(on)), np.inf
    scores = np.full(adjusted.size, -np.inf)
    scores[on] = ((adjusted - adjusted.max()) / options.temperature + gumbel(seed, position, adjusted.size))[on]
    token = int(np.argmax(scores))
    rest = np.delete(scores, token)
    return token, float(scores[token] - rest.max()) if rest.size else np.inf


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    x = logits.astype(np.float64)
    x = x - x.max()
    out: Floats = x - np.log(np.exp(x).sum())
    return out
