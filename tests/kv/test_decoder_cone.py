"""Prefills that leave out decoder rows: the bits of the full computation, and what follows costs what it says."""

from __future__ import annotations

import os
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds4v41
from ds4v41 import KVStore, OptionError, StateError, StoreError
from ds4v41 import session as session_module
from ds4v41.drafter import Drafter
from ds4v41.kvstore.format import ENCODER, FULL
from ds4v41.model import Model

from .support import CONE, DECODER, WINDOW, model, reference, session, tokens

SLACK = 24  # the sessions' `retain`
DECODER_CONE = DECODER * (WINDOW - 1) + 1 + SLACK


def check(s: ds4v41.Session, ids: np.ndarray) -> None:
    """Ready, with the bits of a session that computed every row, and so it goes on."""
    assert s._ext.ready and bytes(s._ext.live_bytes()) == reference().after(ids)[1]
    token = tokens(1)
    np.testing.assert_array_equal(s.step(token)[0], reference().after(np.append(ids, token).astype(np.int32))[0])
    s.truncate(len(ids))


# ---- the same bits ---------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 250), min_size=1, max_size=3),
    st.sampled_from([3, 16, 40, 64, 300]),
    st.sampled_from([0, 3, 24, 300]),
)
def test_any_lengths_in_chunks_longer_and_shorter_than_the_cone(parts: list[int], chunk: int, retain: int) -> None:
    ids = tokens(sum(parts), len(parts))
    with session(retain=retain, chunk=chunk) as s:
        at = 0
        for n in parts:
            row = s.prefill(ids[at : at + n])
            at += n
            assert row is not None and row.tobytes() == reference().after(ids[:at])[0].tobytes()
        check(s, ids)


def test_all_logits_are_those_of_every_row() -> None:
    ids = tokens(200)
    with session(chunk=16) as s, session(chunk=16, decoder="all") as whole:
        s.prefill(ids[:70])
        whole.prefill(ids[:70])
        np.testing.assert_array_equal(s.prefill(ids[70:], logits="all"), whole.prefill(ids[70:], logits="all"))


def test_decoder_layers_are_left_out_and_the_ledger_knows() -> None:
    """Window rows from 448 on in the last layer, from 441 on in the source layer; in the last layer one whole row."""
    ids = tokens(480)
    dispatches = {}
    for decoder in ("cone", "all"):
        with session(chunk=16, decoder=decoder) as s:
            s.start_ledger()
            s.prefill(ids)
            ledger = s.ledger()
            assert ledger.complete and ledger.runs == 30 and ledger.tokens == 480
            dispatches[decoder] = {(r.op, r.layer): r.dispatches for r in ledger.rows}
    assert dispatches["all"]["moe", 3] == dispatches["all"]["moe", 4] == 30
    assert dispatches["cone"]["moe", 2] == dispatches["cone"]["compress", 3] == 30
    assert dispatches["cone"]["attn_in", 3] == 3 and dispatches["cone"]["moe", 3] == 2
    assert dispatches["cone"]["moe", 4] == 1


def test_what_the_option_may_be() -> None:
    with pytest.raises(OptionError, match="expected one of cone, all"):
        model().session(64, decoder="none")  # type: ignore[arg-type]


# ---- where it stops half-way -----------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by a progress callback."""


def stopped(ids: np.ndarray, at: int, **options: object) -> ds4v41.Session:
    """A session whose prefill of `ids` was stopped at a chunk's end."""
    s = session(**options)

    def stop(progress: ds4v41.Progress) -> None:
        if progress.processed >= at:
            raise Stop

    with pytest.raises(Stop):
        s.prefill(ids, progress=stop)
    return s


@pytest.mark.parametrize("chunk", [16, 17])
def test_an_encoder_state_goes_on_for_nothing_or_says_what_it_costs(chunk: int) -> None:
    ids = tokens(900)
    s = stopped(ids, 10 * chunk, chunk=chunk)
    at = s.position
    assert at == 10 * chunk and not s._ext.ready and s._ext.encoder_kept(at)
    row = s.advance_to(ids)  # a long continuation: nothing is run twice
    np.testing.assert_array_equal(row, reference().after(ids)[0])
    assert (s.stats.reused, s.stats.prefilled, s.stats.replayed) == (at, 900 - at, 0)
    check(s, ids)

    for n in (1, 10, 15, 30):  # a short one: what the decoder needs is run, and no more
        s = stopped(ids, 10 * chunk, chunk=chunk)
        row = s.advance_to(ids[: at + n])
        np.testing.assert_array_equal(row, reference().after(ids[: at + n])[0])
        assert (s.stats.reused, s.stats.prefilled) == (at, n)
        assert s.stats.replayed <= CONE + SLACK - n + 1 and (s.stats.replayed > 0) == (n < DECODER * (WINDOW - 1) + 1)
        assert (f"decoder window not kept: {s.stats.replayed} replayed" in s.stats.why) == (s.stats.replayed > 0)
        check(s, ids[: at + n])

    s = stopped(ids, 10 * chunk, chunk=chunk)  # a plain step completes by itself
    np.testing.assert_array_equal(s.step([7])[0], reference().after(np.append(ids[:at], 7).astype(np.int32))[0])


