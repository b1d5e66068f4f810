"""generate: greedy and sampled text, where it ends, hooks, log probabilities, limits, and what is reused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4v41 import Completion, ContextError, Model, OptionError, Session, StateError, _ext

from .support import assert_as_fresh, live, nano, tiny, tokens_of

PROMPT = "def add(a, b):"
ISAS = tuple(_ext.cpu_isas())


def run(session: Session, prompt: Any = PROMPT, **options: Any) -> Completion:
    """The whole completion; 12 tokens unless told."""
    return session.generate(prompt, **{"max_tokens": 12, "temperature": 0, **options}).finish()


def greedy_by_hand(model: Model, ids: list[int], n: int) -> tuple[list[int], list[np.ndarray]]:
    """The likeliest tokens, step by step, and the logits that they were taken from."""
    out: list[int] = []
    rows: list[np.ndarray] = []
    with model.session(context=300) as session:
        row = session.prefill(ids)
        assert row is not None
        for _ in range(n):
            rows.append(row[0])
            out.append(int(row[0].argmax()))
            row = session.step(out[-1:])
    return out, rows


def log_softmax(row: np.ndarray) -> np.ndarray:
    x = row.astype(np.float64)
    x -= x.max()
    return np.asarray(x - np.log(np.exp(x).sum()))


# ---- what comes out ------------------------------------------------------------------------------------------------


def test_temperature_0_is_argmax_by_hand() -> None:
    ids = nano().tokenizer.encode(PROMPT, add_bos=True)
    want, _ = greedy_by_hand(nano(), ids, 30)
    with nano().session(context=512) as session:
        result = run(session, max_tokens=30)
    assert result.tokens == want
    assert result.text == nano().tokenizer.decode(want)
    assert "return a + b" in result.text
    assert (result.finish_reason, result.stop, result.usage.completion_tokens) == ("length", None, 30)


@pytest.mark.parametrize("mode", ["bf16", "fp8", "fp32"])
def test_temperature_0_on_tiny(mode: str) -> None:
    """Random weights: small margins, so that a wrong tie rule or a rounded row would show."""
    ids = tokens_of(3, 50).tolist()
    want, _ = greedy_by_hand(tiny(mode), ids, 40)
    eos = tiny(mode).config.eos_token_id
    want = want[: want.index(eos)] if eos in want else want
    with tiny(mode).session(context=300) as session:
        assert run(session, ids, max_tokens=40).tokens == want


def sampled(model: Model, seed: int, **session: Any) -> tuple[str, list[int]]:
    with model.session(context=512, **session) as opened:
        result = run(opened, PROMPT + "\n", temperature=1.2, top_p=0.98, seed=seed)
        assert result.seed == seed
        return result.text, result.tokens


def test_same_seed_same_text_over_chunkings() -> None:
    want = sampled(nano(), 7)
    assert all(sampled(nano(), 7, chunk=chunk, retain=retain) == want for chunk, retain in ((1, 0), (2, 50), (5, 8)))


@pytest.mark.parametrize("isa", ISAS)
def test_same_seed_same_text_over_threads_and_instruction_sets(isa: str) -> None:
    want = sampled(nano(), 7)
    for threads in (1, 2):
        with Model.open(threads=threads, backend=f"cpu/{isa}") as model:
            assert sampled(model, 7) == want


def test_seeds_differ_and_a_fresh_one_is_reported() -> None:
    texts = {sampled(nano(), seed)[0] for seed in range(5)}
    assert len(texts) >= 3
    with nano().session(context=512) as session:
        one, two = (run(session, temperature=1.5) for _ in range(2))
        assert one.seed != two.seed
        assert run(session, temperature=1.5, seed=one.seed).tokens == one.tokens


def test_a_draw_depends_on_seed_position_and_logits_alone() -> None:
    """Stopped and started again in the middle, the text goes on as it would have."""
    with nano().session(context=512) as session:
        whole = run(session, temperature=1.3, seed=11, max_tokens=14).tokens
        ids = nano().tokenizer.encode(PROMPT, add_bos=True)
        assert run(session, ids + whole[:6], temperature=1.3, seed=11, max_tokens=8).tokens == whole[6:]


def test_pieces_join_to_the_text_and_have_positions() -> None:
    with nano().session(context=512) as session:
        running = session.generate(PROMPT, max_tokens=10, temperature=1, seed=3)
        pieces = list(running)
        n_prompt = running.result.usage.prompt_tokens
        assert "".join(piece.text for piece in pieces) == running.text == running.result.text
        drawn = [piece for piece in pieces if piece.token is not None]
        assert [piece.token for piece in drawn] == running.result.tokens
        assert [piece.position for piece in drawn] == list(range(n_prompt, n_prompt + len(drawn)))
        assert session.position == n_prompt + len(drawn) - 1  # nothing has read the last token yet


def test_text_and_ids_are_the_same_prompt() -> None:
    ids = nano().tokenizer.encode(PROMPT, add_bos=True)
    assert ids[0] == nano().config.bos_token_id
    with nano().session(context=512) as session:
        assert run(session, ids).tokens == run(session, PROMPT).tokens
        assert session.stats.reused == len(ids) - 1


# ---- where it ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["return", "rs.", "numbers", '"""', "\n    return a", " + b\n\n\ndef"])
def test_stop_strings_end_it_and_do_not_leak(stop: str) -> None:
    """Whole tokens, parts of them, and texts that span several."""
    with nano().session(context=512) as session:
        free = run(session, max_tokens=40).text
        assert stop in free
        running = session.generate(PROMPT, max_tokens=40, temperature=0, stop=[stop, "never"])
        shown = "".join(piece.text for piece in running)
        assert shown == free[: free.index(stop)] == running.result.text
        assert (running.result.finish_reason, running.result.stop) == ("stop", stop)


