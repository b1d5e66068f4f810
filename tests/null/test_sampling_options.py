"""Sampling options: defaults, what is refused and how it is said. No extension needed."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4v41.errors import OptionError
from ds4v41.sampling import MAX_SEED, SamplingParams, fresh_seed, mask_ids


def test_defaults_are_the_model_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.seed is None
    assert params.logit_bias is None
    assert not params.needs_history


def test_none_stands_for_the_default() -> None:
    names = [f.name for f in dataclasses.fields(SamplingParams)]
    assert SamplingParams.from_options(dict.fromkeys(names)) == SamplingParams()


def test_numpy_scalars_become_plain_values() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int32(7): np.float64(1)})  # type: ignore[arg-type]
    assert params == SamplingParams(temperature=0.5, top_k=3, logit_bias={7: 1.0})
    assert type(params.temperature) is float
    assert type(params.top_k) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 1e-5),
        ("temperature", 100),
        ("top_p", 0),
        ("top_p", 1),
        ("min_p", 1),
        ("top_k", 10**9),
        ("seed", 0),
        ("seed", MAX_SEED),
        ("presence_penalty", -2),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 0.01),
        ("logit_bias", {}),
        ("logit_bias", {0: 100, 5: -100.0, 9: -math.inf}),
        ("logprobs", True),
    ],
)
def test_extreme_but_legal(name: str, value: Any) -> None:
    assert getattr(SamplingParams.from_options({name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("temperature", True, "found True"),
        ("temperature", "0.7", "found '0.7'"),
        ("temperature", -0.1, "found -0.1"),
        ("temperature", math.nan, "found nan"),
        ("temperature", math.inf, "found inf"),
        ("temperature", 1e-6, "expected 0 (the likeliest token)"),
        ("temperature", 101, "from 0 to 100"),
        ("top_p", 1.0001, "from 0 to 1"),
        ("top_p", math.nan, "found nan"),
        ("top_k", -1, "0 or None is off"),
        ("top_k", 2.0, "whole number"),
        ("top_k", False, "found False"),
        ("min_p", [0.1], "found list"),
        ("seed", -1, "None for a fresh one"),
        ("seed", MAX_SEED + 1, "expected a whole number"),
        ("seed", 1.5, "found 1.5"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -3, "from -2 to 2"),
        ("repetition_penalty", 0, "from 0.01 to 100"),
        ("logit_bias", [1, 2], "mapping of token id"),
        ("logit_bias", {"7": 1.0}, "found '7'"),
        ("logit_bias", {-1: 1.0}, "found -1"),
        ("logit_bias", {True: 1.0}, "found True"),
        ("logit_bias", {7: 101}, "-inf to ban"),
        ("logit_bias", {7: math.inf}, "found inf"),
        ("logit_bias", {7: math.nan}, "found nan"),
        ("logit_bias", {7: None}, "found NoneType"),
        ("logprobs", 1, "True or False"),
        ("logprobs", "yes", "True or False"),
        ("top_logprobs", 21, "from 0 to 20"),
        ("top_logprobs", 5, "needs logprobs=True"),
    ],
)
def test_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams.from_options({name: value})
    assert name in str(caught.value)
    assert says in str(caught.value)
    with pytest.raises(OptionError):
        SamplingParams(**{name: value})


def test_validate_sees_what_was_smuggled_in() -> None:
    params = SamplingParams()
    params.validate()
    object.__setattr__(params, "top_p", 7.0)
    with pytest.raises(OptionError, match="top_p: expected a number from 0 to 1"):
        params.validate()


def test_all_problems_at_once_with_suggestions() -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams.from_options({"temprature": 1.0, "top_p": 3, "min_p": "x", "zzz": 1})
    text = str(caught.value)
    assert "temprature: unknown option; did you mean temperature?" in text
    assert "top_p: expected a number" in text
    assert "min_p: expected a number" in text
    assert "zzz: unknown option; expected frequency_penalty, logit_bias" in text


@pytest.mark.parametrize(
    ("name", "hint"),
    [("temp", "here it is temperature"), ("repeat_penalty", "repetition_penalty?"), ("stream", "iterate over it")],
)
def test_names_of_other_libraries(name: str, hint: str) -> None:
    with pytest.raises(OptionError, match=f"{name}: unknown option; .*{re.escape(hint)}"):
        SamplingParams.from_options({name: 1.0})


def test_given_bias_is_copied() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 2.0}


def test_fresh_seeds() -> None:
    seeds = {fresh_seed() for _ in range(200)}
    assert len(seeds) == 200
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert max(seeds) > 2**60  # all 64 bits are used
    fresh = SamplingParams().resolved().seed
    assert fresh is not None
    assert SamplingParams().resolved().seed != fresh
    assert SamplingParams(seed=5).resolved().seed == 5


@pytest.mark.parametrize("kind", [list, tuple, set, iter, np.array])
def test_mask_kinds(kind: Any) -> None:
    assert sorted(mask_ids(kind([4, 2]), 5)) == [2, 4]
    assert mask_ids(kind([4, 2]), 5).dtype == np.int32


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_mask_of_booleans(flags: list[bool]) -> None:
    assert mask_ids(flags, len(flags)).tolist() == [i for i, flag in enumerate(flags) if flag]


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        ([], "at least one"),
        ([5], "found 5"),
        ([-1, 2], "found -1"),
        ([2**40], "found 1099511627776"),
        ([1.0], "float64"),
        (["a"], "integers"),
        ("ab", "flat list"),
        (3, "flat list"),
        ([[1]], "flat list"),
        ([1, [2]], "no array"),
        ([True], "5 booleans"),
    ],
)
def test_mask_refused(mask: Any, says: str) -> None:
    with pytest.raises(OptionError, match="mask") as caught:
        mask_ids(mask, 5)
    assert says in str(caught.value)