def test_rewinds_are_free_within_the_slack_and_replay_the_decoder_beyond() -> None:
    ids = tokens(700)
    for back in (1, SLACK, SLACK + 1, SLACK + 2, 60, 200):
        with session(chunk=128, retain=SLACK) as s:
            s.prefill(ids)
            s.rewind(700 - back)
            assert (s.stats.replayed > 1) == (back > SLACK + 1), back
            if back > SLACK + 1:
                assert "not kept" in s.stats.why and s.stats.replayed <= CONE + SLACK
            check(s, ids[: 700 - back])


def test_a_rewind_with_the_encoder_retained_runs_the_decoders_cone_only() -> None:
    ids = tokens(1400)
    with session(chunk=64, retain=1000) as s:
        cone = s._ext.decoder_cone
        assert cone == DECODER * (WINDOW - 1) + 1 + 256
        s.prefill(ids)
        s.rewind(1000)
        assert s.stats.replayed == cone and s.stats.why.endswith(f"decoder window not kept: {cone} replayed")
        check(s, ids[:1000])
        s.rewind(800)  # within the slack of the replay
        assert s.stats.replayed == 0
        check(s, ids[:800])
    with session(chunk=64, retain=1000, decoder="all") as s:
        s.prefill(ids)
        s.rewind(500)
        assert s.stats.replayed == 0
        check(s, ids[:500])


def test_truncate_refuses_what_would_be_a_replay() -> None:
    with session(chunk=64, retain=SLACK) as s:
        s.prefill(tokens(700))
        with pytest.raises(StateError, match=r"lowest position .* is 675"):
            s.truncate(600)
        s.truncate(675)
        check(s, tokens(700)[:675])


def test_marks_forks_and_files_of_a_stopped_prefill(tmp_path: Path) -> None:
    ids = tokens(600)
    s = stopped(ids, 160, chunk=16)
    twin = s.fork()
    assert not twin._ext.ready
    twin.save(tmp_path / "s")  # completes first
    check(model().load_session(tmp_path / "s", 4096), ids[:160])
    mark = s.mark()
    s.prefill(ids[160:])
    check(s, ids)
    s.truncate(mark)
    check(s, ids[:160])
    check(twin, ids[:160])


def test_an_interrupted_replay_of_the_decoder_is_taken_up_again() -> None:
    ids = tokens(600)
    s = stopped(ids, 160, chunk=16)
    s._ext.cancel()
    with pytest.raises(ds4v41.Cancelled):
        s._ext.complete()
    s._ext.clear_cancel()
    assert s.position == 160 and not s._ext.ready
    assert s._ext.complete() > 0
    check(s, ids[:160])


# ---- stores ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints after so few tokens."""
    monkeypatch.setattr(session_module, "CHECKPOINT_TOKENS", 200)


@pytest.mark.parametrize("suffix", [1, 10, 300, 3000])
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_restores_of_encoder_frontiers(often: None, suffix: int, place: str, tmp_path: Path) -> None:
    ids = tokens(4000)
    with KVStore(tmp_path / "s" if place == "disk" else None, budget="64 MiB") as store:
        for chunk in (16, 100):
            stopped(ids, 600, chunk=chunk, store=store).close()
            kinds = {(item.kind, item.end) for item in store.ls() if item.kind in (FULL, ENCODER)}
            assert all(kind == ENCODER for kind, _ in kinds) and len(kinds) >= 2
        at = max(end for _, end in kinds)
        with session(chunk=64, store=store) as s:
            row = s.advance_to(ids[: at + suffix])
            np.testing.assert_array_equal(row, reference().after(ids[: at + suffix])[0])
            assert s.stats.reused + s.stats.prefilled == at + suffix
            assert s.stats.replayed + s.stats.prefilled <= CONE + SLACK + suffix
            if suffix >= 300:
                assert (s.stats.restored, s.stats.replayed) == (at, 0), s.stats.why
            check(s, ids[: at + suffix])


