"""Compressed rows and their index keys: made when a group of tokens is complete, whatever the chunks are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from tests.ref import compress, formats, index, linear, norm, rope
from tests.ref.formats import F32, U8, Mode, bf16_round, f32

from .support import (
    ISAS,
    MODES,
    OPS,
    Stored,
    backend,
    inside,
    random_stored,
    rope_of,
    same_bits,
    same_on_all_backends,
    same_on_all_isas,
    small_shape,
    tiny_checkpoint,
    tiny_matrix,
)
from .tolerance import GOLDEN_CODES_DIFFER, QUANTISED_SLACK, assert_fp4_rows

SEEDS = st.integers(0, 2**32 - 1)
EPS = 1e-20


class Compressor:
    """The weights of one source layer, and what they make of tokens 0, 1, 2, ..."""

    def __init__(
        self, shape: dict[str, Any], ratio: int, wkv: Stored, wgate: Stored | None, wk: Stored, norms: tuple[F32, F32]
    ) -> None:
        self.shape, self.ratio = shape, ratio
        self.wkv, self.wgate, self.wk = wkv, wgate, wk
        self.norm, self.k_norm = norms

    def run(self, b: Any, x: F32, first: int, last: int) -> tuple[U8, U8]:
        """Feed tokens first..last - 1 of x; the packed rows and index rows that become complete."""
        _, cos, sin = rope_of(self.shape, True, 0, last)
        pending = self.pending(x[first - 1 : first]) if self.ratio == 2 and first % 2 else None
        gate = None if self.wgate is None else self.wgate.argument()
        weights = (self.wkv.argument(), gate, self.norm, self.wk.argument(), self.k_norm)
        got = b.compress(first, self.ratio, x[first:last], *weights, cos, sin, pending)
        start = first // self.ratio
        assert not got["rows"][:start].any() and not got["index_rows"][:start].any(), "older entries were touched"
        return got["rows"][start:], got["index_rows"][start:]

    def pending(self, x: F32) -> F32:
        """Value and gate of one token, with the bits that the operation itself keeps."""
        assert self.wgate is not None
        return np.concatenate([m.product(ISAS[0], x)[0] for m in (self.wkv, self.wgate)])

    def latents(self, x: F32, mode: Mode) -> F32:
        """The reference's latents of all complete groups."""
        if self.ratio == 1:
            return compress.latent_ratio1(x, linear.Weight(self.wkv.values, "bf16"), self.norm, EPS, mode)
        assert self.wgate is not None
        weights = (linear.Weight(m.values, "bf16") for m in (self.wkv, self.wgate))
        shape = (len(x) // 2, 2, self.wkv.rows)
        groups = [v[: 2 * shape[0]].reshape(shape) for v in compress.pool_inputs(x, *weights)]
        return compress.pool(groups[0], groups[1], self.norm, EPS, mode)

    def exact(self, x: F32, mode: Mode) -> tuple[F32, F32]:
        """What goes into the quantisers: rotated latents and index keys, [entries, width]."""
        latent = self.latents(x, mode)
        freq = rope_of(self.shape, True, 0, 1)[0]
        turn = rope.angles(np.arange(len(latent)) * self.ratio, freq)
        key = linear.linear(latent, linear.Weight(self.wk.values, "bf16"), mode)
        key = norm.rms_norm(key, self.k_norm, EPS, mode)
        return rope.rotate_tail(latent, *turn, mode), rope.rotate_tail(key, *turn, mode)


def random_compressor(shape: dict[str, Any], ratio: int, kind: str, seed: int) -> Compressor:
    rng = np.random.default_rng(seed)
    wide, hidden, dim = shape["head_dim"], shape["hidden"], shape["index_dim"]
    wkv = random_stored(kind, wide, hidden, rng)
    wgate = random_stored(kind, wide, hidden, rng) if ratio == 2 else None
    norms = bf16_round(rng.uniform(0.5, 1.5, wide)), bf16_round(rng.uniform(0.5, 1.5, dim))
    return Compressor(shape, ratio, wkv, wgate, random_stored("bf16", dim, wide, rng), norms)


def tokens(n: int, shape: dict[str, Any], seed: int) -> F32:
    x = np.random.default_rng(seed).normal(size=(n, shape["hidden"])) * shape["hidden"] ** -0.5
    return bf16_round(x)


# ---------------------------------------------------------------- golden layers


def tiny_compressor(mode: str, layer: int, ratio: int) -> Compressor:
    name, file = f"layers.{layer}.attn", tiny_checkpoint(mode)
    wgate = tiny_matrix(mode, f"{name}.compressor.wgate") if ratio == 2 else None
    norms = file[f"{name}.compressor.norm.weight"], file[f"{name}.indexer.k_norm.weight"]
    wkv, wk = (tiny_matrix(mode, f"{name}.{part}") for part in ("compressor.wkv", "indexer.wk"))
    return Compressor(small_shape(), ratio, wkv, wgate, wk, norms)


def unpacked(kind: str, raw: U8, width: int) -> F32:
    return np.asarray(OPS.unpack(ISAS[0], kind, raw.reshape(-1), width)).reshape(-1, width)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("layer", "ratio"), [(2, 2), (5, 1)])
