"""Rewind by replay, forks, saved sessions: exact, at every position, and cheap where they promise to be."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

import ds4v41
from ds4v41 import ContextError, OptionError, StateError, StoreError
from ds4v41.kvstore.format import HEADER_BYTES, Header

from .support import CONE, WINDOW, model, reference, session, tokens


def check(s: ds4v41.Session, ids: np.ndarray, more: int = 3) -> None:
    assert bytes(s._ext.live_bytes()) == reference().after(ids)[1]
    for i in range(more):
        token = tokens(1, i)
        ids = np.append(ids, token).astype(np.int32)
        np.testing.assert_array_equal(s.step(token)[0], reference().after(ids)[0])


@pytest.mark.parametrize("to", [1, 2, 7, 8, 9, CONE - 1, CONE, CONE + 1, 100, 201, 302, 399, 400])
def test_rewind_beyond_the_window_replays_the_cone_only(to: int) -> None:
    ids = tokens(400)
    s = session(retain=4, chunk=7)
    s.prefill(ids, None)
    s.rewind(to)
    assert s.stats.replayed <= min(to, CONE + 4) and s.stats.reused == to
    if s.stats.replayed > 1:
        assert f"window rows not kept: {s.stats.replayed:,} replayed" in s.stats.why
    check(s, ids[:to])


@pytest.mark.parametrize("back", [1, WINDOW // 2, WINDOW - 1, WINDOW, WINDOW + 1])
def test_short_rewinds_after_the_ring_wrapped_many_times(back: int) -> None:  # BL-016
    ids = tokens(1000)
    s = session(retain=24, chunk=16)
    s.prefill(ids, None)
    s.rewind(1000 - back)
    assert s.stats.replayed <= 1
    check(s, ids[: 1000 - back])


def test_an_interrupted_replay_leaves_a_session_that_continues_exactly() -> None:
    ids = tokens(600)
    s = session(retain=0, chunk=16)
    s.prefill(ids, None)
    s._ext.cancel()
    with pytest.raises(ds4v41.Cancelled):
        s._ext.rewind(301)
    assert s.position == 301 and not s._ext.ready
    s._ext.clear_cancel()
    check_row = s.step(tokens(1))[0]
    np.testing.assert_array_equal(check_row, reference().after(np.append(ids[:301], tokens(1)).astype(np.int32))[0])


def test_marks_survive_a_replay_and_belong_to_their_session() -> None:
    ids = tokens(500)
    s = session(retain=0, chunk=16)
    s.prefill(ids[:99], None)
    mark = s.mark()
    s.prefill(ids[99:130], None)
    late = s.mark()
    s.prefill(ids[130:], None)
    s.rewind(250)
    twin = s.fork()
    with pytest.raises(StateError, match="another session"):
        twin.truncate(mark)
    s.truncate(late)
    check(s, ids[:130], more=1)
    s.truncate(mark)
    check(s, ids[:99])


def test_a_fork_shares_memory_and_no_bits() -> None:
    ids = tokens(6000)
    parent = session(context=1 << 16, chunk=512, retain=64)
    parent.prefill(ids, None)
    before = parent._ext.own_bytes
    assert before > 400_000
    forks = [parent.fork() for _ in range(10)]
    assert parent._ext.shares and parent._ext.shared_bytes == before and parent._ext.own_bytes == 0
    assert all(f._ext.own_bytes == 0 for f in forks)
    rows = [f.step(tokens(1, seed=i))[0] for i, f in enumerate(forks)]
    assert all(f._ext.own_bytes <= 20 * 65536 for f in forks)  # the segments it wrote to
    parent_row = parent.step(tokens(1, seed=99))[0]
    fresh = session(context=1 << 16, chunk=512, retain=64)
    fresh.prefill(ids, None)
    mark = fresh.mark()
    for seed, row in [*enumerate(rows), (99, parent_row)]:
        fresh.truncate(mark)
        np.testing.assert_array_equal(fresh.step(tokens(1, seed=seed))[0], row)
    for f in forks:
        f.close()
    assert parent._ext.shared_bytes == 0


def test_a_long_line_of_forks_keeps_few_files_open_and_its_bits() -> None:
    s = session(context=1 << 14, chunk=64)
    ids = tokens(64)
    s.prefill(ids, None)
    files = len(os.listdir("/dev/fd"))
    for i in range(100):
        child = s.fork()
        s.close()
        s = child
        ids = np.append(ids, tokens(9, i)).astype(np.int32)
        s.prefill(ids[-9:], None)
    assert len(os.listdir("/dev/fd")) < files + 40
    check(s, ids)


def test_forks_run_in_threads_of_their_own() -> None:
    ids = tokens(700)
    parent = session(chunk=64)
    parent.prefill(ids, None)
    forks = [parent.fork() for _ in range(4)]
    rows: dict[int, np.ndarray] = {}

    def work(i: int) -> None:
        rows[i] = forks[i].prefill(tokens(200, i))[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(4):
        want = reference().after(np.concatenate([ids, tokens(200, i)]))[0]
        np.testing.assert_array_equal(rows[i], want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_does_not_write_into_its_parents_session() -> None:
    ids = tokens(300)
    s = session(chunk=16)
    s.prefill(ids, None)
    want_child = reference().after(np.concatenate([ids, tokens(100, 1)]))[0]
    want_parent = reference().after(np.concatenate([ids, tokens(100, 2)]))[0]
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        row = s.prefill(tokens(100, 1))[0]
        os.write(go, b"x")
        os._exit(0 if (row == want_child).all() else 1)
    os.read(ready, 1)
    row = s.prefill(tokens(100, 2))[0]
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(row, want_parent)


@pytest.mark.parametrize("n", [0, 1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 127, 300])  # BL-050, BL-011
def test_save_and_load_continue_with_the_same_bits(n: int, tmp_path: Path) -> None:
    ids = tokens(n)
    s = session()
    if n:
        s.prefill(ids, None)
    size = s.save(tmp_path / "s")
    assert size == (tmp_path / "s").stat().st_size
    loaded = model().load_session(tmp_path / "s", 4096)
    if n:
        np.testing.assert_array_equal(loaded.advance_to(ids), reference().after(ids)[0])
        assert loaded.stats.prefilled == 0 and loaded.stats.reused == n  # only the head is run
    check(loaded, ids)


def test_damage_in_any_section_of_a_session_file_is_found(tmp_path: Path) -> None:  # BL-025
    s = session()
    s.prefill(tokens(300), None)
    path = tmp_path / "s"
    s.save(path)
    whole = path.read_bytes()
    header = Header.unpack(whole[:HEADER_BYTES], "")
    ends = [8, 100, HEADER_BYTES, header.payload_offset, header.payload_offset + header.extra, len(whole)]
    for end in ends:
        path.write_bytes(whole[: end - 1])
        with pytest.raises(StoreError):
            model().load_session(path, 4096)
        flipped = bytearray(whole)
        flipped[end - 1] ^= 16
        path.write_bytes(flipped)
        with pytest.raises(StoreError):
            model().load_session(path, 4096)
    path.write_bytes(whole)
    with pytest.raises(ContextError, match="300"):
        model().load_session(path, 299)
    with pytest.raises(StoreError, match="another model"):
        model(2).load_session(path, 4096)
    other = ds4v41.Model.open(model().path, activations="fp32", threads=1)
    with pytest.raises(StoreError, match="fp32"):
        other.load_session(path, 4096)
    with pytest.raises(OptionError):
        s.save(3)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="could not be saved"):
        s.save(tmp_path / "no" / "such" / "folder")


def test_a_mark_like_loss_is_refused_by_truncate_and_mended_by_rewind() -> None:  # BL-014
    ids = tokens(500)
    s = session(retain=0, chunk=16)
    s.prefill(ids, None)
    with pytest.raises(StateError, match="gone"):
        s.truncate(100)
    assert s.position == 500
    s.rewind(100)
    check(s, ids[:100])
