"""What a store gives up first: pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4v41.errors import OptionError
from ds4v41.kvstore.format import BLOCK, FULL, PAGE, Prefixes
from ds4v41.kvstore.policy import HALF_LIFE, NEWEST, PER_OCTAVE, Item, decayed, off_ladder, victims
from ds4v41.machine import parse_bytes

from .support import tokens


def page(name: int, parent: int, size: int = 10, score: float = 1.0, tick: int = 0, kind: int = PAGE) -> Item:
    return Item(bytes([name]), kind, bytes([parent]), bytes([name]), 0, 1, size, score, tick)


def test_pages_go_leaf_first_and_shared_prefixes_last() -> None:
    # 1 <- 2 <- 3, 1 <- 4; page 1 has the lowest score of all, yet it goes last.
    items = [page(1, 0, score=0.1), page(2, 1), page(3, 2), page(4, 1, score=2)]
    assert [i.id[0] for i in victims(items, 40, (), 0)] == [3, 2, 4, 1]
    assert [i.id[0] for i in victims(items, 15, (), 0)] == [3, 2]
    assert victims(items, 0, (), 0) == []
    assert bytes([3]) not in {i.id for i in victims(items, 99, {bytes([3])}, 0)}


def test_scores_decay_with_uses_not_with_time() -> None:
    assert decayed(8.0, 0, HALF_LIFE) == 4.0
    assert decayed(8.0, 10, 3) == 8.0
    old, young = page(1, 0, score=3, tick=0), page(2, 0, score=1, tick=3 * HALF_LIFE)
    assert [i.id[0] for i in victims([young, old], 10, (), 3 * HALF_LIFE)] == [1]


@given(st.lists(st.integers(1, 300_000), max_size=400))
def test_the_ladder_is_dense_near_the_tip_and_thin_behind(positions: list[int]) -> None:
    tip = max(positions, default=1)
    kept = sorted(set(positions) - set(off_ladder(positions, tip)), reverse=True)
    assert len(kept) <= NEWEST + PER_OCTAVE * 10
    assert kept[:NEWEST] == sorted(set(positions), reverse=True)[:NEWEST]
    assert set(off_ladder(kept, tip)) == set()  # nothing more to do


def test_names_of_prefixes_do_not_depend_on_cuts_and_follow_the_tokens() -> None:
    ids = tokens(3 * BLOCK)
    whole, part = Prefixes(b"r" * 32, ids), Prefixes(b"r" * 32, ids[: BLOCK + 7])
    assert whole.node(BLOCK + 7) == part.node(BLOCK + 7) and whole.node(BLOCK) == whole.start(1)
    changed = ids.copy()
    changed[3] += 1
    other = Prefixes(b"r" * 32, changed)
    assert other.node(3) == whole.node(3)
    for position in (4, BLOCK, BLOCK + 1, 3 * BLOCK):
        assert other.node(position) != whole.node(position)
    assert Prefixes(b"s" * 32, ids).node(9) != whole.node(9)
    assert len({whole.node(p) for p in range(500)}) == 500


def test_sizes() -> None:
    assert parse_bytes("b", "64 GiB") == 64 << 30 and parse_bytes("b", "1.5mb") == 1_500_000
    assert parse_bytes("b", 7) == 7
    assert parse_bytes("b", "0.5 kib") == 512 and parse_bytes("b", "3 B") == 3 and parse_bytes("b", 0) == 0
    for wrong in (0, "0", "0.5", "4 iB", "4 QiB"):
        with pytest.raises(OptionError, match=r"^b: expected bytes"):
            parse_bytes("b", wrong, 1)


def test_frontiers_need_no_followers() -> None:
    items = [page(1, 0), page(2, 1), page(9, 1, kind=FULL, score=0.5)]
    assert [i.id[0] for i in victims(items, 10, (), 0)] == [9]