def test_golden_sources(layer: int, ratio: int, mode: str, isa: str) -> None:
    """40 tokens at once, then four single ones: with ratio 2 the second and the fourth complete a group."""
    v = inside(mode)
    source, run = tiny_compressor(mode, layer, ratio), backend(small_shape(), mode, isa)
    phases = ["prefill", "decode0", "decode1", "decode2", "decode3"]
    x = np.concatenate([v[f"{phase}.L{layer}.attn_in"] for phase in phases])
    parts = [source.run(run, x, first, last) for first, last in ((0, 40), (40, 41), (41, 42), (42, 43), (43, 44))]
    rows, keys = (np.concatenate(p) for p in zip(*parts, strict=True))
    for kind, raw, name in (("compressed", rows, "compress_kv"), ("index", keys, "index_k")):
        want = v[f"decode3.L{layer}.{name}"]
        got = unpacked(kind, raw, want.shape[1])
        assert got.shape == want.shape == (44 // ratio, want.shape[1])
        assert (got != want).mean() < GOLDEN_CODES_DIFFER


# ---------------------------------------------------------------- random data against the reference


def check(source: Compressor, x: F32, got: tuple[U8, U8], first: int, mode: Mode) -> None:
    """Every element on the nearest code of its exact value, up to the error in front of the quantiser."""
    start = first // source.ratio
    for kind, raw, exact in zip(("compressed", "index"), got, source.exact(x, mode), strict=True):
        assert_fp4_rows(kind, raw, exact[start:], QUANTISED_SLACK[mode])


@given(
    n=st.integers(1, 9),
    first=st.integers(0, 90),
    ratio=st.sampled_from([1, 2]),
    groups=st.integers(1, 4),
    index_groups=st.integers(1, 3),
    hidden=st.integers(1, 150),
    kind=st.sampled_from(["bf16", "f32", "f16"]),
    mode=st.sampled_from(["fp32", "bf16"]),
    seed=SEEDS,
)
def test_any_position_as_the_reference(
    n: int, first: int, ratio: int, groups: int, index_groups: int, hidden: int, kind: str, mode: Mode, seed: int
) -> None:
    """Odd positions close the pair that an earlier call opened; odd ends leave one open."""
    shape = small_shape(hidden=hidden, head_dim=32 * groups, index_dim=32 * index_groups)
    source = random_compressor(shape, ratio, kind, seed)
    x = tokens(first + n, shape, seed + 1)
    got = same_on_all_isas(lambda isa: source.run(backend(shape, mode, isa), x, first, first + n))
    check(source, x, (got[0], got[1]), first, mode)
    assert len(got[0]) == (first + n) // ratio - first // ratio


@pytest.mark.parametrize("ratio", [1, 2])
def test_released_widths(ratio: int) -> None:
    shape = small_shape(hidden=640, head_dim=512, rope_dim=64, index_dim=128, yarn_original=65536.0)
    source = random_compressor(shape, ratio, "bf16", 5)
    x = tokens(8, shape, 6)
    got = same_on_all_isas(lambda isa: source.run(backend(shape, "bf16", isa), x, 3, 8))
    check(source, x, (got[0], got[1]), 3, "bf16")


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_chunks_do_not_show(ratio: int, mode: str) -> None:
    """Any cutting of the same tokens gives the same bytes; with ratio 2 cuts at odd positions use the pending row."""
    shape = small_shape()
    source, x = random_compressor(shape, ratio, "bf16", 7), tokens(23, shape, 8)
    run = backend(shape, mode)
    whole = source.run(run, x, 0, 23)
    for cuts in ([0, 1, 2, 3, 4, 23], [0, 7, 8, 15, 23], [0, 22, 23], list(range(24))):
        parts = [source.run(run, x, a, b) for a, b in pairwise(cuts)]
        for got, want in zip(zip(*parts, strict=True), whole, strict=True):
            assert_array_equal(np.concatenate(got), want)


def test_a_pair_is_weighed_for_each_channel() -> None:
    """The pending row counts: other gates of the first token give another entry, channel by channel."""
    shape = small_shape(hidden=32, head_dim=32, norm_eps=1e-20)
    source = random_compressor(shape, 2, "f32", 9)
    x = tokens(2, shape, 10)
    gate = np.array([-50.0, 50.0] * 16, np.float32)
    pending = np.concatenate([source.pending(x[:1])[:32], gate])
    _, cos, sin = rope_of(shape, True, 0, 2)
    assert source.wgate is not None
    weights = (source.wkv.argument(), source.wgate.argument(), source.norm, source.wk.argument(), source.k_norm)
    values = source.wkv.product(ISAS[0], x)
    picked = np.where(gate > 0, values[0], values[1])
    want = rope.rotate_tail(norm.rms_norm(picked[None], source.norm, EPS, "fp32"), cos[:1], sin[:1], "fp32")
    for isa in ISAS:
        got = backend(shape, "fp32", isa).compress(1, 2, x[1:], *weights, cos, sin, pending)
        assert_fp4_rows("compressed", got["rows"], want, QUANTISED_SLACK["fp32"])


def test_no_entry_is_complete() -> None:
    shape = small_shape()
    source, x = random_compressor(shape, 2, "bf16", 11), tokens(5, shape, 12)
    for isa in ISAS:
        for first in (0, 2, 4):
            rows, keys = source.run(backend(shape, "bf16", isa), x, first, first + 1)
            assert len(rows) == len(keys) == 0


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("n", [1, 12])
def test_same_bits_on_all_backends(n: int, ratio: int) -> None:
    shape = small_shape(hidden=96, head_dim=96, index_dim=64)
    source, x = random_compressor(shape, ratio, "bf16", n), tokens(5 + n, shape, n)
    for mode in ("fp32", "bf16"):
        same_on_all_backends(shape, mode, lambda b: source.run(b, x, 5, 5 + n))


def test_keys_come_from_the_latent_before_it_is_rotated() -> None:
    """The index key of entry j is rotated at its own first token only once."""
    shape = small_shape()
    source, x = random_compressor(shape, 1, "bf16", 13), tokens(60, shape, 14)
    _, keys = source.run(backend(shape, "bf16"), x, 0, 60)
    latent = source.latents(x, "bf16")
    turn = rope.angles(np.arange(60), rope_of(shape, True, 0, 1)[0])
    want = index.index_keys(latent, linear.Weight(source.wk.values, "bf16"), source.k_norm, *turn, EPS, "bf16")
    assert (unpacked("index", keys, 32) != want).mean() < GOLDEN_CODES_DIFFER
    same_bits(unpacked("index", keys, 32)[:1], f32(want[:1] + np.float32(0)))
    assert formats.quantise_q4i(want).values.shape == want.shape
