"""Stop strings: nothing leaks, nothing is lost, however the text is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4v41.errors import OptionError
from ds4v41.stops import StopMatcher

LETTERS = "ab🙂"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first place where a stop string is complete, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        text, hit = matcher.push(piece)
        shown.append(text)
        if hit is not None:
            break
    else:
        shown.append(matcher.flush())
    return shown, matcher.hit


@given(st.lists(st.text(LETTERS, max_size=5), max_size=12), STOPS)
def test_like_the_naive_search(pieces: list[str], stops: list[str]) -> None:
    shown, hit = run(pieces, stops)
    assert ("".join(shown), hit) == naive("".join(pieces), stops)


@given(st.text(LETTERS, max_size=30), STOPS)
def test_text_is_not_held_longer_than_needed(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    for character in text:
        if matcher.push(character)[1] is not None:
            break
        assert not matcher.held or any(s.startswith(matcher.held) and s != matcher.held for s in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "hit"),
    [
        (["END", "x"], ["END"], "", "END"),  # at the very start
        (["some E", "N", "D more"], ["END"], "some ", "END"),  # over three pieces
        (["E", "N", "d"], ["END"], "ENd", None),  # nearly
        (["abcd"], ["abcd", "c"], "ab", "c"),  # the first to be complete
        (["xabc"], ["c", "abc"], "x", "abc"),  # both complete at once: the longest
        (["aaab"], ["aab"], "a", "aab"),  # overlaps with itself
        (["\n", "\n", "rest"], ["\n\n"], "", "\n\n"),
        (["a", "b"], [], "ab", None),
    ],
)
def test_examples(pieces: list[str], stops: list[str], shown: str, hit: str | None) -> None:
    texts, found = run(pieces, stops)
    assert ("".join(texts), found) == (shown, hit)


def test_after_a_hit() -> None:
    matcher = StopMatcher("END")
    assert matcher.push("aEND tail") == ("a", "END")
    assert matcher.push("more") == ("", "END")
    assert matcher.flush() == "" and matcher.held == ""


@pytest.mark.parametrize("bad", [[""], ["a", ""], "", [3], 7, None, b"x", {"a"}])
def test_refused(bad: Any) -> None:
    if bad == "":
        bad = [bad]
    with pytest.raises(OptionError, match="stop"):
        StopMatcher(bad)
