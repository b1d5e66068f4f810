"""A tree in memory above the folder's, and folders that nobody may write to."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from ds4v41 import KVStore, OptionError, StoreError
from ds4v41.kvstore import files
from ds4v41.kvstore.format import PAGE

from .fake import check_content, put
from .support import reference, session, tokens


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))}


def stored(folder: Path, n: int = 2500) -> None:
    with KVStore(folder, budget="64 MiB") as store, session(store=store) as s:
        s.advance_to(tokens(n))


def test_a_read_only_store_restores_and_changes_nothing(tmp_path: Path) -> None:
    stored(tmp_path / "s")
    before = everything(tmp_path / "s")
    with KVStore(tmp_path / "s", read_only=True) as store:
        with session(store=store) as s:
            row = s.advance_to(tokens(2600))
            assert (row == reference().after(tokens(2600))[0]).all()
            assert s.stats.restored == 2500 and s.stats.prefilled == 100
            assert s.stats.stored is not None and not s.stats.stored.kept
            assert "read-only (read_only=True)" in s.stats.stored.why
        assert store.verify().checked > 0 and store.stats().read_only and "read-only" in str(store.stats())
        assert store.prune(dry_run=True, budget="1 MiB").dry_run
        with pytest.raises(StoreError, match="read-only"):
            store.prune()
    assert everything(tmp_path / "s") == before


def test_damage_in_a_read_only_store_is_named_and_left(tmp_path: Path) -> None:
    stored(tmp_path / "s")
    page = next(iter((tmp_path / "s" / "objects").glob("*.page")))
    data = bytearray(page.read_bytes())
    data[-1] ^= 1
    page.write_bytes(data)
    before = everything(tmp_path / "s")
    with KVStore(tmp_path / "s", read_only=True) as store, session(store=store) as s:
        row = s.advance_to(tokens(2500))
        assert (row == reference().after(tokens(2500))[0]).all()
        assert store.stats().damaged and s.stats.restored < 2500
    assert everything(tmp_path / "s") == before


@pytest.mark.parametrize("error", [13, 30])
def test_a_folder_that_cannot_be_written_to_is_opened_read_only(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path / "s")
    real = os.open

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & (os.O_WRONLY | os.O_CREAT):
            raise OSError(error, os.strerror(error), str(path))
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(files.os, "open", refuse)
    with caplog.at_level(logging.WARNING), KVStore(tmp_path / "s") as store, session(store=store) as s:
        assert store.read_only == os.strerror(error) and os.strerror(error) in caplog.text
        s.advance_to(tokens(2500))
        assert s.stats.restored == 2500
    with pytest.raises(StoreError, match="no store here"):
        KVStore(tmp_path / "nowhere", read_only=True)


def test_sessions_share_memory_above_the_folder(tmp_path: Path) -> None:
    """Nothing is read from disk for what this process put; what others put is found as well; both go on together."""
    stored(tmp_path / "s", 1500)
    with KVStore(tmp_path / "s", budget="64 MiB", memory="32 MiB") as store:
        assert store._above is not None
        with session(store=store) as s:
            s.advance_to(tokens(2500))
            assert s.stats.restored == 1500 and s.stats.prefilled == 1000
        assert "in memory above it" in str(store.stats()) and "in memory above it" in repr(store)
        assert all(item.begin >= 1500 for item in store._above.ls() if item.kind == PAGE)  # only what was new
        newest = [item for item in store.ls() if item.end > 1500]
        for item in newest:
            store._files.remove(item.id, item.kind)  # the folder does not have it any more: memory does
        with session(store=store) as s:
            row = s.advance_to(tokens(2600))
            assert (row == reference().after(tokens(2600))[0]).all()
            assert s.stats.restored == 2500 and s.stats.prefilled == 100


def test_what_the_folder_refuses_stays_in_memory(tmp_path: Path) -> None:
    stored(tmp_path / "s", 500)
    with KVStore(tmp_path / "s", read_only=True, memory="32 MiB") as store:
        with session(store=store) as s:
            s.advance_to(tokens(2500))
            assert s.stats.stored is not None and s.stats.stored.kept
            assert "in memory only" in s.stats.stored.why and "read-only" in s.stats.stored.why
        with session(store=store) as s:
            row = s.advance_to(tokens(2500))
            assert (row == reference().after(tokens(2500))[0]).all() and s.stats.restored == 2500


def test_memory_keeps_its_own_budget(tmp_path: Path) -> None:
    with KVStore(tmp_path / "s", budget="64 MiB", memory="1 MiB") as store:
        for i in range(40):
            assert put(store, tokens(1500, seed=i)).kept
            assert store.stats().memory_bytes <= 1 << 20
            assert check_content(store, tokens(1500, seed=0)) == 1500


def test_options(tmp_path: Path) -> None:
    for wrong in ({"memory": "much"}, {"read_only": 1}):
        with pytest.raises(OptionError):
            KVStore(tmp_path / "s", **wrong)  # type: ignore[arg-type]
    for wrong in ({"memory": "1 MiB"}, {"read_only": True}):
        with pytest.raises(OptionError, match="path"):
            KVStore(None, **wrong)  # type: ignore[arg-type]
