"""The sampler of the extension against the float64 reference, and its promises: keyed, exact, order-free draws."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4v41 import _ext
from ds4v41.errors import NumericsError, OptionError, StateError, TokenError
from ds4v41.sampling import Sampler, SamplingParams, child_seed
from tests.ref import sampling as ref

N_VOCAB = 60
N_DRAWS = 20_000


def row(seed: int = 0, n: int = N_VOCAB, spread: float = 2.0) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


def make(options: ref.Options, n_vocab: int = N_VOCAB, **more: Any) -> Any:
    numbers = {k: v for k, v in asdict(options).items() if k != "logit_bias"}
    return _ext.sampling.Sampler(n_vocab, logit_bias=sorted((options.logit_bias or {}).items()), **numbers, **more)


def many(sampler: Any, logits: Any, n: int = N_DRAWS, **row_options: Any) -> Any:
    """Draws that use half the counters by seed and half by position, as sessions do."""
    seeds = np.arange(n, dtype=np.uint64) // np.uint64(100) + np.uint64(2**63)
    positions = np.arange(n, dtype=np.int64) % 100
    return sampler.draw_many(logits, seeds, positions, **row_options)


def chi_square_z(tokens: Any, expected: Any) -> float:
    """Chi-square of counts as a number of standard deviations; tokens expected less than 5 times are one class."""
    n = len(tokens)
    counts = np.bincount(tokens, minlength=expected.size).astype(float)
    assert not counts[expected == 0].any(), "a token was drawn that the filters had removed"
    small = (expected * n < 5) & (expected > 0)
    e = np.append(expected[~small & (expected > 0)], expected[small].sum()) * n
    c = np.append(counts[~small & (expected > 0)], counts[small].sum())
    c, e = c[e > 0], e[e > 0]
    freedom = max(len(e) - 1, 1)
    return float((((c - e) ** 2 / e).sum() - freedom) / math.sqrt(2 * freedom))


# ---------------------------------------------------------------- noise


def test_philox_known_answers() -> None:
    """The vectors that come with Random123, and the reference of these tests against the same."""
    cases = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, expected in cases:
        assert _ext.sampling.philox(counter, key) == expected
        assert ref.philox4x32_10(np.array([counter], np.uint64), (key[0], key[1])).tolist() == [expected]


@pytest.mark.parametrize("position", [0, 1, 2**31, 2**32 + 5, 2**62])
@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_noise_is_gumbel_of_the_counter(seed: int, position: int) -> None:
    tokens = np.arange(4001, dtype=np.int32)
    found = _ext.sampling.noise(seed, position, tokens)
    np.testing.assert_allclose(found, ref.gumbel(seed, position, 4001), rtol=1e-6, atol=2e-7)


def test_noise_has_the_gumbel_distribution() -> None:
    noise = np.sort(_ext.sampling.noise(12345, 7, np.arange(1_000_000, dtype=np.int32)).astype(np.float64))
    cdf = np.exp(-np.exp(-noise))
    steps = np.arange(1, noise.size + 1) / noise.size
    assert np.abs(cdf - steps).max() * math.sqrt(noise.size) < 1.95  # Kolmogorov-Smirnov, p = 0.001
    assert noise[-1] > 11  # the tail is there: a 16-bit uniform would end at 11.8, a 23-bit one near 16.6
    assert abs(noise.mean() - np.euler_gamma) < 0.006


def test_positions_seeds_and_tokens_are_independent() -> None:
    tokens = np.arange(20_000, dtype=np.int32)
    base = _ext.sampling.noise(9, 100, tokens)
    others = [_ext.sampling.noise(s, p, tokens) for s, p in [(9, 101), (9, 0), (10, 100), (100, 9), (9 + 2**32, 100)]]
    others += [np.roll(base, 1), np.roll(base, 4)]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 4.5 / math.sqrt(tokens.size)


# ---------------------------------------------------------------- distributions

FILTERS = {
    "none": ref.Options(),
    "hot": ref.Options(temperature=1.7),
    "cold": ref.Options(temperature=0.3),
    "top_k": ref.Options(top_k=5),
    "top_k=1": ref.Options(top_k=1),
    "top_p": ref.Options(top_p=0.8),
    "min_p": ref.Options(min_p=0.1),
    "top_k, top_p": ref.Options(top_k=12, top_p=0.7, temperature=1.3),
    "all": ref.Options(top_k=20, top_p=0.95, min_p=0.02, temperature=0.9),
    "bias": ref.Options(logit_bias={0: 5.0, 3: -math.inf, 7: 2.5}),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_chi_square_of_each_filter(name: str, spread: float) -> None:
    logits = row(3, spread=spread)
    expected = ref.distribution(ref.adjust(logits, FILTERS[name]), FILTERS[name])
    assert chi_square_z(many(make(FILTERS[name]), logits), expected) < 5


def test_chi_square_notices_a_wrong_distribution() -> None:
    logits = row(3)
    wrong = ref.distribution(ref.adjust(logits, ref.Options(temperature=1.05)), ref.Options(temperature=1.05))
    assert chi_square_z(many(make(ref.Options()), logits), wrong) > 5


def test_top_k_3_never_draws_another_token() -> None:
    logits = row(1, n=1000, spread=0.3)
    drawn = many(make(ref.Options(top_k=3), 1000), logits)
    assert set(drawn.tolist()) == set(np.argsort(-logits)[:3].tolist())


def test_consecutive_draws_are_independent() -> None:
    """A generator that forgets its position draws the same token again and again."""
    logits = np.zeros(2, np.float32)
    sampler = make(ref.Options(), 2)
    bits = sampler.draw_many(logits, np.full(N_DRAWS, 4, np.uint64), np.arange(N_DRAWS, dtype=np.int64)) - 0.5
    for lag in (1, 2, 3, 4, 64):
        assert abs(np.mean(bits[lag:] * bits[:-lag]) * 4) < 4.5 / math.sqrt(N_DRAWS)
    assert abs(bits.mean()) * 2 < 4.5 / math.sqrt(N_DRAWS)


def test_flat_large_vocabulary_has_no_favourites() -> None:
    """Coarse noise ties at its upper end and the lower id wins: the mean id would sink."""
    n_vocab, n = 129_280, 1500
    seeds = np.arange(n, dtype=np.uint64)
    drawn = make(ref.Options(), n_vocab).draw_many(np.zeros(n_vocab, np.float32), seeds, np.zeros(n, np.int64))
    uniform = drawn / n_vocab
    assert abs(uniform.mean() - 0.5) < 4.5 / math.sqrt(12 * n)
    assert len(set(drawn.tolist())) > n - 40


# ---------------------------------------------------------------- exactness


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ref.Options, int]:
    n_vocab = draw(st.sampled_from([1, 2, 5, 63, 64, 65, 130, 1000, 4097]))
    spread = draw(st.sampled_from([0.01, 1.0, 4.0, 30.0]))
    logits = row(draw(st.integers(0, 99)), n_vocab, spread)
    if draw(st.booleans()):
        logits = np.round(logits)  # many equal logits
    if draw(st.booleans()):
        logits[draw(st.integers(0, n_vocab - 1)) :: 3] = -np.inf
    if not np.isfinite(logits).any():
        logits[0] = 1.0
    options = ref.Options(
        temperature=draw(st.sampled_from([0.0, 1e-5, 0.1, 0.7, 1.0, 2.0, 100.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 3, 50, 200, 10**9])),
        top_p=draw(st.sampled_from([0.0, 1e-6, 0.3, 0.95, 0.999, 1.0])),
        min_p=draw(st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0])),
    )
    return logits, options, draw(st.integers(0, 2**64 - 1))


def close_call(adjusted: Any, options: ref.Options) -> bool:
    """Whether a filter's limit is so near a token that rounding may decide."""
    if options.temperature == 0:
        return False
    weights = np.sort(np.exp((adjusted - adjusted.max()) / options.temperature))[::-1]
    kept = weights[: options.top_k] if options.top_k else weights
    share = np.cumsum(kept) / kept.sum()
    near_p = options.top_p < 1 and bool((np.abs(share - options.top_p) < 2e-6).any())
    near_min = options.min_p > 0 and bool((np.abs(weights / options.min_p - 1) < 1e-5)[weights < 1].any())
    return near_p or near_min


