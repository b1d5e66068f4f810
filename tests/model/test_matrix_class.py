"""prefill="matrix": inside the class any chunking, thread count and instruction set gives the same bits; steps stay
canonical; every token is run again in the class that it was computed in; the class is in the names of stored states."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4v41 import Drafter, KVStore, Model, OptionError, Session, StoreError, _ext
from ds4v41.checkpoint import open_checkpoint
from ds4v41.memory import weight_bytes
from ds4v41.model import NANO
from ds4v41.weights import build, default_activations
from tests.golden.compare import row_errors
from tests.golden.load import runs

from .support import TINY, Rows, Tokens, live, prefill_in, same_bits, tiny, tokens_of

ISAS = tuple(_ext.cpu_isas())
NATIVE = not _ext.matrix_missing("auto")
LONGEST = 240
MODES = ("bf16", "fp8")


def opened(folder: Path, mode: str = "auto", threads: int = 1, isa: str = "auto") -> Model:
    """A model whose prompts are of the matrix class, emulated where the processor has no instruction for it."""
    checkpoint = open_checkpoint(folder, parts=("main", "engram"))
    chosen = default_activations(checkpoint.config, checkpoint.dialect) if mode == "auto" else mode
    ext = build(checkpoint, chosen, isa, threads)
    return Model(checkpoint, ext, chosen, weight_bytes(checkpoint)[0], None, matrix=True)


@cache
def matrix(mode: str = "bf16", threads: int = 1, isa: str = "auto") -> Model:
    return opened(TINY / ("fp8fp4" if mode == "fp8" else "bf16"), mode, threads, isa)


@cache
def whole(mode: str, seed: int = 1) -> Rows:
    """Logits of all rows of one prefill call."""
    with matrix(mode).session() as session:
        rows = session.prefill(tokens_of(seed, LONGEST), logits="all")
        assert rows is not None
        return rows


def history(session: Session) -> list[bool]:
    """Of each token: was it computed in the matrix class?"""
    return (np.asarray(session._ext.history) >= 1 << 30).tolist()


# ---- opening -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not NATIVE, reason="this processor has no AVX-512-BF16")
def test_open() -> None:
    with Model.open(TINY / "bf16", prefill="matrix", threads=1) as model:
        assert model.prefill == "matrix" and model.numerics_id == "canonical-1+matrix-1/bf16"
        assert "prefill matrix" in repr(model)
        with model.session() as session:
            assert same_bits(session.prefill(tokens_of(1, LONGEST), logits="all"), whole("bf16"))
            assert session.stats.matrix == session.stats.prefilled == LONGEST
            assert "matrix" in session.stats._repr_html_()


@pytest.mark.skipif(NATIVE, reason="this processor has AVX-512-BF16")
def test_without_the_instruction_it_is_refused() -> None:
    with pytest.raises(OptionError, match="AVX-512-BF16"):
        Model.open(TINY / "bf16", prefill="matrix")


@pytest.mark.parametrize("backend", [f"cpu/{isa}" for isa in ISAS if isa != "avx512"])
def test_other_instruction_sets_refuse_it(backend: str) -> None:
    with pytest.raises(OptionError, match=f"AVX-512-BF16.*{backend}"):
        Model.open(TINY / "bf16", prefill="matrix", backend=backend)


@pytest.mark.skipif(bool(_ext.device_missing("metal")), reason="no Metal here, nor its stand-in")
def test_metal_refuses_it() -> None:
    with pytest.raises(OptionError, match="metal has none"):
        Model.open(TINY / "bf16", prefill="matrix", backend="metal")
    model = opened(TINY / "bf16", "bf16", isa="metal")
    with model.session() as session, pytest.raises(OptionError, match="canonical class only"):
        session.prefill([5, 6, 7])


@pytest.mark.skipif(not NATIVE, reason="this processor has no AVX-512-BF16")
def test_fp32_rounds_nothing_so_it_is_refused() -> None:
    with pytest.raises(OptionError, match="fp32"):
        Model.open(TINY / "bf16", prefill="matrix", activations="fp32")


# ---- one class, one set of bits ------------------------------------------------------------------------------------


@given(
    st.sampled_from(MODES),
    st.lists(st.integers(1, LONGEST - 1), max_size=8),
    st.sampled_from([1, 2, 5, 64, 127, 512]),
    st.sampled_from([0, 3, 64]),
)
def test_any_chunking(mode: str, cuts: list[int], chunk: int, retain: int) -> None:
    with matrix(mode).session(chunk=chunk, retain=retain) as session, matrix(mode).session() as other:
        assert same_bits(prefill_in(session, tokens_of(1, LONGEST), cuts), whole(mode))
        other.prefill(tokens_of(1, LONGEST), logits=None)
        other._ext.complete()
        session._ext.complete()
        assert live(session) == live(other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
def test_threads_and_instruction_sets(mode: str, threads: int, isa: str) -> None:
    with matrix(mode, threads, isa).session() as session:
        assert same_bits(session.prefill(tokens_of(1, LONGEST), logits="all"), whole(mode))


def test_it_is_another_class() -> None:
    """(In mode fp8 the sums of a model as small as this one are exact in any order.)"""
    with tiny().session() as session:
        exact = session.prefill(tokens_of(1, LONGEST), logits="all")
    assert not same_bits(exact, whole("bf16"))


def test_the_cone_gives_the_same_bits() -> None:
    ids = tokens_of(1, LONGEST)
    with matrix().session(decoder="all") as every, matrix().session(chunk=50) as cone:
        assert same_bits(every.prefill(ids), cone.prefill(ids))


def test_steps_are_canonical() -> None:
    ids = tokens_of(2, 40)
    with matrix().session() as session, tiny().session() as exact:
        for token in ids:
            assert same_bits(session.step([int(token)]), exact.step([int(token)]))
        assert live(session) == live(exact) and not any(history(session))


# ---- history -------------------------------------------------------------------------------------------------------


def mixed(session: Session, ids: Tokens, n: int) -> None:
    """Tokens up to n: prompts and steps in turn, as a conversation has them."""
    edges = [0, 90, 131, 170, 205, LONGEST]
    for i, (a, b) in enumerate(itertools.pairwise(edges)):
        part = ids[a : min(b, n)]
        if len(part) == 0:
            return
        if i % 2 == 0:
            session.prefill(part, logits=None)
        else:
            for token in part:
                session.step([int(token)])


def after(ids: Tokens, n: int) -> tuple[str, Any]:
    with matrix().session(decoder="all") as session:
        mixed(session, ids, n)
        return live(session), session._ext.last_logits()


@pytest.mark.parametrize("position", [1, 60, 90, 91, 100, 131, 140, 171, 199, 205, 230])
@pytest.mark.parametrize("retain", [0, 16])
def test_a_rewind_replays_each_token_in_its_class(position: int, retain: int) -> None:
    ids = tokens_of(3, LONGEST)
    with matrix().session(retain=retain, chunk=37) as session:
        mixed(session, ids, LONGEST)
        before = history(session)
        session.rewind(position)
        assert history(session) == before[:position]
        assert live(session) == after(ids, position)[0]


def test_a_fork_and_a_file_know_the_history(tmp_path: Path) -> None:
    ids = tokens_of(3, LONGEST)
    with matrix().session(retain=0) as session:
        mixed(session, ids, 220)
        session.save(tmp_path / "s")
        with session.fork() as twin, matrix().load_session(tmp_path / "s", retain=0) as loaded:
            for other in (twin, loaded):
                assert history(other) == history(session) and other.tokens == ids[:220].tolist()
                other.rewind(150)
                assert live(other) == after(ids, 150)[0]
    with pytest.raises(StoreError, match="canonical-1\\+matrix-1/bf16 there, canonical-1/bf16 here"):
        tiny().load_session(tmp_path / "s")


def test_an_interrupted_replay_keeps_the_history() -> None:
    ids = tokens_of(3, LONGEST)
    with matrix().session(retain=0, chunk=16) as session:
        mixed(session, ids, 220)
        session.cancel()
        with pytest.raises(Exception, match="cancel"):
            session._ext.rewind(150)
        assert history(session) == [i < 90 or 131 <= i < 170 or i >= 205 for i in range(220)][:150]
        session._ext.clear_cancel()
        session._ext.complete()
        assert live(session) == after(ids, 150)[0]


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_store_keeps_the_classes_apart(where: str, tmp_path: Path) -> None:
    """A prompt gives the same bits with and without a store: what was computed as a prompt is reused as one, decoded
    tokens are not, and the canonical model sees nothing of it."""
    ids = tokens_of(4, 230).astype(np.int32)
    store = KVStore(None if where == "memory" else tmp_path / "store", budget="64 MiB")
    with matrix().session() as plain:
        want = plain.advance_to(ids)
    with matrix().session(store=store) as first:
        first.advance_to(ids[:101])
        for token in ids[101:160]:
            first.feed(int(token))
        first.advance_to(ids[:200])  # history: 101 matrix, 59 canonical, the rest matrix
        assert history(first) == [i < 101 or i >= 160 for i in range(200)]
    with matrix().session(store=store) as second:
        assert same_bits(second.advance_to(ids), want)
        assert 1 < second.stats.restored <= 101 and all(history(second))
    with matrix().session(store=store) as third:
        assert same_bits(third.advance_to(ids), want)
        assert third.stats.restored == third.stats.reused == len(ids) and all(history(third))
    with tiny().session(store=store) as exact, tiny().session() as alone:
        assert same_bits(exact.advance_to(ids), alone.advance_to(ids)) and exact.stats.restored == 0
    with matrix().session(store=store) as fourth:  # and the canonical model's rows are not taken either
        assert same_bits(fourth.advance_to(ids), want) and all(history(fourth))


def test_a_session_that_diverges_restores_what_fits_its_history(tmp_path: Path) -> None:
    """The live tokens are decoded ones, the store has the same tokens as a prompt: each state is one history."""
    ids = tokens_of(5, 200).astype(np.int32)
    store = KVStore(tmp_path / "store", budget="64 MiB")
    with matrix().session(store=store) as session:
        session.advance_to(ids)
    with matrix().session(store=store, retain=0) as session:
        session.advance_to(ids[:50])
        for token in ids[50:90]:
            session.feed(int(token))
        rows = session.advance_to(ids[:150])
        kept = history(session)
        assert kept == [i < 50 or i >= 90 for i in range(150)]
    with matrix().session() as alone:
        alone.prefill(ids[:50])
        for token in ids[50:90]:
            alone.step([int(token)])
        assert same_bits(alone.prefill(ids[90:150])[0], rows)


@pytest.mark.parametrize("last", [1, 2, 5])
def test_a_token_that_is_run_again_keeps_its_class(last: int, tmp_path: Path) -> None:
    """The prompt is a beginning of what the session decoded: the last token's logits are those it had, from whichever
    position the session goes on."""
    ids = tokens_of(6, 90).astype(np.int32)
    store = KVStore(tmp_path / "store", budget="64 MiB")
    with matrix().session(store=store, retain=0) as session:
        session.advance_to(ids[:80])
        rows = [session.feed(int(token)) for token in ids[80:]]
        kept = history(session)
        row = session.advance_to(ids[:-last])
        assert same_bits(row, rows[-1 - last]) and history(session) == kept[:-last]
        assert session.stats.prefilled == 1 and session.stats.matrix == 0


# ---- around it -----------------------------------------------------------------------------------------------------


def test_a_drafter_changes_no_token() -> None:
    model = opened(NANO)
    drafter = Drafter.open(None, model)
    prompt = model.tokenizer.encode("def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return", add_bos=True)
    texts = []
    for options in ({"drafter": drafter}, {}):
        with model.session(400, **options) as session:  # type: ignore[arg-type]
            drafting = 4 if options else "off"
            for seed, temperature in ((None, 0.0), (7, 0.8)):
                done = session.generate(prompt, max_tokens=30, seed=seed, temperature=temperature, drafting=drafting)
                texts.append(done.finish().tokens)
            assert session.stats.matrix == session.stats.prefilled
    assert texts[:2] == texts[2:]


def test_the_ledger_tells_the_classes_apart() -> None:
    with matrix().session() as session:
        session.start_ledger()
        session.prefill(tokens_of(1, 50), logits=None)
        session.step([7])
        ledger = session.ledger()
        assert ledger.complete and (ledger.tokens, ledger.matrix_tokens) == (51, 50)
        assert ledger.to_json()["matrix_tokens"] == 50


# ---- how far from the canonical class, and from the reference -------------------------------------------------------


@pytest.mark.parametrize(("mode", "golden_mode"), [("bf16", "bf16"), ("fp8", "fp8fp4")])
def test_golden_prompts(mode: str, golden_mode: str) -> None:
    """Statistics of tests/model/test_golden.py hold for the class as well: weights of these checkpoints are bfloat16
    numbers or narrower, so only the order of the sums differs."""
    golden, equal = runs(golden_mode), []
    for prompt in ("p5", "p16", "p17", "p40", "p150", "p300"):
        with matrix(mode).session() as session:
            rows = session.prefill(golden[f"{prompt}.input_ids"], logits="all")
        assert rows is not None
        want = golden[f"{prompt}.prefill_logits"]
        assert np.median(row_errors(rows, want)) < (0.15 if mode == "bf16" else 0.2), prompt
        equal.append(rows.argmax(axis=1) == want.argmax(axis=1))
    assert np.concatenate(equal).mean() >= (0.85 if mode == "bf16" else 0.78)
