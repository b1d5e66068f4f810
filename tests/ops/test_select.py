"""Index scores, candidate blocks, and the entries that a query reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from tests.golden.compare import bf16_steps
from tests.golden.load import unit
from tests.ref import formats, index, select
from tests.ref.formats import F32, U8, Mode, f32

from .support import ISAS, MODES, OPS, backend, inside, same_bits, same_on_all_backends, small_shape
from .tolerance import index_score_bound

SEEDS = st.integers(0, 2**32 - 1)


def packed_queries(q: F32) -> tuple[np.ndarray, F32]:
    """Fake-quantised queries [n, heads, dim] as the operation takes them: twice the fp4 value, and scale / 4."""
    n, heads, dim = q.shape
    quantised = formats.quantise_q4i(q.reshape(n * heads, dim))
    assert_array_equal(quantised.values, q.reshape(n * heads, dim))
    codes = (2 * formats.e2m1_decode(quantised.codes)).astype(np.int8)
    return codes.reshape(q.shape), f32(quantised.scale / 4).reshape(n, heads, dim // 32)


def packed_keys(k: F32) -> U8:
    """Fake-quantised keys [m, dim] as rows of the cache."""
    packed = OPS.pack(ISAS[0], "index", k)
    assert_array_equal(OPS.unpack(ISAS[0], "index", packed.reshape(-1), k.shape[1]), k)
    return np.asarray(packed)


def chosen(result: dict[str, Any], name: str = "selected") -> list[list[int]]:
    """The valid part of each row of `selected` or `blocks`."""
    counts = result["n_" + name]
    return [[int(e) for e in row[:count]] for row, count in zip(result[name], counts, strict=True)]


def lists(padded: np.ndarray) -> list[list[int]]:
    """Rows without their -1."""
    return [[int(e) for e in row if e >= 0] for row in padded]


def visible_entries(position: int, n: int, ratio: int) -> np.ndarray:
    return (position + np.arange(n) + 1) // ratio


def kept_blocks(scores: F32, visible: np.ndarray, blocks: int, size: int) -> list[list[int]]:
    """The reference's candidate blocks of each row."""
    mask = select.candidate_mask(scores, visible, blocks, size)
    return [sorted({int(e) // size for e in np.nonzero(row)[0]}) for row in mask]


# ---------------------------------------------------------------- scores that are chosen by the test


def keys_with_scores(scores: np.ndarray, dim: int = 32) -> tuple[np.ndarray, F32, F32, U8]:
    """Codes, scales, head weights of one query and packed keys [m], such that entry j scores exactly scores[j].

    The scores are integers within +-255, written in base 4: digits 0..3 are key codes, and the place values 1, 4, 16
    (two elements of 8) and 64 (eight elements of 8) query codes. Two heads of opposite sign undo the rectifier.
    """
    m = len(scores)
    digits = np.abs(scores)[:, None] // np.array([1, 4, 16, 64]) % 4
    values = np.zeros((m, dim))
    values[:, :12] = np.repeat(digits, [1, 1, 2, 8], axis=1) * np.sign(scores)[:, None]
    place = np.zeros(dim)
    place[:12] = [1, 4] + 10 * [8]
    codes = np.stack([place, -place])[None].astype(np.int8)
    quarter_scale = np.full((1, 2, dim // 32), 0.5, np.float32)
    return codes, quarter_scale, f32([[1, -1]]), packed_keys(f32(values))


SCORED: dict[str, Any] = {"index_heads": 2, "index_dim": 32}


def run_scored(shape: dict[str, Any], scores: np.ndarray, position: int, ratio: int, isa: str, **more: Any) -> Any:
    codes, scales, weights, keys = keys_with_scores(scores)
    return backend(shape, "bf16", isa).select(position, ratio, codes, scales, weights, keys, **more)


@given(m=st.integers(1, 60), seed=SEEDS)
def test_chosen_scores_come_out_exactly(m: int, seed: int) -> None:
    scores = np.random.default_rng(seed).integers(-255, 256, m)
    for isa in ISAS:
        got = run_scored(small_shape(**SCORED), scores, m - 1, 1, isa)
        assert_array_equal(got["scores"][0], scores)


def ranks(scores: F32) -> np.ndarray:
    """Integers in the order of the scores: equal scores stay equal, -inf (not visible) gives 0."""
    seen = np.unique(scores[scores > -np.inf] + np.float32(0))
    return np.where(scores > -np.inf, np.searchsorted(seen, scores) - len(seen) // 2, 0)


GOLDEN_BLOCKS = [
    "all_negative",
    "decode",
    "prefill_causal",
    "prefill_ratio2_with_empty_first_row",
    "short_context_keeps_all",
    "ties_all_equal",
    "ties_partial",
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", GOLDEN_BLOCKS)
def test_golden_candidate_blocks(case: str, isa: str) -> None:
    """Only the order of scores matters, so each row is played with integers in the same order."""
    v = unit("candidate_blocks")
    blocks, size = (int(i) for i in v[f"{case}.params"])
    shape = small_shape(**SCORED, candidate_blocks=blocks, candidate_block_size=size)
    for row, visible, mask in zip(v[f"{case}.scores"], v[f"{case}.visible"], v[f"{case}.mask"], strict=True):
        if visible == 0:  # position 0 of a ratio-2 layer: the only place where nothing is visible
            got = run_scored(shape, np.zeros(1, int), 0, 2, isa, candidates="make")
            assert chosen(got) == chosen(got, "blocks") == [[]]
            assert not mask.any()
            continue
        got = run_scored(shape, ranks(row[:visible]), int(visible) - 1, 1, isa, candidates="make")
        (kept,) = chosen(got, "blocks")
        assert kept == sorted({int(e) // size for e in np.nonzero(mask[:visible])[0]})


# ---------------------------------------------------------------- golden layers


def golden_layer(mode: str, phase: str, layer: str) -> tuple[dict[str, np.ndarray], int]:
    """Golden index data of an index layer, and the number of its first position."""
    v = inside(mode)
    names = ("index_q", "index_k", "index_weights", "index_scores", "topk_idxs", "candidate_mask")
    data = {n: v[key] for n in names if (key := f"{phase}.{layer}.{n}") in v}
    return data, 0 if phase == "prefill" else 40 + int(phase[-1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", ["prefill", "decode0", "decode1", "decode3"])
@pytest.mark.parametrize(
    ("layer", "ratio", "keys"), [("L2", 2, "L2"), ("L4", 2, "L2"), ("L5", 1, "L5"), ("L7", 1, "L5")]
)
def test_golden_layers(layer: str, ratio: int, keys: str, phase: str, mode: str, isa: str) -> None:
    """Scores, candidate blocks and lists of all index layers: the first within rounding, the others exact."""
    v, first = golden_layer(mode, phase, layer)
    n, window_rows = len(v["index_q"]), 16 if phase != "prefill" else 40
    key_rows = packed_keys(golden_layer(mode, phase, keys)[0]["index_k"])
    candidates, blocks = "none", None
    if layer == "L5":
        candidates = "make"
    elif layer == "L7":
        source, _ = golden_layer(mode, phase, "L5")
        candidates, blocks = "use", kept_blocks(f32(source["index_scores"]), visible_entries(first, n, 1), 8, 4)
    run = backend(small_shape(), mode, isa)
    codes, scales = packed_queries(v["index_q"])
    got = run.select(first, ratio, codes, scales, v["index_weights"], key_rows, candidates, blocks)
    want = v["index_scores"]
    live = np.isfinite(got["scores"])
    assert_array_equal(live, np.isfinite(want) & (admitted(blocks, want.shape) if blocks is not None else True))
    if mode == "fp32":
        bound = index_score_bound(v["index_q"], golden_layer(mode, phase, keys)[0]["index_k"], v["index_weights"])
        assert (np.abs(got["scores"][live] - want[live]) <= bound[live]).all()
    else:
        distance = bf16_steps(got["scores"][live], want[live])
        assert distance.max(initial=0) <= 1 and (distance > 0).sum() <= 0.01 * live.sum()
    assert chosen(got) == lists(np.where(v["topk_idxs"] < 0, -1, v["topk_idxs"] - window_rows))
    if "candidate_mask" in v:
        seen = v["candidate_mask"] & np.isfinite(want)
        assert chosen(got, "blocks") == [sorted({int(e) // 4 for e in np.nonzero(row)[0]}) for row in seen]


def admitted(blocks: list[list[int]], shape: tuple[int, ...], size: int = 4) -> np.ndarray:
    mask = np.zeros(shape, bool)
    for row, kept in enumerate(blocks):
        for b in kept:
            mask[row, b * size : (b + 1) * size] = True
    return mask


# ---------------------------------------------------------------- random data


def random_index_data(
    n: int, m: int, heads: int, dim: int, rng: np.random.Generator, exact: bool
) -> tuple[F32, F32, F32]:
    """Queries, keys and head weights; with `exact`, of such sizes that every fp32 sum is exact."""

    def fake(*shape: int) -> F32:
        codes = rng.integers(-12, 13, size=shape)
        twice = np.array([0, 1, 2, 3, 4, 4, 6, 6, 8, 8, 8, 12, 12])[np.abs(codes)] * np.sign(codes)
        groups = (*shape[:-1], shape[-1] // 32)
        power = np.exp2(rng.integers(0, 3, size=groups) if exact else rng.integers(-9, 10, size=groups))
        return f32(twice * 0.5 * np.repeat(power, 32, axis=-1))

    weights = f32(rng.integers(-8, 9, (n, heads)) / 8) if exact else formats.bf16_round(rng.normal(size=(n, heads)))
    return fake(n, heads, dim), fake(m, dim), weights


SIZES: dict[str, Any] = {
    "n": st.integers(1, 6),
    "position": st.integers(0, 70),
    "ratio": st.sampled_from([1, 2]),
    "heads": st.integers(1, 6),
    "groups": st.integers(1, 4),
    "topk": st.integers(1, 40),
    "seed": SEEDS,
}


@given(**SIZES, mode=st.sampled_from(["fp32", "bf16"]))
def test_exact_integer_scores(
    n: int, position: int, ratio: int, heads: int, groups: int, topk: int, seed: int, mode: Mode
) -> None:
    """Scores are the reference's bits, and so are the lists: products of codes are integers."""
    rng = np.random.default_rng(seed)
    shape = small_shape(index_heads=heads, index_dim=32 * groups, index_topk=topk)
    visible = visible_entries(position, n, ratio)
    q, k, weights = random_index_data(n, int(visible[-1]) + 1, heads, 32 * groups, rng, exact=True)
    want = index.mask_invisible(index.index_scores(q, k, weights, mode), visible)[:, : visible[-1]]
    codes, scales = packed_queries(q)
    for isa in ISAS:
        got = backend(shape, mode, isa).select(position, ratio, codes, scales, weights, packed_keys(k))
        assert_array_equal(got["scores"], want)
        assert chosen(got) == lists(select.top_k(want, topk))


@given(**SIZES)
def test_scores_of_any_scale_within_the_rounding_bound(
    n: int, position: int, ratio: int, heads: int, groups: int, topk: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = small_shape(index_heads=heads, index_dim=32 * groups, index_topk=topk)
    visible = visible_entries(position, n, ratio)
    q, k, weights = random_index_data(n, int(visible[-1]) + 1, heads, 32 * groups, rng, exact=False)
    want = index.index_scores(q, k, weights, "fp32")[:, : visible[-1]]
    codes, scales = packed_queries(q)
    got = backend(shape, "fp32").select(position, ratio, codes, scales, weights, packed_keys(k))
    live = np.arange(want.shape[1]) < visible[:, None]
    assert_array_equal(got["scores"] > -np.inf, live)
    bound = index_score_bound(q, k, weights)[:, : visible[-1]]
    assert (np.abs(got["scores"][live] - want[live]) <= bound[live]).all()
    assert chosen(got) == lists(select.top_k(got["scores"], topk))


@given(
    n=st.integers(1, 5),
    position=st.integers(0, 120),
    ratio=st.sampled_from([1, 2]),
    topk=st.integers(1, 30),
    blocks=st.integers(1, 12),
    size=st.integers(1, 9),
    seed=SEEDS,
)
def test_candidates_made_and_used(
    n: int, position: int, ratio: int, topk: int, blocks: int, size: int, seed: int
) -> None:
    """One layer makes the blocks; another, with keys of its own, chooses among their entries only."""
    rng = np.random.default_rng(seed)
    shape = small_shape(index_heads=2, index_topk=topk, candidate_blocks=blocks, candidate_block_size=size)
    visible = visible_entries(position, n, ratio)
    first, second = (random_index_data(n, int(visible[-1]) + 1, 2, 32, rng, exact=True) for _ in range(2))
    run = backend(shape, "bf16")

    def select_from(data: tuple[F32, F32, F32], candidates: str, kept: list[list[int]] | None = None) -> dict[str, Any]:
        codes, scales = packed_queries(data[0])
        keys = packed_keys(data[1])
        return dict(run.select(position, ratio, codes, scales, data[2], keys, candidates, kept))

    made = select_from(first, "make")
    own = index.mask_invisible(index.index_scores(*first, "bf16"), visible)[:, : visible[-1]]
    mask = select.candidate_mask(own, visible, blocks, size)
    assert chosen(made, "blocks") == kept_blocks(own, visible, blocks, size)
    assert chosen(made) == lists(select.top_k(own, topk))  # the maker itself sees every visible entry
    used = select_from(second, "use", chosen(made, "blocks"))
    other = index.mask_invisible(index.index_scores(*second, "bf16"), visible)[:, : visible[-1]]
    other = f32(np.where(mask, other, -np.inf))
    assert_array_equal(used["scores"], other)
    assert chosen(used) == lists(select.top_k(other, topk))


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "dim"), [(5, 96), (8, 96), (8, 128), (32, 128), (4, 256)])
def test_same_bits_on_all_backends(mode: str, heads: int, dim: int) -> None:
    """Numbers of heads and dimensions for which instruction sets have ways of their own, and others."""
    rng = np.random.default_rng(9)
    shape = small_shape(index_heads=heads, index_dim=dim, index_topk=20, candidate_blocks=6, candidate_block_size=5)
    q, k, weights = random_index_data(11, 150, heads, dim, rng, exact=False)
    codes, scales = packed_queries(q)
    keys = packed_keys(k)
    made = same_on_all_backends(shape, mode, lambda b: b.select(130, 1, codes, scales, weights, keys, "make"))
    n_blocks, blocks = made[2], made[0]
    kept = [[int(e) for e in row[:count]] for row, count in zip(blocks, n_blocks, strict=True)]
    same_on_all_backends(shape, mode, lambda b: b.select(130, 1, codes, scales, weights, keys, "use", kept))


def spread_values(rng: np.random.Generator, spreads: np.ndarray, middle: int = 0) -> F32:
    """Vectors of 128: the exponents of the scales of one's four groups lie so far apart."""
    count = len(spreads)
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[rng.integers(0, 8, (count, 128))] * rng.choice([-1, 1], (count, 128))
    codes[:, ::32] = 6  # so that the scale of a group is what was meant
    steps = np.zeros((count, 4), int)
    steps[:, 0] = spreads
    steps[:, 1:3] = rng.integers(0, spreads[:, None] + 1, (count, 2))
    return f32(codes * np.repeat(np.exp2(rng.permuted(steps, axis=1) + middle), 32, axis=1))


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize(
    ("query", "key", "middle"),
    [(3, 3, 0), (4, 3, 0), (3, 4, 0), (4, 4, 0), (3, 3, 18), (3, 3, -18), (3, 3, 40), (3, 3, -40)],
)
def test_scales_that_fold_and_scales_that_do_not(mode: str, n: int, query: int, key: int, middle: int) -> None:
    """Heads and keys whose scales lie within a factor of 8, which are summed at once (score_folded.h); some that do
    not; at the ends of the range in which that is exact, and beyond."""
    rng = np.random.default_rng(10 * query + key)
    entries, heads = 1100, 32  # blocks of 16 keys with a rest, more than one piece
    spread_of_heads = np.minimum(rng.integers(0, 4, n * heads), 3)
    spread_of_heads[rng.integers(0, n * heads, 4 * n)] = query
    spread_of_keys = rng.integers(0, 4, entries)
    spread_of_keys[rng.integers(0, entries, 9)] = key
    q = spread_values(rng, spread_of_heads).reshape(n, heads, 128)
    k = spread_values(rng, spread_of_keys, middle)
    weights = formats.bf16_round(rng.normal(size=(n, heads))) if mode == "bf16" else f32(rng.normal(size=(n, heads)))
    weights[0, :3] = [0, -0.0, -1]
    codes, scales = packed_queries(q)
    shape = small_shape(index_heads=heads, index_dim=128, index_topk=40, candidate_blocks=70, candidate_block_size=5)
    keys, position = packed_keys(k), entries - n
    made = same_on_all_backends(shape, mode, lambda b: b.select(position, 1, codes, scales, weights, keys, "make"))
    kept = [[int(e) for e in row[:count]] for row, count in zip(made[0], made[2], strict=True)]
    same_on_all_backends(shape, mode, lambda b: b.select(position, 1, codes, scales, weights, keys, "use", kept))


def test_folded_scales_without_the_instruction_that_rounds() -> None:
    """Processors with byte products but without AVX-512-BF16 round by integers; here they are made believe."""
    tests = "test_scales_that_fold_and_scales_that_do_not"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", tests]
    done = subprocess.run(
        command, env={**os.environ, "DS4_CPU_BF16": "never"}, cwd=Path(__file__).parents[2], capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "." * 32 in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("change", ["weight", "scale", "code"])
def test_numbers_that_cannot_fold_go_another_way(change: str) -> None:
    """A weight or a scale near the ends of the exponents, a code that is none of fp4: the bits of other machines."""
    rng = np.random.default_rng(5)
    codes, scales = packed_queries(spread_values(rng, np.full(8, 2)).reshape(1, 8, 128))
    weights = formats.bf16_round(rng.normal(size=(1, 8)))
    if change == "weight":
        weights[0, 3] = 2.0**-80
    elif change == "scale":
        scales[0, 2] *= 2.0**-70
    else:
        codes[0, 1, 7] = 100
    keys = packed_keys(spread_values(rng, rng.integers(0, 4, 70), -19))
    shape = small_shape(index_heads=8, index_dim=128, index_topk=9)
    same_on_all_backends(shape, "bf16", lambda b: b.select(69, 1, codes, scales, weights, keys))


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(10)
    shape = small_shape(index_heads=3, index_dim=64, index_topk=10)
    q, k, weights = random_index_data(9, 90, 3, 64, rng, exact=False)
    codes, scales = packed_queries(q)
    keys, run = packed_keys(k), backend(shape, "bf16")
    whole = run.select(80, 1, codes, scales, weights, keys)
    for i in range(9):
        one = run.select(80 + i, 1, codes[i : i + 1], scales[i : i + 1], weights[i : i + 1], keys)
        same_bits(one["scores"][0], whole["scores"][i, : 81 + i])
        assert chosen(one)[0] == chosen(whole)[i]


@pytest.mark.parametrize("ratio", [1, 2])
def test_heads_that_are_all_negative_score_zero_and_tie(ratio: int) -> None:
    """Ties at zero go to the lower entries, whether the zero has a sign or not."""
    shape = small_shape(**SCORED, index_topk=4)
    codes, scales, _, keys = keys_with_scores(-np.arange(1, 31))
    weights = f32([[-1, 0]])  # the first head is rectified to 0 and weighted to -0
    for isa in ISAS:
        got = backend(shape, "bf16", isa).select(30 * ratio - 1, ratio, codes, scales, weights, keys)
        assert_array_equal(got["scores"][0], 0)
        assert chosen(got) == [[0, 1, 2, 3]]