@given(cases())
def test_every_draw_equals_the_reference(case: tuple[Any, ref.Options, int]) -> None:
    logits, options, seed = case
    adjusted = ref.adjust(logits, options)
    wide, plain = make(options, logits.size), make(options, logits.size, plain=True)
    for position in (0, 77):
        token, _, _, n_kept = found = wide.draw(logits, seed, position)
        assert found == plain.draw(logits, seed, position)
        if close_call(adjusted, options):
            continue
        assert n_kept == np.count_nonzero(ref.kept(adjusted, options))
        expected, margin = ref.draw(adjusted, options, seed, position)
        assert token == expected or margin < 1e-4


def test_large_vocabulary_equals_the_reference() -> None:
    """Whole rows of the real size, where blocks are skipped and partial selection pays."""
    choices = [ref.Options(), ref.Options(top_p=0.95), ref.Options(top_k=2500, min_p=1e-3), ref.Options(top_k=40)]
    for seed, spread in enumerate([0.01, 0.1, 2.0, 4.0]):
        logits = row(seed, 129_280, spread)
        logits[1000] += 13 if spread == 0.1 else 0  # one likely token, and a quarter of the probability far below it
        for options in choices:
            adjusted = ref.adjust(logits, options)
            found = [make(options, logits.size, plain=plain).draw(logits, seed, 5) for plain in (False, True)]
            assert found[0] == found[1]
            expected, margin = ref.draw(adjusted, options, seed, 5)
            assert found[0][0] == expected or margin < 1e-4
            n_expected = np.count_nonzero(ref.kept(adjusted, options))
            n_close = n_expected // 10_000 if options.top_p < 1 or options.min_p > 0 else 0  # rounding may decide those
            assert abs(found[0][3] - n_expected) <= n_close