def test_a_shared_prompt_gets_a_full_frontier(often: None) -> None:
    """Others go on from there with little: what they need is computed there and then."""
    ids = tokens(900)
    store = KVStore(None)
    session(chunk=64, store=store).advance_to(ids, shared=400)
    assert {item.end for item in store.ls() if item.kind == FULL} == {400, 900}
    assert {item.end for item in store.ls() if item.kind == ENCODER} == {256, 656}
    s = session(chunk=64, store=store)
    s.advance_to(np.append(ids[:400], tokens(5, 9)).astype(np.int32))
    assert (s.stats.restored, s.stats.replayed, s.stats.prefilled) == (400, 0, 5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("killed_at", [64, 700, 1500, 3100])
def test_a_process_killed_within_a_prefill_goes_on_from_its_last_frontier(
    often: None, killed_at: int, tmp_path: Path
) -> None:
    ids = tokens(4000)
    model()
    ready, out = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store = KVStore(tmp_path / "s", budget="64 MiB")
            progress = lambda p: os.write(out, struct.pack("<q", p.processed))  # noqa: E731
            session(chunk=64, store=store).prefill(ids, progress=progress)
        finally:
            os._exit(1)
    os.close(out)
    done = 0
    while done < killed_at:
        (done,) = struct.unpack("<q", os.read(ready, 8))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    os.close(ready)
    with KVStore(tmp_path / "s", budget="64 MiB") as store, session(chunk=64, store=store) as s:
        row = s.advance_to(ids)
        np.testing.assert_array_equal(row, reference().after(ids)[0])
        assert s.stats.reused >= killed_at // 256 * 256 and s.stats.replayed == 0
        assert s.stats.reused + s.stats.prefilled == 4000
        assert store.verify().clean


# ---- the drafter -----------------------------------------------------------------------------------------------------


def test_the_drafter_has_its_window_after_a_prefill_and_after_a_replay() -> None:
    """The rows it keeps are in the cone, and the same as when every row is computed."""
    with Model.open(threads=1) as nano:
        drafter = Drafter.open(None, nano)
        ids = np.random.default_rng(3).integers(10, 4000, 1100).astype(np.int32)
        rows = {}

        def drafts(s: ds4v41.Session) -> list[bytes]:
            assert s._ext.draft_context == 128
            s._ext.draft_start(7, 2)
            return [s._ext.draft_row(i, 7)[0].tobytes() for i in range(2)]

        for decoder in ("cone", "all"):
            with nano.session(1200, drafter=drafter, chunk=256, retain=0, decoder=decoder) as s:
                s.prefill(ids)
                rows[decoder] = drafts(s)
                if decoder == "cone":
                    s.rewind(500)
                    assert s.stats.replayed == 500
                    rows["replayed"] = drafts(s)
        assert rows["cone"] == rows["all"]
        with nano.session(1200, drafter=drafter) as s:
            s.prefill(ids[:500])
            assert rows["replayed"] == drafts(s)


def test_full_frontiers_and_files_bring_the_drafters_window_back(tmp_path: Path) -> None:
    """The same drafts as before; state of another drafter is left out, whatever lies beside it."""
    with Model.open(threads=1) as nano:
        drafter = Drafter.open(None, nano)
        ids = np.random.default_rng(4).integers(10, 4000, 301).astype(np.int32)

        def drafts(s: ds4v41.Session) -> list[bytes]:
            s._ext.draft_start(7, 2)
            return [s._ext.draft_row(i, 7)[0].tobytes() for i in range(2)]

        with (
            KVStore(tmp_path / "store", budget="64 MiB") as store,
            nano.session(400, drafter=drafter, store=store) as s,
        ):
            s.prefill(ids)
            s.save(tmp_path / "file")
            want, frontier, rows = drafts(s), s._ext.export_frontier(), s._ext.export_rows(0, 301)
            with nano.session(400, drafter=drafter, store=store) as t:
                t.advance_to(ids)
                assert (t.stats.restored, t.stats.replayed, t._ext.draft_context) == (301, 0, 128)
                assert drafts(t) == want
            with nano.load_session(tmp_path / "file", 400, drafter=drafter) as t:
                assert t._ext.draft_context == 128 and drafts(t) == want
            with nano.load_session(tmp_path / "file", 400) as t:  # without one: its bytes are passed over
                assert t.step([7]).tobytes() == s.step([7]).tobytes()
        state = 16 + drafter.n_stages * 128 * (nano.config.head_dim + nano.config.head_dim // 32)
        assert int(frontier[40:44].view("<u4")[0]) == state
        other, cut = frontier.copy(), frontier.copy()
        other[-state] ^= 1  # the id
        cut[-state + 12] -= 1  # rows
        for damaged, context in ((other, 0), (cut, None)):
            with nano.session(400, drafter=drafter) as t:
                t._ext.begin_restore(0)
                t._ext.import_rows(0, 301, rows)
                t._ext.finish_restore(ids)
                if context is None:
                    with pytest.raises(StoreError, match="drafter state"):
                        t._ext.import_frontier(damaged)
                    assert not t._ext.ready
                    continue
                t._ext.import_frontier(damaged)
                assert t._ext.draft_context == context and t._ext.ready
                assert len(drafts(t)) == 2
