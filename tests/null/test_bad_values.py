"""What callers hand over by mistake: every message names the option, and no value can break the message itself."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4v41.checks import choice, path_of, positive_int, token_ids
from ds4v41.errors import ChatError, ManifestError, OptionError, TokenError, shown
from ds4v41.machine import parse_bytes
from ds4v41.manifest import find_manifests, read_manifest
from ds4v41.sampling import SamplingParams

ENDLESS = 10**5000  # Python makes no text of a number this long


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Pathless:
    def __fspath__(self) -> Any:
        raise ZeroDivisionError("no")


class BytesPath:
    def __fspath__(self) -> Any:
        return b"/tmp"


def test_a_message_survives_every_value() -> None:
    assert shown(3) == "3" and shown("a\n") == r"'a\n'"
    assert shown(ENDLESS) == "a value of type int"
    assert shown(Unspeakable()) == "a value of type Unspeakable"
    long = shown("x" * 10**6)
    assert len(long) < 300 and "1,000,002 characters" in long


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -1, 1.0, "1", ENDLESS, -ENDLESS, Unspeakable(), np.float64(1), []],
    ids=lambda v: type(v).__name__,
)
def test_no_integer(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^n: expected"):
        positive_int("n", value)


@pytest.mark.parametrize(
    "value", [None, 3, "c", Unspeakable(), ENDLESS, np.array([1, 2]), {}], ids=lambda v: type(v).__name__
)
def test_no_choice(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^n: expected one of a, b"):
        choice("n", value, ("a", "b"))


@pytest.mark.parametrize(
    "value",
    [None, 3, b"/tmp", "", "a\0b", "\ud800", "~nobody-of-this-name/x", "x" * 5000, BytesPath(), Pathless()],
    ids=lambda v: type(v).__name__,
)
def test_no_path(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^where: "):
        path_of("where", value)


def test_a_path(tmp_path: Path) -> None:
    assert path_of("where", "~/x") == Path(os.path.expanduser("~")) / "x"
    assert path_of("where", tmp_path / "not" / "there") == tmp_path / "not" / "there"
    odd = os.fsdecode(b"n\xff")  # no UTF-8, and yet the name of a file
    assert path_of("where", odd) == Path(odd)


@pytest.mark.parametrize(
    "value",
    ["9" * 400 + " GiB", "99999999999 TiB", ENDLESS, -1, 1.5, True, None, "x", "-1 GiB"],
    ids=lambda v: type(v).__name__,
)
def test_no_size(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^budget: expected bytes"):
        parse_bytes("budget", value)


def test_a_size_may_be_a_number_of_numpy() -> None:
    assert parse_bytes("b", np.int64(5)) == 5


@pytest.mark.parametrize("value", [10**400, -ENDLESS, Fraction(10**400), ENDLESS], ids=lambda v: type(v).__name__)
def test_numbers_beyond_every_float(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^temperature: expected a number"):
        SamplingParams(temperature=value)
    with pytest.raises(OptionError, match=r"^logit_bias\[1\]: expected a number"):
        SamplingParams(logit_bias={1: value})
    if isinstance(value, int):
        with pytest.raises(OptionError, match=r"^top_logprobs: expected a whole number"):
            SamplingParams(top_logprobs=value)


@pytest.mark.parametrize(
    "value",
    [[ENDLESS], [2**70], ["1"], [None], [[1], [2, 3]], 5, {1: 2}, [1.5], [True]],
    ids=lambda v: type(v).__name__,
)
def test_no_tokens(value: Any) -> None:
    with pytest.raises(TokenError, match=r"^tokens: expected"):
        token_ids(value, 100)


def test_messages_that_cannot_be_walked() -> None:
    from ds4v41.chat import render

    for value in (np.array(3), 3, None, "text"):
        with pytest.raises(ChatError, match="expected a list of messages"):
            render(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "", "[" * 200_000, '{"ds4v41_manifest": 1, "fixtures": ' + "[" * 100_000, "1" * 100_000, '"\\ud800"', "{}",
        '{"ds4v41_manifest": 1, "fixtures": [{"name": "n", "checkpoint": "nano", "activations": [], "prompt": '
        '{"tokens": [99999999999]}, "n_tokens": 1, "sampling": {"temperature": 0}}]}',
    ],
)  # fmt: skip
def test_no_manifest(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(ManifestError, match=r"m\.json: "):
        read_manifest(path)
    with pytest.raises(ManifestError):
        find_manifests([tmp_path / "m.json" / "x"])