def test_draws_depend_on_nothing_else() -> None:
    """Same inputs, same draw: after other draws, in a new sampler, in one call for many, and from other threads."""
    rows = [row(i, 500) for i in range(8)]
    options = ref.Options(temperature=0.8, top_p=0.9)
    sampler = make(options, 500)
    once = [sampler.draw(rows[i], 3, i)[0] for i in range(8)]
    assert [sampler.draw(rows[i], 3, i)[0] for i in reversed(range(8))] == once[::-1]
    assert [make(options, 500).draw(rows[i], 3, i)[0] for i in range(8)] == once
    assert [sampler.draw_many(rows[i], np.array([3], np.uint64), np.array([i]))[0] for i in range(8)] == once
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda i: sampler.draw(rows[i % 8], 3, i % 8)[0], range(400)))
    assert again == once * 50


def test_frozen_draws() -> None:
    """The stream is a promise: these tokens must never change. Logits are exact in binary, so nothing else enters."""
    logits = ((np.arange(1000, dtype=np.int64) * 7919) % 256).astype(np.float32) / 32
    seeds, positions = np.full(12, 2026, np.uint64), np.arange(12)
    for options, tokens in zip((ref.Options(), ref.Options(top_k=30)), FROZEN, strict=True):
        assert make(options, 1000).draw_many(logits, seeds, positions).tolist() == tokens
        assert [ref.draw(ref.adjust(logits, options), options, 2026, int(p))[0] for p in positions] == tokens


FROZEN = [
    [678, 242, 412, 603, 606, 678, 544, 111, 272, 397, 904, 788],
    [678, 437, 392, 166, 678, 678, 437, 753, 241, 979, 663, 437],
]


# ---------------------------------------------------------------- greedy, extremes


