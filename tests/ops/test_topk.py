"""The k best scores: higher first, then the lower index; -0 equals 0; minus infinity and NaN are never chosen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from ds4v41 import _ext as EXT
from ds4v41.errors import OptionError
from tests.ref import formats, select
from tests.ref.formats import F32, f32

from .support import ISAS, OPS, SPECIAL, same_on_all_isas
from .tolerance import SMALLEST_NORMAL

INF, NAN = np.inf, np.nan


def expected(scores: F32, k: int) -> np.ndarray:
    """The reference's choice in index order. Subnormal scores are zeros."""
    flushed = np.where(np.abs(scores) < SMALLEST_NORMAL, np.float32(0), scores)
    return np.sort(select.best(flushed, k))


def check(scores: F32, k: int) -> np.ndarray:
    (got,) = same_on_all_isas(lambda isa: OPS.top_k(isa, scores, k))
    assert_array_equal(got, expected(scores, k))
    return got


def killer(n: int) -> F32:
    """An order that makes a median-of-three partition uneven again and again, within one bucket of the histogram."""
    half = n // 2
    x = np.zeros(n)
    for i in range(1, half + 1):
        if i % 2:
            x[i - 1] = i
            if i < n:
                x[i] = half + i
        x[half + i - 1] = 2 * i
    return f32(1 + x / (16 * max(n, 1)))


def one_bucket(order: str, n: int) -> F32:
    """Different scores between 1 and 1.125: the first eleven bits of their keys are the same."""
    step = np.arange(n) / (8 * n)
    patterns = {
        "rising": step,
        "falling": step[::-1],
        "organ pipe": np.minimum(step, step[::-1]),
        "sawtooth": step[np.arange(n) % 97],
        "shuffled": np.random.default_rng(n).permutation(step),
    }
    return f32(1 + patterns[order])


ADVERSARIAL: dict[str, F32] = {
    "all equal": np.full(1000, 3.5, np.float32),
    "all zeros of both signs": np.where(np.arange(500) % 3 == 0, np.float32(-0.0), np.float32(0)),
    "all minus infinity": np.full(300, -INF, np.float32),
    "all plus infinity": np.full(300, INF, np.float32),
    "all NaN": np.full(300, NAN, np.float32),
    "NaN of both signs among small scores": f32([NAN, -3e38, -NAN, -INF, NAN, -1, NAN]),
    "minus infinity and one number": np.where(np.arange(300) == 299, np.float32(-3e38), np.float32(-INF)),
    "subnormals are zeros": f32([1e-40, 0, -1e-40, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, -(2.0**-126)]),
    "largest and smallest": np.tile(f32([3.4e38, -3.4e38, 2.0**-126, -(2.0**-126), 0, -0.0, INF, -INF]), 40),
    "two values": np.where(np.arange(1000) % 7 == 0, np.float32(1), np.float32(0)),
    "neighbours in the last place": np.nextafter(f32([1, 1, 1, 2, 2] * 60), f32([0, 2, 1, 0, 3] * 60)),
    "negative only": -np.arange(1, 700, dtype=np.float32),
    "bf16 steps": formats.bf16_round(np.random.default_rng(1).normal(size=3000)),
    "median of three": killer(2048),
    "one": f32([5]),
    "none": f32([]),
} | {f"one bucket, {o}": one_bucket(o, 1500) for o in ("rising", "falling", "organ pipe", "sawtooth", "shuffled")}


