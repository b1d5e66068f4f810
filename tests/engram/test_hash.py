"""The n-gram hash of the extension against golden row numbers and against the reference."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from ds4v41 import _ext
from ds4v41.errors import CheckpointError, OptionError, TokenError
from tests.golden.load import unit
from tests.ref.engram import HashPlan, hash_plans, hash_rows

V, PAD = 400, 2
PLANS = hash_plans([1, 14], V, 500, 4, 3)


def released() -> tuple[_ext.EngramHash, object]:
    """The released constants over an identity token map: golden inputs are compressed ids."""
    golden = unit("engram_released")
    n = int(golden["compressed_ids"].max()) + 1000
    return _ext.EngramHash(
        max_ngram=4,
        n_heads=8,
        token_map=list(range(n)),
        pad=2,
        multipliers=golden["multipliers"].tolist(),
        primes=golden["primes"].reshape(2, 24).tolist(),
        offsets=golden["offsets"].tolist(),
    ), golden


def own(plans: list[HashPlan] = PLANS) -> _ext.EngramHash:
    return _ext.EngramHash(
        max_ngram=4,
        n_heads=3,
        token_map=list(range(V)),
        pad=PAD,
        multipliers=[plan.multipliers.tolist() for plan in plans],
        primes=[plan.primes.ravel().tolist() for plan in plans],
        offsets=[plan.offsets.tolist() for plan in plans],
    )


@pytest.mark.parametrize("masked", [False, True])
def test_golden_rows(masked: bool) -> None:
    hash_, golden = released()
    want = golden["hash_ids_masked" if masked else "hash_ids"]
    for batch, ids in enumerate(golden["compressed_ids"].astype(np.int32)):
        dead = (~golden["token_mask"][batch]).astype(np.uint8) if masked else None
        for table in range(2):
            assert_array_equal(hash_.rows(table, ids, 0, dead), want[batch, :, table])


def test_golden_rows_of_later_steps() -> None:
    hash_, golden = released()
    for batch, ids in enumerate(golden["compressed_ids"].astype(np.int32)):
        later = golden["decode_compressed_ids"][batch].astype(np.int32)
        line = np.concatenate([ids, later])
        for table in range(2):
            want = golden["decode_hash_ids"][batch, :, table]
            assert_array_equal(hash_.rows(table, line, len(ids)), want)
            for i in range(len(later)):  # one by one, with no more history than an n-gram needs
                part = line[len(ids) + i - 3 : len(ids) + i + 1]
                assert_array_equal(hash_.rows(table, part, 3)[0], want[i])


@given(
    tokens=st.lists(st.integers(0, V - 1), min_size=1, max_size=300),
    cuts=st.lists(st.integers(0, 300), max_size=4),
    dead=st.none() | st.integers(0, 2**32),
)
def test_any_split_gives_the_reference_rows(tokens: list[int], cuts: list[int], dead: int | None) -> None:
    ids, hash_ = np.array(tokens, np.int32), own()
    mask = None if dead is None else (np.random.default_rng(dead).random(len(ids)) < 0.2).astype(np.uint8)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for table, plan in enumerate(PLANS):
        want = hash_rows(ids.astype(np.int64), plan, PAD, None if mask is None else mask == 0)
        assert_array_equal(hash_.rows(table, ids, 0, mask), want)
        for begin, end in pairwise(edges):
            first = max(0, begin - 3)
            part = None if mask is None else mask[first:end]
            got = hash_.rows(table, ids[first:end], begin - first, part)
            if mask is None or not mask[max(0, first - 3) : first].any() or first == begin - 3:
                assert_array_equal(got, want[begin:end])


@given(
    prime=st.sampled_from([2, 3, 5, 7, 97, 2**31 - 1, 2**32, 2**40 + 15, 2**61 - 1, 16000057]),
    multipliers=st.tuples(*[st.integers(0, 2**63 - 1)] * 2),
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=20),
)
def test_the_remainder_is_exact_for_any_divisor(prime: int, multipliers: tuple[int, int], tokens: list[int]) -> None:
    """Divisors and products that a released table does not have, up to the full 64 bits."""
    hash_ = _ext.EngramHash(2, 1, list(range(10)), 0, [list(multipliers)], [[prime]], [[7]])
    got = hash_.rows(0, np.array(tokens, np.int32))[:, 0]
    before = [0, *tokens[:-1]]
    for i, (now, back) in enumerate(zip(tokens, before, strict=True)):
        mixed = (now * multipliers[0]) % 2**64 ^ (back * multipliers[1]) % 2**64
        assert got[i] == mixed % prime + 7


def test_bad_input_is_refused() -> None:
    hash_ = own()
    with pytest.raises(TokenError, match="400"):
        hash_.rows(0, np.array([V], np.int32))
    with pytest.raises(OptionError, match="no table 2"):
        hash_.rows(2, np.array([1], np.int32))
    with pytest.raises(OptionError, match="one byte a token"):
        hash_.rows(0, np.array([1, 2], np.int32), 0, np.zeros(1, np.uint8))
    with pytest.raises(CheckpointError, match="expected 4 multipliers and 9 primes"):
        _ext.EngramHash(4, 3, [0], 0, [[1, 3, 5]], [[7] * 9], [[0] * 9])