def test_temperature_zero_is_the_first_maximum() -> None:
    logits = row(5)
    logits[[11, 30, 59]] = logits.max() + 1
    for options in (ref.Options(temperature=0), ref.Options(temperature=0, top_k=7, top_p=0.1, min_p=0.5)):
        drawn = many(make(options), logits, 500)
        assert set(drawn.tolist()) == {11}
        assert make(options).draw(logits, 1, 2)[3] == 1
    for options in (ref.Options(top_k=1), ref.Options(top_p=0), ref.Options(temperature=50, top_k=1)):
        assert set(many(make(options), logits, 500).tolist()) == {11}


def test_signed_zeros_and_subnormals_are_equal() -> None:
    logits = np.array([-0.0, 1e-42, 0.0, -1e-42], np.float32)
    assert make(ref.Options(temperature=0), 4).draw(logits, 0, 0)[0] == 0
    assert make(ref.Options(top_k=2), 4).draw(logits, 0, 0)[3] == 2
    assert set(many(make(ref.Options(top_k=2), 4), logits, 200).tolist()) == {0, 1}


def test_min_p_1_keeps_all_equal_maxima() -> None:
    logits = np.array([3, 1, 3, 3, 2], np.float32)
    sampler = make(ref.Options(min_p=1.0), 5)
    assert sampler.draw(logits, 0, 0)[3] == 3
    assert set(many(sampler, logits, 300).tolist()) == {0, 2, 3}


def test_top_p_takes_the_token_that_crosses_and_lower_ids_first() -> None:
    logits = np.zeros(10, np.float32)
    for top_p, kept in [(0.1, 1), (0.11, 2), (0.3, 3), (0.5, 5), (0.95, 10)]:
        sampler = make(ref.Options(top_p=top_p), 10)
        assert sampler.draw(logits, 0, 0)[3] == kept
        assert set(many(sampler, logits, 2000).tolist()) == set(range(kept))


def test_top_p_counts_within_top_k() -> None:
    logits = np.log(np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.1])).astype(np.float32)
    assert make(ref.Options(top_p=0.55), 6).draw(logits, 0, 0)[3] == 3
    assert make(ref.Options(top_p=0.55, top_k=2), 6).draw(logits, 0, 0)[3] == 1  # 0.3 is 60 % of what top_k left


# ---------------------------------------------------------------- penalties, bias, mask

tokens_st = st.lists(st.integers(0, 19), max_size=30)


@given(
    prompt=tokens_st,
    generated=tokens_st,
    allowed=st.none() | st.sets(st.integers(0, 19), min_size=1),
    bias=st.dictionaries(st.integers(0, 19), st.sampled_from([-100.0, -1.5, 0.25, 3.0, 100.0, -math.inf]), max_size=4),
    penalties=st.tuples(
        st.sampled_from([-2.0, 0.0, 0.6]), st.sampled_from([-2.0, 0.0, 0.3]), st.sampled_from([0.5, 1.0, 1.3])
    ),
    seed=st.integers(0, 1000),
)
def test_penalties_bias_and_mask_against_the_reference(
    prompt: list[int], generated: list[int], allowed: Any, bias: Any, penalties: tuple[float, float, float], seed: int
) -> None:
    logits = row(seed, 20)
    presence, frequency, repetition = penalties
    options = ref.Options(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=bias
    )
    history = _ext.sampling.TokenHistory(20)
    history.add_prompt(np.array(prompt, np.int32))
    history.add(np.array([*generated, 3, 3, 5], np.int32))
    history.drop(3)  # rejected drafts leave no trace
    adjusted = ref.adjust(logits, options, prompt, generated, None if allowed is None else sorted(allowed))
    mask = None if allowed is None else np.array(sorted(allowed), np.int32)
    sampler = make(options, 20)
    if not np.isfinite(adjusted).any():
        with pytest.raises(OptionError, match="no token is left"):
            sampler.draw(logits, seed, 0, history, mask)
        return
    for position in range(3):
        token, _, _, n_kept = sampler.draw(logits, seed, position, history, mask)
        expected, margin = ref.draw(adjusted, options, seed, position)
        assert token == expected or margin < 1e-4
        assert n_kept == np.isfinite(adjusted).sum()
    greedy = make(ref.Options(**{**asdict(options), "temperature": 0.0}), 20).draw(logits, seed, 0, history, mask)[0]
    assert adjusted[greedy] >= adjusted.max() - 1e-5