def test_stop_ids_and_the_end_of_sentence() -> None:
    with nano().session(context=512) as session:
        free = run(session, max_tokens=20)
        place = free.tokens[10]
        first = free.tokens.index(place)
        result = run(session, max_tokens=20, stop=[place])
        assert (result.tokens, result.finish_reason, result.stop) == (free.tokens[:first], "stop", place)
        eos = nano().config.eos_token_id
        result = run(session, max_tokens=20, logit_bias={eos: 100})
        assert (result.tokens, result.text, result.finish_reason, result.stop) == ([], "", "stop", eos)


def test_the_context_ends_it() -> None:
    ids = nano().tokenizer.encode(PROMPT, add_bos=True)
    with nano().session(context=len(ids) + 7) as session:
        assert run(session, max_tokens=None).usage.completion_tokens == 7
        assert session.position == session.context - 1
        assert run(session, max_tokens=7).finish_reason == "length"
        state = live(session)
        with pytest.raises(ContextError, match="leaves 7"):
            run(session, max_tokens=8)
        assert live(session) == state
    with nano().session(context=len(ids)) as session, pytest.raises(ContextError, match="no room"):
        session.generate(PROMPT)


def test_close_midway() -> None:
    with nano().session(context=512) as session:
        want = run(session)
        running = session.generate(PROMPT, max_tokens=12, temperature=0)
        taken = [next(running).token for _ in range(4)]
        with pytest.raises(StateError, match="still being generated"):
            _ = running.result
        running.close()
        running.close()
        assert running.result.finish_reason == "cancelled"
        assert running.result.tokens == taken == want.tokens[:4]
        assert list(running) == []
        assert run(session).tokens == want.tokens


def test_closed_before_it_began() -> None:
    with nano().session(context=512) as session:
        running = session.generate(PROMPT, max_tokens=5)
        running.close()
        assert running.result.tokens == []
        assert running.finish().finish_reason == "cancelled"
        assert session.position == 0


# ---- hooks and options ---------------------------------------------------------------------------------------------


def test_the_mask_decides() -> None:
    allowed = [40, 50, 60, 70]
    seen: list[list[int]] = []

    def mask(so_far: list[int]) -> Any:
        seen.append(so_far)
        if len(so_far) == 3:
            return None
        if len(so_far) == 4:
            return np.arange(4096) == 99
        return allowed

    with nano().session(context=512) as session:
        tokens = run(session, mask=mask, temperature=1, seed=1, max_tokens=8).tokens
    assert seen == [tokens[:i] for i in range(8)]
    assert set(tokens[:3] + tokens[5:]) <= set(allowed)
    assert tokens[4] == 99


@pytest.mark.parametrize("answer", [[], [4096], [1.5], "abc", np.zeros(4096, bool), np.zeros(3, bool)])
def test_a_bad_mask_is_refused_and_the_session_stays(answer: Any) -> None:
    with nano().session(context=512) as session:
        want = run(session).tokens
        running = session.generate(PROMPT, max_tokens=12, temperature=0, mask=lambda ids: answer if ids else None)
        assert next(running).token == want[0]
        with pytest.raises(OptionError):
            next(running)
        assert running.result.finish_reason == "cancelled"
        assert run(session).tokens == want


def test_an_exception_of_the_mask_comes_out() -> None:
    def mask(so_far: list[int]) -> None:
        raise LookupError("mine")

    with nano().session(context=512) as session:
        with pytest.raises(LookupError, match="mine"):
            run(session, mask=mask)
        assert run(session, max_tokens=1).usage.reused_tokens > 0


def test_bias_bans_and_forces() -> None:
    with nano().session(context=512) as session:
        free = run(session).tokens
        banned = run(session, logit_bias={free[0]: -np.inf}).tokens
        assert banned[0] != free[0]
        assert free[0] not in banned
        assert run(session, logit_bias={99: 100}).tokens == [99] * 12


