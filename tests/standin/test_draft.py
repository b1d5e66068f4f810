"""What only the drafter needs, and Engram, on Metal: the CPU's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ops.support import COLUMN_BLOCK, MODES, f32, random_stored, rope_of, small_shape, values_of

from .both import needs_standin, same_on_metal

pytestmark = needs_standin

NARROW_IN_ALL_MODES = [(mode, width) for width in (128, 70) for mode in MODES] + [("bf16", 2100)]


@pytest.mark.parametrize(("mode", "hidden"), NARROW_IN_ALL_MODES)
@pytest.mark.parametrize("n", [1, 3])
def test_means_and_collapsed_streams(mode: str, hidden: int, n: int) -> None:
    rng = np.random.default_rng(n)
    for streams in (4, 2, 5):
        shape = small_shape(hidden=hidden, n_streams=streams)
        stream, mix = values_of("wide", (n, streams, hidden), rng), f32(rng.normal(size=(n, streams)))
        same_on_metal(shape, mode, lambda b, s=stream: b.stream_mean(s, hidden + 17))
        same_on_metal(shape, mode, lambda b, s=stream, m=mix: b.collapse(s, m))


@pytest.mark.parametrize(
    ("mode", "hidden", "wide", "n"),
    [(mode, *sizes) for mode in MODES for sizes in ((128, 384, 1), (70, 96, 5))]
    + [("fp8", 2100, 32, 2), ("bf16", 32, 5000, 2)],
)
def test_context_of_the_drafter(mode: str, hidden: int, wide: int, n: int) -> None:
    rng = np.random.default_rng(wide)
    shape = small_shape(hidden=hidden)
    main, w, norm = (
        values_of("normal", (n, wide), rng),
        random_stored("bf16", hidden, wide, rng),
        f32(rng.normal(size=hidden)),
    )
    main[0, :33] = 0
    same_on_metal(shape, mode, lambda b: b.draft_main(main, w.argument(), norm), checked=hidden < 1000)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("position", "n", "capacity"), [(0, 1, 1), (5, 7, 9), (100, 3, 16)])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_context_rows(mode: str, position: int, n: int, capacity: int, head_dim: int) -> None:
    rng = np.random.default_rng(n)
    shape = small_shape(head_dim=head_dim)
    x, wkv = values_of("normal", (n, 128), rng), random_stored("fp8_block", head_dim, 128, rng)
    norm = f32(rng.normal(size=head_dim) * np.exp2(rng.integers(-20, 20, head_dim)))
    _, cos, sin = rope_of(shape, False, position, n)
    same_on_metal(shape, mode, lambda b: b.draft_window(position, x, wkv.argument(), norm, cos, sin, capacity))


@pytest.mark.parametrize("kind", COLUMN_BLOCK)
def test_markov_rows_of_every_type(kind: str) -> None:
    rng = np.random.default_rng(1)
    rank, vocab, hidden = max(64, COLUMN_BLOCK[kind]), 530, 96
    shape = small_shape(vocab=vocab, hidden=hidden)
    embed, head, confidence = (
        random_stored(kind, vocab, rank, rng),
        random_stored("bf16", vocab, rank, rng),
        random_stored("f32", 1, hidden + rank, rng),
    )
    x, base = values_of("normal", (hidden,), rng), f32(rng.normal(size=vocab) * 8)
    for mode in ("fp32", "bf16"):
        for previous in (0, 77, vocab - 1):
            same_on_metal(
                shape,
                mode,
                lambda b, p=previous: b.markov(p, embed.argument(), head.argument(), confidence.argument(), x, base),
            )


@pytest.mark.parametrize(("vocab", "rank"), [(31, 7), (2048, 33), (5000, 1), (4097, 300)])
def test_markov_sizes(vocab: int, rank: int) -> None:
    rng = np.random.default_rng(vocab)
    shape = small_shape(vocab=vocab, hidden=34)
    embed, head, confidence = (
        random_stored("bf16", *size, rng).argument() for size in ((vocab, rank), (vocab, rank), (1, 34 + rank))
    )
    x = values_of("normal", (34,), rng)
    for base in (f32(rng.normal(size=vocab) * 30), np.zeros(vocab, np.float32), f32(np.full(vocab, -1e5))):
        same_on_metal(shape, "bf16", lambda b, base=base: b.markov(3, embed, head, confidence, x, base))


@pytest.mark.parametrize(
    ("mode", "hidden", "streams", "columns", "dim", "n"),
    [(mode, *sizes) for mode in MODES for sizes in ((128, 4, 6, 32, 1), (70, 2, 3, 96, 5))]
    + [("fp8", 2100, 2, 1, 32, 2), ("bf16", 4200, 1, 1, 32, 1)],
)
def test_engram(mode: str, hidden: int, streams: int, columns: int, dim: int, n: int) -> None:
    rng = np.random.default_rng(hidden)
    shape = small_shape(hidden=hidden, n_streams=streams, engram_columns=columns, engram_dim=dim)
    rows = rng.integers(0, 256, (n, columns, dim + dim // 32), dtype=np.uint8)
    rows[..., :dim][rows[..., :dim] & 0x7F == 0x7F] = 0
    rows[..., dim:] = rng.integers(110, 135, rows[..., dim:].shape)
    weights: Any = [f32(rng.normal(size=streams * hidden)) for _ in range(2)]
    wkv = random_stored("q8_0", (streams + 1) * hidden, columns * dim, rng).argument()
    for style in ("normal", "holes"):
        stream = values_of(style, (n, streams, hidden), rng)
        same_on_metal(shape, mode, lambda b, s=stream: b.engram(rows.ravel(), *weights, wkv, s), checked=hidden < 1000)