def test_penalties_need_a_history() -> None:
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        sampler = _ext.sampling.Sampler(5, **{name: 1.5})
        assert sampler.needs_history
        with pytest.raises(OptionError, match="need the token history"):
            sampler.draw(np.zeros(5, np.float32), 0, 0)
    assert not _ext.sampling.Sampler(5, temperature=0.5, top_k=2).needs_history


def test_history_refuses_and_copies() -> None:
    history = _ext.sampling.TokenHistory(10)
    history.add(np.array([1, 2], np.int32))
    other = history.copy()
    other.add(np.array([3], np.int32))
    assert (history.n_generated, other.n_generated) == (2, 3)
    with pytest.raises(TokenError, match="found 10 at index 1"):
        history.add(np.array([1, 10], np.int32))
    assert history.n_generated == 2  # nothing of a refused call stays
    with pytest.raises(StateError, match="cannot drop 3"):
        history.drop(3)
    with pytest.raises(OptionError, match="history of 5 tokens"):
        _ext.sampling.Sampler(5).draw(np.zeros(5, np.float32), 0, 0, history)


# ---------------------------------------------------------------- log probabilities


@pytest.mark.parametrize("n_vocab", [1, 50, 129_280])
def test_logprobs_are_of_the_raw_logits(n_vocab: int) -> None:
    logits = row(4, n_vocab, 3.0)
    logits[: n_vocab // 10] = np.round(logits[: n_vocab // 10])
    top = min(20, n_vocab)
    expected = ref.log_softmax(logits)
    options = ref.Options(temperature=0.5, top_k=5, logit_bias={0: 3.0})
    token, logprob, found, _ = make(options, n_vocab, logprobs=True, top_logprobs=top).draw(logits, 1, 2)
    assert abs(logprob - expected[token]) < 2e-5
    order = np.lexsort((np.arange(n_vocab), -logits))[:top]
    assert [t for t, _ in found] == order.tolist()
    np.testing.assert_allclose([p for _, p in found], expected[order], atol=2e-5)
    assert make(options, n_vocab).draw(logits, 1, 2)[:3] == (token, None, ())


# ---------------------------------------------------------------- bad input, the Python face


@pytest.mark.parametrize("position", [0, 123_456])
def test_nan_and_infinity_name_the_place(position: int) -> None:
    logits = row(0, 200)
    logits[[17, 150]] = np.nan
    for options in (ref.Options(), ref.Options(temperature=0)):
        with pytest.raises(NumericsError, match=f"position {position}: 2 of 200 are NaN, the first is token 17"):
            make(options, 200).draw(logits, 0, position)
    logits[[17, 150]] = 0, np.inf
    with pytest.raises(NumericsError, match=r"1 of 200 are \+infinity, the first is token 150"):
        make(ref.Options(), 200).draw(logits, 0, position)
    with pytest.raises(NumericsError, match="all 200 are -infinity"):
        make(ref.Options(), 200).draw(np.full(200, -np.inf, np.float32), 0, position)


def test_nothing_left_is_an_option_error() -> None:
    sampler = make(ref.Options(logit_bias={1: -math.inf, 2: -math.inf}), 5)
    with pytest.raises(OptionError, match="position 9: no token is left"):
        sampler.draw(np.zeros(5, np.float32), 0, 9, None, np.array([1, 2], np.int32))
    with pytest.raises(OptionError, match="no token is left"):
        sampler.draw(np.zeros(5, np.float32), 0, 9, None, np.array([], np.int32))


def test_wrong_rows_are_refused() -> None:
    sampler = Sampler(SamplingParams(), 5)
    for wrong in (np.zeros(4, np.float32), np.zeros((1, 5), np.float32), np.zeros(5), np.zeros(5, np.int64)):
        with pytest.raises(OptionError, match=r"logits: expected float32 of shape \(5,\)"):
            sampler.draw(wrong, 0)
    with pytest.raises(OptionError, match="position: expected 0 or more"):
        sampler.draw(np.zeros(5, np.float32), -1)
    with pytest.raises(OptionError, match="mask: expected token ids 0 to 4, found 5"):
        sampler.draw(np.zeros(5, np.float32), 0, allowed=[0, 5])
    with pytest.raises(OptionError, match="expected 5 values"):
        make(ref.Options(), 5).draw(np.zeros(6, np.float32), 0, 0)
    with pytest.raises(TypeError):
        make(ref.Options(), 5).draw(np.zeros(5), 0, 0)  # float64 is not rounded in silence


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": 1e-7},
        {"top_k": -1},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"presence_penalty": 3.0},
        {"frequency_penalty": math.inf},
        {"repetition_penalty": 0.0},
        {"top_logprobs": 6},
        {"logit_bias": [(5, 1.0)]},
        {"logit_bias": [(0, math.nan)]},
    ],
)
def test_the_extension_checks_for_itself(options: Any) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        _ext.sampling.Sampler(5, **options)