@pytest.mark.parametrize("name", sorted(ADVERSARIAL))
def test_adversarial_scores(name: str) -> None:
    scores = ADVERSARIAL[name]
    n = len(scores)
    for k in sorted({0, 1, 2, 3, n // 3, n // 2, n - 1, n, n + 1, 10 * n + 5} - {-1}):
        check(scores, k)


def test_known_choices() -> None:
    assert_array_equal(check(f32([1, 3, 2, 3, 3]), 2), [1, 3])
    assert_array_equal(check(f32([-0.0, 0, -0.0, 0]), 2), [0, 1])
    assert_array_equal(check(f32([NAN, -INF, -1, NAN, -2]), 4), [2, 4])
    assert_array_equal(check(f32([INF, 1, INF, INF]), 2), [0, 2])
    assert_array_equal(check(f32([-1, 1e-40, 0, -1e-40, -5]), 2), [1, 2])


SCORE = st.one_of(st.floats(width=32), st.sampled_from([float(x) for x in SPECIAL]), st.integers(-2, 2).map(float))


@given(scores=st.lists(SCORE, max_size=120).map(f32), k=st.integers(0, 130))
def test_any_scores(scores: F32, k: int) -> None:
    check(scores, k)


@given(n=st.integers(1, 3000), distinct=st.integers(1, 400), k=st.integers(1, 3100), seed=st.integers(0, 2**32 - 1))
def test_many_ties(n: int, distinct: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(f32(rng.normal(size=distinct))[rng.integers(0, distinct, n)], k)


@pytest.mark.parametrize("k", [1, 512, 2048, 99_999])
def test_long_rows(k: int) -> None:
    rng = np.random.default_rng(k)
    check(formats.bf16_round(rng.normal(size=100_000)), k)
    check(f32(rng.normal(size=100_000)), k)


def test_negative_k_is_refused() -> None:
    with pytest.raises(OptionError, match="must not be negative"):
        OPS.top_k(ISAS[0], f32([1]), -1)


ORDERS = ("normal", "equal", "ascending", "descending", "two values", "runs", "few live", "NaN among them")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("n", "k"), [(4096, 1), (9000, 64), (50_000, 512), (50_001, 2048)])
def test_long_lists(order: str, n: int, k: int) -> None:
    """Lists that are thinned out first, and those for which that does not help."""
    rng = np.random.default_rng(n + k)
    x = f32(rng.normal(size=n))
    scores = {
        "normal": x,
        "equal": np.full(n, -2.5, np.float32),
        "ascending": np.sort(x),
        "descending": np.sort(x)[::-1].copy(),
        "two values": np.where(rng.random(n) < 0.3, np.float32(1), np.float32(0)),
        "runs": np.repeat(np.sort(x)[:: n // 50], n // 50 + 1)[:n].copy(),
        "few live": np.where(rng.random(n) < 0.004, x, np.float32(-INF)),
        "NaN among them": np.where(rng.random(n) < 0.5, x, np.float32(NAN)),
    }[order]
    check(scores, k)


def test_best_scores_in_one_set() -> None:
    """All good scores share a residue, so that the maxima of sets bound nothing."""
    for sets in (1024, 2048):
        scores = f32(np.random.default_rng(sets).normal(size=40 * sets))
        scores[3::sets] += 100
        scores[4::sets] += 50
        check(scores, 256)


def test_select_alone() -> None:
    scores = f32([1, 3, -0.0, 3, -INF, 1e-40, 0])
    assert_array_equal(EXT.select(scores, 2), [1, 3])
    assert_array_equal(EXT.select(scores, 4), [0, 1, 2, 3])  # -0, a subnormal and 0 are equal: the lowest index
    assert_array_equal(EXT.select(scores, 7), [0, 1, 2, 3, 5, 6])  # never minus infinity
    assert_array_equal(EXT.select(scores, 100), [0, 1, 2, 3, 5, 6])
    assert len(EXT.select(f32([]), 3)) == 0
    assert len(EXT.select(scores, 0)) == 0
    for isa in ISAS:
        assert_array_equal(EXT.select(scores, 3, isa), [0, 1, 3])


@given(n=st.integers(1, 9000), k=st.integers(0, 600), seed=st.integers(0, 2**32 - 1))
def test_select_is_a_stable_sort(n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = formats.bf16_round(rng.normal(size=n))
    assert_array_equal(EXT.select(scores, k), np.sort(np.argsort(-scores, kind="stable")[:k]))


@pytest.mark.parametrize("at", [0, 17, 4999])
def test_select_refuses_nan(at: int) -> None:
    scores = np.zeros(5000, np.float32)
    scores[at] = NAN
    with pytest.raises(OptionError, match=f"NaN at index {at} "):
        EXT.select(scores, 3)


def test_select_refuses_what_is_no_number_of_places() -> None:
    with pytest.raises(OptionError, match="expected 0 or more, found -1"):
        EXT.select(f32([1]), -1)
