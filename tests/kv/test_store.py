"""KVStore: what it gives back, what it keeps, what it says. The ids are those of public reports of such faults."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ds4v41
from ds4v41 import KVStore, OptionError, StoreError
from ds4v41.kvstore import sizes
from ds4v41.kvstore.format import BLOCK, HEADER_BYTES, PAGE, Prefixes

from .fake import chain, check_content, put
from .support import CONE, model, reference, session, tokens


def used(folder: Path) -> int:
    """As `du` counts: blocks of every file and folder."""
    total = folder.lstat().st_blocks * 512
    for path in folder.rglob("*"):
        total += path.lstat().st_blocks * 512
    return total


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with KVStore(tmp_path / "store", budget="64 MiB") as s:
        yield s


def advance(s: ds4v41.Session, ids: np.ndarray) -> ds4v41.Stats:
    row = s.advance_to(ids)
    np.testing.assert_array_equal(row, reference().after(ids)[0])
    return s.stats


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_new_session_goes_on_where_another_stopped(place: str, tmp_path: Path) -> None:
    with KVStore(tmp_path / "s" if place == "disk" else None, budget="64 MiB") as store:
        ids = tokens(3000)
        advance(session(store=store), ids[:2900])
        stats = advance(session(store=store), ids[:2900])
        assert (stats.reused, stats.prefilled, stats.restored, stats.replayed) == (2900, 0, 2900, 0)
        stats = advance(session(store=store), ids)
        assert (stats.reused, stats.prefilled) == (2900, 100) and "2,900 tokens restored" in stats.why
        # A prompt that is shorter than what is stored, and one that goes another way.
        stats = advance(session(store=store), ids[:1501])
        assert stats.prefilled == 1 and 0 < stats.replayed <= CONE + 24 and "replayed" in stats.why
        stats = advance(session(store=store), np.concatenate([ids[:1300], tokens(40, 7)]))
        assert stats.reused == 1300 and stats.prefilled == 40
        stats = advance(session(store=store), np.concatenate([ids[:1300], tokens(40, 8)]))
        assert stats.reused == 1300 and stats.replayed == 0  # the branch has a frontier now


@pytest.mark.parametrize("suffix", [1, 10, 300])
def test_restores_are_exact_for_any_suffix_and_odd_positions(suffix: int, store: KVStore) -> None:
    ids = tokens(2400)
    for n in (7, 8, 9, 127, 128, 129, 2047, 2048, 2049):
        advance(session(store=store), ids[:n])
    for n in (2049, 2048, 2047, 129, 128, 127, 9, 8, 7):
        stats = advance(
            session(store=store), ids[: n + suffix] if suffix < 300 else np.concatenate([ids[:n], tokens(suffix, n)])
        )
        assert stats.reused >= n - CONE


def test_nothing_changed_in_the_middle_is_reused_and_the_reason_is_given(store: KVStore) -> None:  # BL-001, BL-004
    ids = tokens(600)
    s = session(store=store)
    advance(s, ids)
    changed = ids.copy()
    changed[400] = (changed[400] + 1 - 5) % 300 + 5
    stats = advance(s, changed)
    assert stats.reused == 400 and "diverged at 400 of 600" in stats.why
    stats = advance(s, ids[:570])  # shorter than the live session
    assert stats.prefilled <= 1 and stats.reused >= 569


def test_an_equal_prompt_and_an_exact_prefix_run_the_head_or_one_token(store: KVStore) -> None:  # BL-002
    ids = tokens(300)
    s = session(store=store)
    done = s.generate(ids, max_tokens=8, temperature=0.0, stop=[]).finish()
    again = s.generate(ids, max_tokens=8, temperature=0.0).finish()
    assert again.tokens == done.tokens and s.stats.prefilled <= 1 and s.stats.reused >= 299
    other = session(store=store).generate(ids, max_tokens=8, temperature=0.0).finish()
    assert other.tokens == done.tokens and other.usage.reused_tokens == 300  # BL-010: cold, hit, hit


def test_the_last_reply_is_part_of_what_is_reused(store: KVStore) -> None:  # BL-008
    ids = tokens(300)
    done = session(store=store).generate(ids, max_tokens=20, temperature=0.0).finish()
    turn2 = np.concatenate([ids, np.array(done.tokens, np.int32), tokens(30, 5)])
    stats = advance(session(store=store), turn2)
    assert stats.reused >= 300 + len(done.tokens) - 1 and stats.replayed == 0


def test_two_chats_that_share_a_prefix_keep_their_own_tails(store: KVStore) -> None:  # BL-005, BL-017, BL-074
    system = tokens(300)
    a, b = session(store=store), session(store=store)
    chats = {0: system, 1: system}
    for turn in range(4):
        for which, s in ((0, a), (1, b)):
            before = len(chats[which]) if turn else 0
            chats[which] = np.concatenate([chats[which], tokens(60, 10 * turn + which)])
            stats = advance(s, chats[which])
            assert stats.reused >= before
            if turn == 0 and which == 1:
                assert stats.reused == 300


def test_shared_prefixes_are_stored_once(store: KVStore) -> None:
    system = tokens(BLOCK * 2 - 100)
    advance(session(store=store, chunk=1024), system)
    before = store.stats().page_bytes
    for i in range(5):
        advance(session(store=store), np.concatenate([system, tokens(50, i)]))
    assert store.stats().page_bytes - before <= 5 * 8192


def test_a_put_that_does_not_fit_says_so_and_deletes_nothing(tmp_path: Path) -> None:  # BL-019
    with KVStore(tmp_path / "s", budget="300 KiB") as store:
        s = session(store=store, chunk=2048)  # the first chunk of the second prompt still fits
        advance(s, tokens(900))
        first = s.stats.stored
        assert first is not None and first.kept
        advance(s, tokens(4000, 1))
        result = s.stats.stored
        assert result is not None and not result.kept and "not kept" in result.why
        assert store.stats().pages > 0 and used(tmp_path / "s") <= 300 << 10
        deleted = 0
        for seed in range(2, 6):  # each fits when older ones go
            advance(s, tokens(1500, seed))
            assert s.stats.stored is not None and s.stats.stored.kept
            deleted += s.stats.stored.deleted
        assert deleted > 0
        assert advance(session(store=store), tokens(1500, 5)).restored == 1500


def test_a_hot_prefix_survives_many_one_shots(tmp_path: Path) -> None:  # BL-020, BL-022
    with KVStore(tmp_path / "s", budget="700 KiB") as store:
        hot = tokens(200)
        advance(session(store=store), hot)
        for i in range(20):
            advance(session(store=store, chunk=1024), np.concatenate([hot, tokens(700, i)]))
            assert used(tmp_path / "s") <= 700 << 10
        advance(session(store=store), tokens(800, 77))
        assert advance(session(store=store), hot).restored == 200


def test_what_is_needed_next_is_not_deleted_by_saving_the_rest(tmp_path: Path) -> None:  # BL-023
    with KVStore(tmp_path / "s", budget="400 KiB") as store:
        a, b = tokens(1200, 1), tokens(1200, 2)
        s = session(store=store, chunk=2048)
        advance(s, a)
        advance(s, b)
        stats = advance(s, np.concatenate([a, tokens(400, 3)]))
        assert stats.reused in (0, 1200)  # all of it or, had it been deleted, nothing: never a part that is wrong
        assert used(tmp_path / "s") <= 400 << 10


def test_writes_are_the_new_rows_only(store: KVStore) -> None:  # BL-026
    s = session(store=store)
    ids = tokens(200)
    row_bytes = s._ext.rows_bytes(0, 2000) / 2000
    for turn in range(12):
        ids = np.concatenate([ids, tokens(150, turn)])
        advance(s, ids)
    stats = store.stats()
    frontiers = 13 * 3500
    assert stats.written_bytes <= 2000 * (row_bytes + 4) + 26 * 256 + frontiers
    assert stats.written_bytes >= 2000 * row_bytes


def test_the_budget_counts_everything_below_the_folder(tmp_path: Path) -> None:  # BL-028, BL-029
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    (folder / "notes.txt").write_bytes(b"x" * 100_000)
    budget = 600 << 10
    with KVStore(folder, budget=budget) as store:
        other = model(2).session(4096, chunk=1024, store=store)
        other.advance_to(tokens(1500, 9))
        for i in range(8):
            advance(session(store=store, chunk=1024), tokens(700, i))
            assert used(folder) <= budget
        stats = store.stats()
        assert stats.foreign_bytes >= 100_000 and stats.disk_bytes <= budget
        assert (folder / "notes.txt").exists()
        assert advance(session(store=store), tokens(700, 7)).restored == 700  # still on


def test_another_model_mode_or_setting_is_never_used(store: KVStore) -> None:
    ids = tokens(300)
    advance(session(store=store), ids)
    for other in (model(2), ds4v41.Model.open(model().path, activations="fp32", threads=1)):
        s = other.session(4096, store=store)
        s.advance_to(ids)
        assert s.stats.reused == 0
    assert model().store_root != model(2).store_root
    assert store.stats().roots == 3 and store.other_bytes(model().store_root) > 0


def test_opening_never_deletes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # BL-031
    with KVStore(tmp_path / "s", budget="4 MiB") as store:
        for i in range(3):
            advance(session(store=store, chunk=1024), tokens(900, i))
        before = store.stats()
    with caplog.at_level(logging.WARNING), KVStore(tmp_path / "s", budget="200 KiB") as store:
        assert "more than its budget" in caplog.text
        after = store.stats()
        assert (after.pages, after.frontiers) == (before.pages, before.frontiers)
        plan = store.prune(dry_run=True)
        assert plan.names and store.stats().pages == before.pages
        done = store.prune()
        assert done.names == plan.names and done.disk_bytes <= 200 << 10 and used(tmp_path / "s") <= 200 << 10


def test_a_smaller_budget_holds_also_where_everything_is_reused(tmp_path: Path) -> None:
    with KVStore(tmp_path / "s", budget="64 MiB") as store:
        for i in range(6):
            assert put(store, chain(i, 8000)).kept
    with KVStore(tmp_path / "s", budget="1 MiB") as store:
        assert check_content(store, chain(5, 8000)) == 8000
        again = put(store, chain(5, 8000))
        assert again.kept and again.deleted > 0 and used(tmp_path / "s") <= 1 << 20
        assert check_content(store, chain(5, 8000)) == 8000  # others went
        assert put(store, chain(5, 8000)).deleted == 0
    with KVStore(tmp_path / "s", budget="300 KiB") as store:
        put(store, chain(5, 8000))  # not even this one fits
        assert used(tmp_path / "s") <= 300 << 10 and store.verify().clean
        (tmp_path / "s" / "foreign").write_bytes(bytes(1 << 20))
        store.stats()
        before = store.ls()
        put(store, chain(5, 8000))  # nothing that could be deleted would help
        assert store.ls() == before


@pytest.mark.parametrize("kind", ["page", "frontier"])
def test_a_folder_in_the_place_of_an_object_is_moved_away(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tokens(3000)
    with KVStore(tmp_path / "s", budget="64 MiB") as store:
        advance(session(store=store, context=8192), ids)
        last = max((i for i in store.ls() if (i.kind == PAGE) == (kind == "page")), key=lambda i: i.end)
        victim = store._files.path(last.id, last.kind)  # type: ignore[union-attr]
        victim.unlink()
        victim.mkdir()
        (victim / "mine").write_text("keep me")
        assert advance(session(store=store, context=8192), ids).restored < 3000  # found, and put there again
        assert advance(session(store=store, context=8192), ids).restored == 3000 and store.verify().clean
        (moved,) = (tmp_path / "s").glob("not-an-object.*")
        assert (moved / "mine").read_text() == "keep me" and f"moved to {moved.name}" in caplog.text


def test_the_default_budget_depends_on_the_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # BL-032
    monkeypatch.setattr(sizes.os, "statvfs", lambda _: SimpleNamespace(f_bavail=10 << 18, f_frsize=4096))
    assert KVStore(tmp_path / "s").budget <= (10 << 28) + (1 << 20)
    monkeypatch.setattr(sizes.os, "statvfs", lambda _: SimpleNamespace(f_bavail=10 << 28, f_frsize=4096))
    assert KVStore(tmp_path / "t").budget == 64 << 30


def test_closing_one_session_or_model_changes_nothing_for_others(store: KVStore) -> None:  # BL-034
    ids = tokens(300)
    with ds4v41.Model.open(model().path, threads=1) as other:
        s = other.session(4096, store=store)
        s.advance_to(ids)
        s.close()
    assert advance(session(store=store), ids).reused == 300


def test_old_frontiers_are_thinned_and_the_newest_stay(store: KVStore) -> None:
    s = session(store=store, retain=0)
    ids = tokens(50)
    for turn in range(60):
        ids = np.concatenate([ids, tokens(30, turn)])
        s.advance_to(ids)
    found = store.find(Prefixes(model().store_root, ids))
    assert found.reach == len(ids) and len(found.frontiers) <= 8 + 4 * 3
    assert sorted(found.frontiers)[-8:] == [len(ids) - 30 * i for i in range(7, -1, -1)]


def test_options_and_errors_are_clear(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="path"):
        KVStore(3)  # type: ignore[arg-type]
    for bad in ("64 parsecs", 0, -1, True, "0"):
        with pytest.raises(OptionError, match="budget"):
            KVStore(None, budget=bad)
    with pytest.raises(OptionError, match="store"):
        model().session(100, store="here")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match="file"):
        KVStore(tmp_path / "file")
    assert "budget" in repr(KVStore(None))


def test_the_folder_is_private(store: KVStore) -> None:
    advance(session(store=store), tokens(50))
    assert store.path is not None
    for path in [store.path, *store.path.rglob("*")]:
        assert os.lstat(path).st_mode & 0o077 == 0, path


def test_a_vanished_page_is_a_miss_not_an_error(store: KVStore) -> None:
    ids = tokens(2500)
    advance(session(store=store), ids)
    pages = [i for i in store.ls() if i.kind == PAGE]
    store._files.remove(pages[-1].id, PAGE)
    stats = advance(session(store=store), ids)
    assert 0 < stats.reused < 2500 and "could not be used" in stats.why


def test_a_page_that_goes_on_beyond_the_context_is_no_error(store: KVStore) -> None:
    """A prompt shares the first part of a stored page whose end does not fit into this session."""
    ids = tokens(4000)
    advance(session(store=store, chunk=512), ids)
    prompt = np.concatenate([ids[:2600], tokens(10, 9)])
    s = session(store=store, chunk=512, context=2700)
    row = s.advance_to(prompt)
    np.testing.assert_array_equal(row, reference().after(prompt)[0])
    assert s.stats.restored == 2048


@pytest.mark.parametrize("live", [1, 96, 350])
def test_a_damaged_page_does_not_touch_what_the_session_holds(live: int, store: KVStore) -> None:
    """Its first rows are those of tokens that the session has already: nothing is written over them, since a page is
    known to be sound only when all of it was read."""
    ids = tokens(400, 3)
    with session(store=store) as first, session(store=store) as s:
        for at in range(0, live, 16):
            s._ext.run(ids[at : min(at + 16, live)])  # the store hears nothing of it
        advance(first, ids)
        assert store.path is not None
        (page,) = store.path.rglob("*.page")
        data = bytearray(page.read_bytes())
        page.write_bytes(bytes(data[:HEADER_BYTES]) + bytes(b ^ 0x15 for b in data[HEADER_BYTES:]))
        row = s.advance_to(ids)
        assert "could not be used" in s.stats.why and s.stats.restored == 0 and s.stats.reused == live
        want, state = reference().after(ids)
        np.testing.assert_array_equal(row, want)
        assert bytes(s._ext.live_bytes()) == state