def test_the_python_sampler() -> None:
    params = SamplingParams(logprobs=True, top_logprobs=4, presence_penalty=0.5, temperature=0.7)
    sampler = Sampler(params, 50)
    assert 0 <= sampler.seed < 2**64
    history = sampler.new_history([1, 2])
    logits = row(8, 50)
    drawn = sampler.draw(logits, 3, history=history, allowed=range(10))
    again = Sampler(replace(params, seed=sampler.seed), 50)
    assert again.draw(logits, 3, history=history, allowed=np.arange(50) < 10) == drawn
    assert drawn.token < 10
    assert drawn.n_kept == 10
    assert drawn.logprob is not None
    assert len(drawn.top_logprobs) == 4
    strided = row(8, 100)[::2]
    assert sampler.draw(strided.copy(), 3, history=history) == sampler.draw(strided, 3, history=history)
    with pytest.raises(OptionError, match="logit_bias: expected token ids 0 to 49, found 50, 99"):
        Sampler(SamplingParams(logit_bias={99: 1.0, 50: 1.0, 3: 1.0}), 50)
    for prompt in ([50], [-1], [2**40], [[1]], [0.5]):
        with pytest.raises(TokenError, match="prompt: expected"):
            sampler.new_history(prompt)


@pytest.mark.parametrize("plain", [False, True])
def test_the_chance_of_the_likeliest_token(plain: bool) -> None:
    """At temperature 1, after bias and mask, whatever is drawn; asking for it changes no token."""
    bias = {3: 5.0, 7: -math.inf}
    allowed = np.arange(0, N_VOCAB, 2, dtype=np.int32)
    for options in (ref.Options(temperature=0.0), ref.Options(temperature=1.7, top_k=5), ref.Options(logit_bias=bias)):
        sampler = make(options, plain=plain)
        for seed in range(20):
            logits = row(seed)
            for mask in (None, allowed):
                z = logits.astype(np.float64)
                for token, value in (options.logit_bias or {}).items():
                    z[token] += value
                z = z if mask is None else z[mask]
                drawn = sampler.draw(logits, seed, 5, None, mask, True)
                assert drawn[:4] == sampler.draw(logits, seed, 5, None, mask)
                assert drawn[4] == pytest.approx(1 / np.exp(z - z.max()).sum(), rel=1e-5)


def test_child_seeds_differ_and_draw_other_tokens() -> None:
    seeds = [child_seed(s, i) for s in (0, 1, 2**63) for i in range(100)]
    assert len(set(seeds)) == 300
    assert child_seed(7, 3) == child_seed(7, 3)
    logits = row(2, 500, 1.0)
    sampler = make(ref.Options(), 500)
    positions = np.arange(200)
    parent, child = (sampler.draw_many(logits, np.full(200, s, np.uint64), positions) for s in (7, child_seed(7, 0)))
    assert (parent == child).mean() < 0.1
