"""The exactness contract: E1 (chunks), E4 (threads, instruction sets), E5 (other sessions). Equal means equal bits."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ds4v41 import ConfigError, Model, Session, _ext

from .support import (
    MODES,
    Stepped,
    chunkings,
    live,
    nano,
    prefill_in,
    same_bits,
    small,
    stepped,
    synthetic,
    tiny,
    tokens_of,
)

LONGEST = 400
SEEDS = (1, 2, 3)
ISAS = tuple(_ext.cpu_isas())


# ---- E1: chunks ----------------------------------------------------------------------------------------------------


def check_parts(session: Session, oracle: Stepped, cuts: list[int], n: int) -> None:
    """Prefill oracle.ids[:n] in parts: rows and every state in between are those of stepping."""
    edges = [0, *sorted({c for c in cuts if 0 < c < n}), n]
    for begin, end in itertools.pairwise(edges):
        rows = session.prefill(oracle.ids[begin:end], logits="all")
        assert same_bits(rows, oracle.rows[begin:end]), f"rows of [{begin}, {end})"
        assert live(session) == oracle.states[end], f"state at {end}"


@given(
    st.sampled_from(MODES),
    st.sampled_from(SEEDS),
    chunkings(LONGEST),
    st.sampled_from([1, 2, 5, 64, 127, 512]),
    st.sampled_from([0, 3, 64, 512]),
)
def test_any_chunking_is_stepping(mode: str, seed: int, parts: tuple[int, list[int]], chunk: int, retain: int) -> None:
    n, cuts = parts
    event(f"{mode}, {'one call' if len(cuts) < 2 else 'parts'}")
    with tiny(mode).session(chunk=chunk, retain=retain) as session:
        check_parts(session, stepped(mode, seed, LONGEST), cuts, n)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 64, 128, 129, LONGEST])
def test_equal_chunks(mode: str, size: int) -> None:
    """The sizes around the window (16), the index list (16), the candidates (32), and the whole."""
    with tiny(mode).session(retain=0, chunk=size) as session:
        check_parts(session, stepped(mode, 1, LONGEST), list(range(0, LONGEST, size)), LONGEST)


@settings(max_examples=settings().max_examples // 2)
@given(st.sampled_from(MODES), st.integers(0, LONGEST - 8), st.lists(st.integers(1, 8), min_size=1, max_size=12))
def test_steps_of_many_rows(mode: str, start: int, sizes: list[int]) -> None:
    """A step of up to 8 rows (what a verify step runs) after a prefill."""
    oracle = stepped(mode, 2, LONGEST)
    with tiny(mode).session() as session:
        if start:
            session.prefill(oracle.ids[:start], logits=None)
        for size in sizes:
            at = session.position
            if at + size > LONGEST:
                break
            assert same_bits(session.step(oracle.ids[at : at + size]), oracle.rows[at : at + size])
            assert live(session) == oracle.states[at + size]


@pytest.mark.parametrize("want", ["last", "all", None])
def test_what_is_asked_for_does_not_change_what_is_computed(want: Any) -> None:
    oracle = stepped("bf16", 1, LONGEST)
    with tiny().session(chunk=48) as session:
        rows = session.prefill(oracle.ids[:150], logits=want)
        expected = {"last": oracle.rows[149:150], "all": oracle.rows[:150], None: None}[want]
        assert rows is None if expected is None else same_bits(rows, expected)
        assert live(session) == oracle.states[150]


def test_a_traced_run_is_the_same_run() -> None:
    oracle = stepped("bf16", 1, LONGEST)
    with tiny().session(chunk=90) as session:
        assert same_bits(session._ext.trace_run(oracle.ids[:90])["logits"], oracle.rows[:90])
        assert live(session) == oracle.states[90]


def test_the_measure_is_not_blind() -> None:
    """Another token changes the state's hash at once, and rows from there on."""
    oracle = stepped("bf16", 1, LONGEST)
    ids = oracle.ids.copy()
    ids[40] = (int(ids[40]) + 1) % 512
    with tiny().session() as session:
        rows = prefill_in(session, ids[:60], [])
        assert same_bits(rows[:40], oracle.rows[:40])
        assert not any(same_bits(rows[i], oracle.rows[i]) for i in range(40, 60))
        assert live(session) != oracle.states[60]


# ---- E1 on other shapes --------------------------------------------------------------------------------------------


