"""The attention core: window rows and selected compressed rows in one softmax with a sink, then un-rotation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from tests.golden.compare import assert_bf16_close, relative
from tests.golden.load import unit
from tests.ref import attend, formats, rope
from tests.ref.formats import F32, U8, Mode, f32

from .support import (
    ISAS,
    MODES,
    OPS,
    backend,
    identity_rope,
    inside,
    rope_of,
    same_bits,
    same_on_all_backends,
    same_on_all_isas,
    small_shape,
    tiny_checkpoint,
)
from .tolerance import (
    ATTEND_BF16,
    GOLDEN_ATTEND_ABSOLUTE,
    GOLDEN_ATTEND_LAYER,
    GOLDEN_FP32,
    assert_norms_within,
    assert_rows_close,
    attend_factor,
)

SEEDS = st.integers(0, 2**32 - 1)


def packed(kind: str, rows: F32) -> U8:
    """Fake-quantised rows as they lie in the cache, without loss."""
    raw = np.asarray(OPS.pack(ISAS[0], kind, rows))
    assert_array_equal(OPS.unpack(ISAS[0], kind, raw.reshape(-1), rows.shape[1]), rows)
    return raw


# ---------------------------------------------------------------- golden vectors


def two_parts(kv: F32) -> F32:
    """bf16 rows as a sum of two e4m3 rows side by side, [m, 4 * width] with zeros behind.

    A cache row holds 4 significant bits and the golden rows have 8. Four times the width makes the core's scale
    half of the golden one, which twice the query undoes, all exact.
    """
    high = formats.quantise_q8(kv).values
    low = kv - high
    assert_array_equal(formats.quantise_q8(low).values, low)
    return np.concatenate([high, low, np.zeros_like(kv), np.zeros_like(kv)], axis=1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_golden_lists(mode: str, isa: str) -> None:
    """Each golden list as a window of its own. Row 1 is empty, which cannot happen here: a query sees its own row."""
    v = unit("sparse_attn")
    rows, want = two_parts(v["kv"]), v["out_f32"] if mode == "fp32" else v["out_bf16"]
    run = backend(small_shape(n_heads=4, head_dim=256, window=80), mode, isa)
    query = np.concatenate([2 * v["q"], 2 * v["q"], np.zeros((7, 4, 128), np.float32)], axis=2)
    for i in (0, 2, 3, 4, 5, 6):
        listed = v["idx"][i][v["idx"][i] >= 0]
        n = len(listed)
        window = packed("window", rows[listed])
        got = run.attend(n - 1, query[i : i + 1], window, None, None, v["sink"], *identity_rope(1, 16))
        got = got[0, :, :64] + got[0, :, 64:128]
        if mode == "fp32":
            assert_allclose(got, want[i], rtol=GOLDEN_FP32, atol=GOLDEN_ATTEND_ABSOLUTE)
        else:  # both parts are rounded for themselves
            assert relative(got, want[i]) < ATTEND_BF16


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", [f"L{i}" for i in range(8)])
def test_golden_prefill_of_every_layer(layer: str, mode: str, isa: str) -> None:
    """40 queries: empty lists and holes in the window at first, then 16 window rows and 16 selected ones."""
    v = inside(mode)
    kv, listed = v[f"prefill.{layer}.attn_kv"], v[f"prefill.{layer}.attn_idx"]
    sink = sink_of(mode, layer)
    compressed = packed("compressed", kv[40:]) if len(kv) > 40 else None
    selected = [[int(e) - 40 for e in row if e >= 40] for row in listed] if len(kv) > 40 else None
    run = backend(small_shape(), mode, isa)
    query, window = v[f"prefill.{layer}.attn_q"], packed("window", kv[:40])
    got = run.attend(0, query, window, compressed, selected, sink, *identity_rope(40, 16))
    check_golden(got, v[f"prefill.{layer}.attn_o"], mode)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", ["decode0", "decode3"])
@pytest.mark.parametrize("layer", [f"L{i}" for i in range(8)])
def test_golden_step_of_every_layer(layer: str, phase: str, mode: str, isa: str) -> None:
    """One query at position 40 or 43; the golden ring holds position p in slot p mod 16."""
    v = inside(mode)
    position = 40 + int(phase[-1])
    kv, listed = v[f"{phase}.{layer}.attn_kv"], v[f"{phase}.{layer}.attn_idx"]
    window = np.zeros((position + 1, 64), np.float32)
    for p in range(position - 15, position + 1):
        window[p] = kv[p % 16]
    compressed = packed("compressed", kv[16:]) if len(kv) > 16 else None
    selected = [[int(e) - 16 for e in row if e >= 16] for row in listed] if len(kv) > 16 else None
    run = backend(small_shape(), mode, isa)
    arguments = (v[f"{phase}.{layer}.attn_q"], packed("window", window), compressed, selected, sink_of(mode, layer))
    check_golden(run.attend(position, *arguments, *identity_rope(1, 16)), v[f"{phase}.{layer}.attn_o"], mode)


def sink_of(mode: str, layer: str) -> F32:
    return tiny_checkpoint(mode)[f"layers.{layer[1:]}.attn.attn_sink"]


def check_golden(got: F32, want: F32, mode: str) -> None:
    if mode == "fp32":
        assert_rows_close(got.reshape(-1, 64), want.reshape(-1, 64), GOLDEN_ATTEND_LAYER)
    else:
        assert_bf16_close(got, want)


# ---------------------------------------------------------------- random data against the reference


class Case:
    """Random rows, queries and lists for one call."""

    def __init__(self, shape: dict[str, Any], n: int, position: int, lists: list[list[int]] | None, seed: int) -> None:
        rng = np.random.default_rng(seed)
        heads, width, entries = shape["n_heads"], shape["head_dim"], max([0, *(e + 1 for r in lists or [] for e in r)])
        self.shape, self.position, self.lists = shape, position, lists
        self.q = formats.bf16_round(rng.normal(size=(n, heads, width)))
        self.window = formats.quantise_q8(f32(rng.normal(size=(position + n, width)))).values
        self.compressed = formats.quantise_q4c(f32(rng.normal(size=(entries, width)))).values
        self.sink = f32(rng.normal(size=heads))
        _, self.cos, self.sin = rope_of(shape, lists is not None, position, n)

    def run(self, b: Any, start: int = 0, end: int | None = None) -> F32:
        """Rows start..end - 1 on a back end."""
        end = len(self.q) if end is None else end
        compressed = None if self.lists is None else packed("compressed", self.compressed)
        lists = None if self.lists is None else self.lists[start:end]
        window = packed("window", self.window[: self.position + end])
        turn = (self.cos[start:end], self.sin[start:end])
        q = self.q[start:end]
        return np.asarray(b.attend(self.position + start, q, window, compressed, lists, self.sink, *turn))

    def want(self, mode: Mode) -> F32:
        """The reference on the same list: `window` places with holes behind, then the selected entries."""
        n, places = len(self.q), self.shape["window"]
        rows = np.full((n, places + max([0, *(len(r) for r in self.lists or [])])), -1)
        for i in range(n):
            p = self.position + i
            seen = np.arange(max(0, p - places + 1), p + 1)
            rows[i, : len(seen)] = seen
            picked = np.array(self.lists[i] if self.lists else [], dtype=int)
            rows[i, places : places + len(picked)] = picked + len(self.window)
        kv = np.concatenate([self.window, self.compressed])
        scale = float(self.shape["head_dim"]) ** -0.5
        out = attend.attend(self.q, kv, rows, self.sink, scale, mode)
        self.size = attend_size(self.q, kv, rows, self.sink, scale)
        self.factor: np.ndarray | float = attend_factor(self.q, kv, rows.shape[1]) if mode == "fp32" else ATTEND_BF16
        return rope.rotate_tail(out, self.cos, self.sin, mode, inverse=True)

    def check(self, got: F32, mode: Mode) -> None:
        """Against the reference, in norm for each head (which the last rotation does not change)."""
        want = self.want(mode)
        assert_norms_within(got - want.astype(np.float64), self.size, self.factor)


def attend_size(q: F32, kv: F32, rows: np.ndarray, sink: F32, scale: float) -> np.ndarray:
    """The sum of p |v| over the denominator, [n, H, hd]: what relative errors of probabilities apply to."""
    keys = kv[np.maximum(rows, 0)].astype(np.float64)
    scores = np.where(rows[:, None] < 0, -np.inf, np.einsum("nhd,nkd->nhk", q, keys, optimize=True) * scale)
    top = scores.max(axis=2, keepdims=True)
    p = np.exp(scores - top)
    with np.errstate(over="ignore"):
        total = p.sum(axis=2, keepdims=True) + np.exp(sink[:, None] - top)
    return np.asarray(np.einsum("nhk,nkd->nhd", p / total, np.abs(keys), optimize=True))


def random_lists(rng: np.random.Generator, n: int, entries: int, most: int, full: bool) -> list[list[int]]:
    """Ascending entries of each query, some of them none."""
    counts = [min(most, entries) if full else int(rng.integers(0, min(most, entries) + 1)) for _ in range(n)]
    return [sorted(int(e) for e in rng.choice(entries, size=c, replace=False)) for c in counts]


@given(
    n=st.integers(1, 5),
    position=st.integers(0, 150),
    window=st.sampled_from([1, 3, 16, 63, 64, 65, 100, 128]),
    heads=st.integers(1, 5),
    groups=st.integers(1, 3),
    topk=st.integers(0, 90),
    full=st.booleans(),
    mode=st.sampled_from(["fp32", "bf16"]),
    seed=SEEDS,
)
def test_lists_of_any_length(
    n: int, position: int, window: int, heads: int, groups: int, topk: int, full: bool, mode: Mode, seed: int
) -> None:
    """Windows that are not yet full or no multiple of the block of 64; lists that are empty, short or long."""
    shape = small_shape(n_heads=heads, head_dim=32 * groups, window=window, index_topk=max(topk, 1))
    lists = random_lists(np.random.default_rng(seed), n, 100, topk, full) if topk else None
    case = Case(shape, n, position, lists, seed)
    (got,) = same_on_all_isas(lambda isa: case.run(backend(shape, mode, isa)))
    case.check(got, mode)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("position", [0, 1, 62, 63, 64, 126, 127, 128, 300])
def test_released_width_and_window(position: int, mode: Mode) -> None:
    """Heads of 512 and a window of 128 at the positions where blocks and the window fill up."""
    shape = small_shape(n_heads=2, head_dim=512, rope_dim=64, window=128, index_topk=200)
    lists = random_lists(np.random.default_rng(position), 2, 400, 200, True)
    case = Case(shape, 2, position, lists, position)
    (got,) = same_on_all_isas(lambda isa: case.run(backend(shape, mode, isa)))
    case.check(got, mode)


def test_own_row_only() -> None:
    """Position 0: the output is the own row, weighed against the sink."""
    shape = small_shape()
    case = Case(shape, 1, 0, [[]], 1)
    for isa in ISAS:
        got = case.run(backend(shape, "fp32", isa))
        score = (case.q[0] @ case.window[0]) / 8
        share = 1 / (1 + np.exp(case.sink - score))
        assert_allclose(got[0], share[:, None] * case.window[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sink", [-1e30, -100, 0, 100, 1e30])
def test_sinks_of_any_size(sink: float) -> None:
    """The sink takes no part in the maximum: a huge one takes everything, a tiny one nothing."""
    shape = small_shape()
    case = Case(shape, 2, 30, [[0, 2], []], 2)
    case.sink = np.full(4, sink, np.float32)
    (got,) = same_on_all_isas(lambda isa: case.run(backend(shape, "fp32", isa)))
    assert np.isfinite(got).all()
    if sink >= 100:
        assert np.abs(got).max() < 1e-30
        return
    case.check(got, "fp32")


@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0])
def test_flat_and_sharp_scores(size: float) -> None:
    """Queries of zero give the mean of the rows; large ones pick the best row (scores in the hundreds)."""
    shape = small_shape(window=70, index_topk=70)
    case = Case(shape, 2, 100, random_lists(np.random.default_rng(3), 2, 90, 70, True), 3)
    case.q = formats.bf16_round(case.q * np.float32(size))
    (got,) = same_on_all_isas(lambda isa: case.run(backend(shape, "bf16", isa)))
    case.check(got, "bf16")


def test_odd_rows_of_the_window_are_not_read() -> None:
    """What lies before the window, even NaN codes, does not reach the output."""
    shape = small_shape()
    case = Case(shape, 1, 40, [[1]], 4)
    clean = case.run(backend(shape, "bf16"))
    window = packed("window", case.window)
    window[:25] = 0xFF
    run = backend(shape, "bf16")
    compressed = packed("compressed", case.compressed)
    same_bits(run.attend(40, case.q, window, compressed, case.lists, case.sink, case.cos, case.sin), clean)


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_same_bits_on_all_backends(n: int, mode: str) -> None:
    """Few rows are shared out by heads as well: 6 heads among 1, 2, 3 and 5 threads."""
    shape = small_shape(n_heads=6, head_dim=96, window=50, index_topk=75)
    case = Case(shape, n, 77, random_lists(np.random.default_rng(n), n, 120, 75, False), n)
    same_on_all_backends(shape, mode, case.run)


def test_a_row_does_not_depend_on_its_batch() -> None:
    shape = small_shape(n_heads=3, window=20, index_topk=30)
    case = Case(shape, 6, 10, random_lists(np.random.default_rng(6), 6, 60, 30, False), 6)
    run = backend(shape, "bf16")
    whole = case.run(run)
    for i in range(6):
        same_bits(case.run(run, i, i + 1), whole[i : i + 1])
    same_bits(np.concatenate([case.run(run, 0, 4), case.run(run, 4, 6)]), whole)
