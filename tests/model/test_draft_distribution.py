"""Sampling through a drafter: the distribution is the target's, and drafts hold as often as their coupling says.

Seeds are fixed, so every run gives the same numbers; the stated false-alarm chances are those of another choice of
seeds for a program without a fault.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4v41.drafter import Drafter
from ds4v41.generation import GenerationOptions, TokenStream
from ds4v41.model import Model
from ds4v41.sampling import Sampler, SamplingParams
from tests.golden import load

PROMPT = [5, 6, 7, 300, 11]
FILTERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 4},
    "top_p, hot": {"top_k": 5, "top_p": 0.9, "temperature": 1.5},
    "bias and penalties": {"top_k": 4, "logit_bias": {9: 4.0, 11: -2.0}, "presence_penalty": 1.0},
}
MOST_Z = 5.0
"""Chi-square as standard deviations above its mean. For the 15 to 124 degrees of freedom here the chance that a right
sampler exceeds it is below 1e-4 for each test (Wilson and Hilferty)."""


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[Model, Drafter]]:
    with Model.open(load.checkpoint_folder("fp8fp4"), threads=1) as model:
        yield model, Drafter.open(None, model)


def distribution(row: NDArray[np.float32], options: dict[str, Any], text: list[int]) -> dict[int, float]:
    """Token -> probability, in float64 from the raw logits: penalties, bias, temperature, top_k, top_p."""
    z = row.astype(np.float64)
    for token in set(text):
        z[token] -= options.get("presence_penalty", 0.0)
    for token, bias in options.get("logit_bias", {}).items():
        z[token] += bias
    order = np.lexsort((np.arange(len(z)), -z))[: options["top_k"]]
    p = np.exp((z[order] - z[order[0]]) / options.get("temperature", 1.0))
    p /= p.sum()
    n = int(np.searchsorted(np.cumsum(p), options.get("top_p", 1.0) - 1e-9)) + 1
    p = p[:n] / p[:n].sum()
    return dict(zip(order[:n].tolist(), p.tolist(), strict=True))


def chi_square_z(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Cells expected less than 5 times are one."""
    n = sum(counts.values())
    assert set(counts) <= set(expected), "a token came that the filters had removed"
    large = [cell for cell, p in expected.items() if p * n >= 5]
    rest = 1 - sum(expected[cell] for cell in large)
    pairs = [(counts[cell], expected[cell] * n) for cell in large]
    if rest * n >= 5:
        pairs.append((n - sum(counts[cell] for cell in large), rest * n))
    freedom = len(pairs) - 1
    return (sum((c - e) ** 2 / e for c, e in pairs) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("name", FILTERS)
def test_texts_drawn_through_a_drafter_have_the_targets_distribution(tiny: tuple[Model, Drafter], name: str) -> None:
    """Three tokens at a time: the first comes out of the prefill, the second out of a verify step, the third out of the
    same step or, after a rejected draft, out of the next."""
    model, drafter = tiny
    options, n = FILTERS[name], 800
    expected: dict[tuple[int, ...], float] = {}
    with model.session(64) as plain:
        first = plain.advance_to(np.array(PROMPT, np.int32)).copy()
        for a, p in distribution(first, options, []).items():
            second = plain.advance_to(np.array([*PROMPT, a], np.int32)).copy()
            for b, q in distribution(second, options, [a]).items():
                third = plain.advance_to(np.array([*PROMPT, a, b], np.int32))
                for c, r in distribution(third, options, [a, b]).items():
                    expected[a, b, c] = p * q * r
    assert abs(sum(expected.values()) - 1) < 1e-9
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = held = 0
    with model.session(64, drafter=drafter) as session:
        for seed in range(n):
            given = {"temperature": 1.0, **options, "seed": seed, "max_tokens": 3, "drafting": 5}
            stream = TokenStream(session, np.array(PROMPT, np.int32), GenerationOptions.from_options(given, model))
            counts[tuple(draw.token for draw, _ in stream)] += 1
            assert session.stats.drafter is not None
            drafted += session.stats.drafter.drafted
            held += session.stats.drafter.accepted
    assert 0.02 * drafted < held < 0.98 * drafted  # both outcomes are part of the test
    assert abs(chi_square_z(counts, expected)) < MOST_Z


def test_the_test_notices_the_drafters_distribution(tiny: tuple[Model, Drafter]) -> None:
    """Taking drafts as they are, which a broken acceptance would do, is far outside."""
    model, drafter = tiny
    options = FILTERS["top_k"]
    with model.session(64, drafter=drafter) as session:
        session.prefill(PROMPT)
        session._ext.draft_start(9, 1)
        guess = session._ext.draft_row(0, 9)[0]
        p = distribution(session.step([9])[0], options, [])
    sampler = Sampler(SamplingParams(**options, seed=1), model.config.vocab_size)
    drafts = sampler.handle.draw_many(guess, np.arange(1500, dtype=np.uint64), np.full(1500, 6, np.int64))
    drafts = [t if t in p else next(iter(p)) for t in drafts.tolist()]
    assert chi_square_z(Counter((t,) for t in drafts), {(t,): chance for t, chance in p.items()}) > 3 * MOST_Z


# ---- acceptance --------------------------------------------------------------------------------------------------


def gumbel_coupling(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """P(argmax(log p + g) = argmax(log q + g)) for one Gumbel vector g: docs/sampling.md derives it."""
    keep = (p > 0) & (q > 0)
    with np.errstate(divide="ignore"):
        ratios = np.maximum(p[None, :] / p[keep, None], q[None, :] / q[keep, None])
    return float((1 / ratios.sum(axis=1)).sum())


def chances(row: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    z = row.astype(np.float64) / temperature
    p = np.exp(z - z.max())
    return np.asarray(p / p.sum())


def test_the_coupling_is_what_its_formula_says(tiny: tuple[Model, Drafter]) -> None:
    """Drafter against target at many positions: measured acceptance within 5 standard deviations of the formula (chance
    of a false alarm below 1e-6 a position), and the formula between (1 - t) / (1 + t) and the optimum 1 - t."""
    model, drafter = tiny
    n, total = 4000, Counter[str]()
    seeds = np.arange(n, dtype=np.uint64)
    with model.session(128, drafter=drafter) as session:
        session.prefill(PROMPT)
        for i, temperature in product(range(4), (1.0, 4.0)):
            token = 7 + 50 * i
            session._ext.draft_start(token, 1)
            guess = session._ext.draft_row(0, token)[0]
            row = session.feed(token)
            p, q = chances(row, temperature), chances(guess, temperature)
            optimum, formula = float(np.minimum(p, q).sum()), gumbel_coupling(p, q)
            sampler = Sampler(SamplingParams(temperature=temperature, seed=1), model.config.vocab_size).handle
            positions = np.full(n, session.position, np.int64)
            same = sampler.draw_many(np.ascontiguousarray(row), seeds, positions) == sampler.draw_many(
                guess, seeds, positions
            )
            error = math.sqrt(max(formula * (1 - formula), 1 / n) / n)
            assert abs(same.mean() - formula) < 5 * error
            t = 1 - optimum
            assert (1 - t) / (1 + t) - 1e-9 <= formula <= optimum + 1e-9
            total += Counter({"optimum": optimum, "keyed": formula})
    assert total["keyed"] > 0.5 * total["optimum"]


def test_nearly_all_of_the_optimum_with_a_good_drafter() -> None:
    """The nano model at temperature 1, with filters and without: keyed drafts keep nine tenths of the optimum."""
    with Model.open(threads=1) as model:
        drafter = Drafter.open(None, model)
        prompt = model.tokenizer.encode("def add(a, b):\n    return a + b\n\ndef mul(a, b):\n", add_bos=True)
        optimum = formula = likeliest = 0.0
        with model.session(256, drafter=drafter) as session:
            done = session.generate(prompt, max_tokens=40, seed=4, temperature=1.0, drafting="off").finish()
            session.rewind(0)
            session.prefill(prompt)
            for token in done.tokens[:-1]:
                session._ext.draft_start(token, 1)
                q = chances(session._ext.draft_row(0, token)[0], 1.0)
                p = chances(session.feed(token), 1.0)
                optimum += float(np.minimum(p, q).sum())
                formula += gumbel_coupling(p[(p > 1e-6) | (q > 1e-6)], q[(p > 1e-6) | (q > 1e-6)])
                likeliest += float(p[q.argmax()])
    assert 0.9 * optimum < formula <= optimum
    assert formula > likeliest


def test_masked_drafts_hold_as_often_as_free_ones(tiny: tuple[Model, Drafter]) -> None:
    """A mask of a few tokens: drafts that ignored it would hold about never."""
    model, drafter = tiny
    some = list(range(40, 52))

    def mask(tokens: list[int]) -> list[int]:
        return some if len(tokens) % 2 else [t + 100 for t in some]

    held = drafted = 0
    with model.session(128, drafter=drafter) as session, model.session(128) as plain:
        for seed in range(12):
            given = {"temperature": 1.0, "seed": seed, "max_tokens": 24, "mask": mask}
            texts = []
            for s, more in ((plain, {}), (session, {"drafting": 5})):
                settings = GenerationOptions.from_options(given | more, model)
                texts.append([d.token for d, _ in TokenStream(s, np.array(PROMPT, np.int32), settings)])
            assert texts[0] == texts[1]
            assert session.stats.drafter is not None
            held += session.stats.drafter.accepted_at[0]
            drafted += session.stats.drafter.verified_at[0]
    assert held > 0.25 * drafted  # twelve tokens are left: a drafter that knows nothing gets about this much


@pytest.mark.parametrize("trouble", ["raises", "nothing", "wrong id"])
def test_a_mask_that_fails_ahead_of_the_text_is_not_the_texts_business(
    tiny: tuple[Model, Drafter], trouble: str
) -> None:
    """Only texts that come to be may fail; a hook that fails about others ends the draft."""
    model, drafter = tiny
    with model.session(128) as plain:
        settings = GenerationOptions.from_options({"temperature": 0.0, "max_tokens": 20}, model)
        text = [d.token for d, _ in TokenStream(plain, np.array(PROMPT, np.int32), settings)]

    def mask(tokens: list[int]) -> Any:
        if tokens == text[: len(tokens)]:
            return None
        if trouble == "raises":
            raise ValueError("never asked for by the text")
        return [] if trouble == "nothing" else [10**6]

    with model.session(128, drafter=drafter) as session:
        settings = GenerationOptions.from_options(
            {"temperature": 0.0, "max_tokens": 20, "mask": mask, "drafting": 5}, model
        )
        assert [d.token for d, _ in TokenStream(session, np.array(PROMPT, np.int32), settings)] == text
        assert session.drafter_fault is None