def test_a_repetition_penalty_sees_prompt_and_answer() -> None:
    with nano().session(context=512) as session:
        ids = nano().tokenizer.encode(PROMPT, add_bos=True)
        free = run(session, max_tokens=30).tokens
        assert len(set(free)) < 30 and set(free) & set(ids)
        tokens = run(session, repetition_penalty=100.0, max_tokens=30).tokens
        assert len(set(tokens)) == 30
        assert not set(tokens) & set(ids)


@pytest.mark.parametrize("temperature", [0, 1])
def test_logprobs_are_those_of_the_step_logits(temperature: float) -> None:
    ids = nano().tokenizer.encode(PROMPT, add_bos=True)
    with nano().session(context=512) as session:
        running = session.generate(ids, max_tokens=8, temperature=temperature, seed=2, logprobs=True, top_logprobs=5)
        pieces = list(running)
        result = running.result
        assert result.logprobs is not None
        session.truncate(0)
        row = session.prefill(ids)
        for token, entry, piece in zip(result.tokens, result.logprobs, pieces, strict=False):
            assert row is not None
            want = log_softmax(row[0])
            assert piece.logprob == entry
            assert entry.token == token
            assert entry.logprob == pytest.approx(want[token], abs=2e-5)
            order = np.argsort(-want, kind="stable")[:5]
            assert [i for i, _ in entry.top] == order.tolist()
            assert [value for _, value in entry.top] == pytest.approx(want[order], abs=2e-5)
            row = session.step([token])
        assert run(session).logprobs is None


def test_the_checkpoint_gives_the_defaults() -> None:
    """generation_config.json of nano: temperature 1, top_p 0.95."""
    assert nano().default_sampling == {"temperature": 1.0, "top_p": 0.95}
    with nano().session(context=512) as session:
        plain = session.generate(PROMPT, max_tokens=12, seed=9).finish().tokens
        assert run(session, temperature=1.0, top_p=0.95, seed=9).tokens == plain


# ---- reuse ---------------------------------------------------------------------------------------------------------


def test_the_same_prompt_again_costs_nothing() -> None:
    """BL-002, BL-010: longer than the window, three times: cold, with a tail to drop, and right at its end."""
    ids = tokens_of(6, 300, 4000).tolist()
    with nano().session(context=512) as session:
        cold = run(session, ids)
        assert session.stats.reused == 0
        assert session.stats.prefilled == 300
        again = run(session, ids)
        assert (session.stats.reused, session.stats.prefilled) == (299, 1)
        session.truncate(299)
        session.step(ids[299:])
        third = run(session, ids)
        assert (session.stats.reused, session.stats.prefilled) == (300, 0)
    assert cold.tokens == again.tokens == third.tokens


@pytest.mark.parametrize("change", [0, 1, 100, 171, 298, 299])
def test_a_change_in_the_middle_keeps_what_is_before_it(change: int) -> None:
    """BL-001: what is reused is the common prefix, and `why` says where they part."""
    ids = tokens_of(6, 300, 4000).tolist()
    other = [*ids[:change], (ids[change] + 1) % 4000, *ids[change + 1 :]]
    with nano().session(context=512) as session:
        session.prefill(ids, logits=None)
        result = run(session, other, max_tokens=3)
        assert session.stats.reused == result.usage.reused_tokens == min(change, 299)
        assert session.stats.prefilled == 300 - change
        assert f"diverged at {change} of 300" in session.stats.why
        assert_as_fresh(session, other + result.tokens[:-1])


def test_a_shorter_prompt_keeps_its_prefix() -> None:
    """BL-004: the new prompt is shorter than what is held and shares most of it."""
    ids = tokens_of(6, 300, 4000).tolist()
    with nano().session(context=512) as session:
        session.prefill(ids, logits=None)
        result = run(session, [*ids[:250], 7, 8], max_tokens=2)
        assert session.stats.reused == 250
        assert_as_fresh(session, [*ids[:250], 7, 8, result.tokens[0]])


def test_what_is_no_longer_kept_is_computed_again() -> None:
    ids = tokens_of(6, 300, 4000).tolist()
    with nano().session(context=512, retain=0, chunk=16) as session:
        session.prefill(ids, logits=None)
        run(session, ids[:100], max_tokens=1)
        assert (session.stats.reused, session.stats.prefilled, session.stats.replayed) == (99, 1, 99)
        assert "window rows not kept: 99 replayed" in session.stats.why
        assert_as_fresh(session, ids[:100])


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), min_size=2, max_size=5))
def test_any_sequence_of_prompts_is_as_fresh(prompts: list[tuple[int, int]]) -> None:
    """BL-017: prompts that share prefixes of every length, one after the other on one session."""
    base = tokens_of(1, 90).tolist()
    with tiny().session(context=200, retain=20, chunk=16) as session:
        for variant, n in prompts:
            ids = [*base[: n // 2], *tokens_of(variant, 90).tolist()[n // 2 : n]] or base[:1]
            run(session, ids, max_tokens=1)
            assert session.stats.reused + session.stats.prefilled == len(ids)
            assert_as_fresh(session, ids)