@st.composite
def layer_plans(draw: st.DrawFn) -> dict[str, Any]:
    """Ratios and sources of 1 to 6 layers that make a model: runs of one ratio, each begun by its source."""
    ratios: list[int] = []
    kv, index = [], []
    for ratio in draw(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=3)):
        for i in range(draw(st.integers(1, 2))):
            if ratio and i == 0:
                kv.append(len(ratios))
            if ratio and (i == 0 or draw(st.booleans())):
                index.append(len(ratios))
            ratios.append(ratio)
    candidates = [kv[-1]] if kv and draw(st.booleans()) else [None]
    engram = draw(st.lists(st.integers(0, len(ratios) - 1), max_size=2, unique=True))
    return {
        "num_hidden_layers": len(ratios),
        "compress_ratios": tuple(ratios),
        "kv_source_layer_ids": tuple(kv),
        "index_source_layer_ids": tuple(index),
        "candidate_source_layer_id": candidates[0],
        "engram_layer_ids": tuple(sorted(engram)),
        "engram_vocab_size": 60,
        "dspark_target_layer_ids": (len(ratios) - 1,),
    }


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes that are no multiples of anything convenient, where the architecture lets them."""
    groups = draw(st.sampled_from([1, 2, 3, 4]))
    size = draw(st.integers(1, 7))
    blocks = draw(st.integers(1, 9))
    return draw(layer_plans()) | {
        "vocab_size": 300,
        "hidden_size": draw(st.sampled_from([32, 64, 96, 160])),
        "moe_intermediate_size": draw(st.sampled_from([32, 64, 96])),
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "o_groups": groups,
        "o_lora_rank": draw(st.sampled_from([8, 32, 40])),
        "q_lora_rank": draw(st.sampled_from([32, 96, 100])),
        "head_dim": draw(st.sampled_from([32, 64, 96])),
        "qk_rope_head_dim": draw(st.sampled_from([2, 8, 16, 30])),
        "index_n_heads": draw(st.integers(1, 9)),
        "index_head_dim": draw(st.sampled_from([32, 64])),
        "index_topk": draw(st.integers(1, size * blocks)),
        "candidate_topk_blocks": blocks,
        "candidate_block_size": size,
        "sliding_window": draw(st.sampled_from([1, 2, 5, 16, 63, 64, 65, 100])),
        "hc_mult": draw(st.integers(1, 4)),
        "hc_sinkhorn_iters": draw(st.integers(1, 20)),
        "n_routed_experts": draw(st.sampled_from([4, 7, 16])),
        "num_experts_per_tok": draw(st.integers(1, 4)),
        "engram_max_ngram_size": draw(st.integers(2, 4)),
        "engram_n_heads": draw(st.integers(1, 3)),
        "rope_scaling_original_max_position_embeddings": draw(st.sampled_from([64, 256])),
    }


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(shapes(), st.sampled_from(["bf16", "fp8fp4"]), chunkings(120), st.sampled_from([0, 1, 200]))
def test_any_shape(shape: dict[str, Any], storage: str, parts: tuple[int, list[int]], retain: int) -> None:
    n, cuts = parts
    with synthetic(storage=storage, **shape) as model:
        oracle = Stepped(model, tokens_of(5, n, 300))
        assert np.isfinite(oracle.rows).all()
        with model.session(retain=retain, chunk=50) as session:
            check_parts(session, oracle, cuts, n)


def test_shapes_that_make_no_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="candidate_topk_blocks"):
        synthetic(candidate_topk_blocks=2, candidate_block_size=4, index_topk=9)


# ---- E4: threads and instruction sets ------------------------------------------------------------------------------


def fingerprint(model: Model, ids: np.ndarray, n_steps: int) -> tuple[bytes, str]:
    """Logits of a prefill and of steps after it, and the state."""
    split = len(ids) - n_steps
    with model.session() as session:
        rows = [session.prefill(ids[:split], logits="all")]
        rows += [session.step([int(token)]) for token in ids[split:]]
        return b"".join(row.tobytes() for row in rows if row is not None), live(session)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("isa", ISAS)
def test_threads_and_instruction_sets(mode: str, isa: str) -> None:
    n = 75 if isa == "plain" else 133
    ids = tokens_of(1, LONGEST)[:n]
    oracle = stepped(mode, 1, LONGEST)
    want = oracle.rows[:n].tobytes(), oracle.states[n]
    for threads in (1, 2, 3, 5, 8):
        # Threads that outnumber free cores make single steps slow, so few of them.
        with tiny(mode, threads, f"cpu/{isa}") as model:
            assert model.backend == f"cpu/{isa}" or model.backend == isa
            assert model.threads == threads
            assert fingerprint(model, ids, 2 if threads > 2 else 5) == want, f"{threads} threads"
        tiny.cache_clear()


@pytest.mark.parametrize("isa", ISAS)
def test_nano_threads_and_instruction_sets(isa: str) -> None:
    ids = tokens_of(9, 140, 4000)[: 70 if isa == "plain" else 140]
    want = fingerprint(nano(), ids, 2)
    with Model.open(threads=3, backend=f"cpu/{isa}") as model:
        assert fingerprint(model, ids, 2) == want


# ---- E5: other sessions --------------------------------------------------------------------------------------------


def _use(session: Session, seed: int, stop: threading.Event) -> None:
    """Prefill, step and go back, over and over."""
    ids, turn = tokens_of(seed, 300, session.model.config.vocab_size), 0
    while not stop.is_set():
        turn += 1
        session.truncate(0)
        session.prefill(ids[: 50 + 13 * turn % 200], logits=None)
        for token in ids[:5]:
            session.step([int(token)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [1, 2])
def test_three_sessions_beside_it(mode: str, threads: int) -> None:
    oracle = stepped(mode, 3, LONGEST)
    model, stop = tiny(mode, threads), threading.Event()
    others = [model.session() for _ in range(3)]
    workers = [threading.Thread(target=_use, args=(other, 10 + i, stop)) for i, other in enumerate(others)]
    for worker in workers:
        worker.start()
    try:
        with model.session() as session:
            check_parts(session, oracle, [1, 30, 31, 100], 150)
            for at in range(150, 160):
                assert same_bits(session.step([int(oracle.ids[at])])[0], oracle.rows[at])
                assert live(session) == oracle.states[at + 1]
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        for other in others:
            other.close()


def test_sessions_in_turns() -> None:
    """Token by token, two sessions of one model in one thread: each as if alone."""
    a, b = Stepped(small(), tokens_of(1, 80, 320)), Stepped(small(), tokens_of(2, 80, 320))
    with small().session() as one, small().session(retain=0, chunk=1) as two:
        for i in range(80):
            assert same_bits(one.step([int(a.ids[i])])[0], a.rows[i])
            assert same_bits(two.step([int(b.ids[i])])[0], b.rows[i])
        assert (live(one), live(two)) == (a.states[80], b.states[80])
