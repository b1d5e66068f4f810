"""A shared file system behind stores of several machines: what one put the others find; failures and damage there are
reported and harm nothing here."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from asyncio import CancelledError
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from ds4v41 import KVStore, OptionError, StoreError
from ds4v41.kvstore import remote as module
from ds4v41.kvstore import sender
from ds4v41.kvstore.format import FULL, Prefixes

from .fake import ROOT, chain, check_content, put
from .support import reference, session, tokens


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/shared"
        return
    yield "memory://shared"
    fs = fsspec.filesystem("memory")
    if fs.exists("/shared"):
        fs.rm("/shared", recursive=True)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts down the calls that a file system still answers: {"cat_file": 2}."""
    left: dict[str, int] = {}
    for kind in ("memory", "file"):
        cls = fsspec.get_filesystem_class(kind)
        for name in ("cat_file", "ls", "info", "open"):
            real = getattr(cls, name)

            def call(self: Any, *args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
                if _name in left:
                    left[_name] -= 1
                    if left[_name] < 0:
                        raise TimeoutError("the network is gone")
                return _real(self, *args, **kwargs)

            monkeypatch.setattr(cls, name, call)
    return left


def objects(url: str) -> list[str]:
    fs, base = fsspec.core.url_to_fs(url)
    return sorted(fs.find(base))


def test_two_machines_share_what_either_computed(url: str, tmp_path: Path) -> None:
    ids = tokens(5000)
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store, session(store=store, context=8192) as s:
        s.advance_to(ids[:4500])
    with KVStore(tmp_path / "b", budget="64 MiB", remote=url) as store:
        with session(store=store, context=8192) as s:
            row = s.advance_to(ids)
            assert (s.stats.restored, s.stats.prefilled, s.stats.replayed) == (4500, 500, 0), s.stats.why
            np.testing.assert_array_equal(row, reference_row(ids))
        assert "no failure" in store.stats().remote and url in str(store.stats()) and url in repr(store)
        assert store._remote is not None and store._remote.fetched_bytes > 0
        assert store.verify().clean
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store, session(store=store, context=8192) as s:
        s.advance_to(ids)  # what b added, on top of what a has itself
        assert (s.stats.restored, s.stats.prefilled) == (5000, 0), s.stats.why
        assert store._remote is not None
        fetched = store._remote.fetched_bytes
        s.rewind(0)
        s.advance_to(ids)
        assert store._remote.fetched_bytes == fetched  # it is here now
    with KVStore(tmp_path / "c", budget="64 MiB") as store, session(store=store, context=8192) as s:
        s.advance_to(ids[:100])
        assert s.stats.restored == 0


def reference_row(ids: np.ndarray) -> np.ndarray:
    with session(context=8192, decoder="all") as s:
        return s.advance_to(ids)


def test_nothing_is_sent_twice_and_names_are_those_of_the_content(url: str, tmp_path: Path) -> None:
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as a, KVStore(tmp_path / "b", remote=url) as b:
        assert put(a, chain(1, 3000)).kept and a.flush()
        there = objects(url)
        assert len(there) == 3 and a._remote is not None and b._remote is not None
        assert put(b, chain(1, 3000)).kept and b.flush()  # computed there as well, without looking
        assert objects(url) == there and b._remote.sent_bytes == 0
        assert put(a, chain(1, 3100)).kept and a.flush()
        assert len(objects(url)) == 5


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "other"])
def test_damage_there_is_named_never_used_and_healed_by_the_next_who_computes_it(
    how: str, url: str, tmp_path: Path
) -> None:
    ids = chain(1, 5000)
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store:
        assert put(store, ids).kept
    fs, _ = fsspec.core.url_to_fs(url)
    names = objects(url)
    for victim in names:
        whole = fs.cat_file(victim)
        other = fs.cat_file(next(n for n in names if n != victim))
        flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
        fs.pipe_file(victim, {"flip": flipped, "cut": whole[:-1], "empty": b"", "other": other}[how])
        folder = tmp_path / victim[-20:]
        with KVStore(folder, budget="64 MiB", remote=url) as store:
            report = store.verify()
            assert not report.clean and victim.rpartition("/")[2] in str(report.damaged)
        with KVStore(folder, budget="64 MiB", remote=url) as store:
            assert check_content(store, ids) < 5000 or victim.endswith(".full")
            found = store.find(Prefixes(ROOT, ids))
            assert found.whole < 5000 or 5000 not in found.frontiers
            assert victim.rpartition("/")[2] in str(store.stats().damaged)
            assert put(store, ids).kept and check_content(store, ids) == 5000
            assert store.verify().clean
        assert len(fs.cat_file(victim)) == len(whole)


@pytest.mark.parametrize("calls", range(4))
@pytest.mark.parametrize("name", ["cat_file", "ls"])
def test_a_remote_that_fails_in_the_middle_of_reading(
    name: str, calls: int, url: str, tmp_path: Path, refuse: dict[str, int]
) -> None:
    ids = tokens(4500)
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store, session(store=store, context=8192) as s:
        s.advance_to(ids)
    refuse[name] = calls
    with KVStore(tmp_path / "b", budget="64 MiB", remote=url) as store, session(store=store, context=8192) as s:
        row = s.advance_to(ids)
        np.testing.assert_array_equal(row, reference_row(ids))
        assert s.stats.reused + s.stats.prefilled == 4500
        if refuse[name] < 0:
            assert "the network is gone" in store.stats().remote
        refuse.clear()
        assert not store.stats().damaged and store.verify().clean


@pytest.mark.parametrize("calls", range(3))
def test_what_could_not_be_sent_is_kept_and_sent_later(
    calls: int, url: str, tmp_path: Path, refuse: dict[str, int], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    ids = chain(1, 5000)
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store:
        refuse["open"] = calls
        assert put(store, ids).kept and check_content(store, ids) == 5000 and not store.flush()
        assert "the network is gone" in store.stats().remote and "wait to be sent" in store.stats().remote
        assert put(store, chain(2, 300)).kept and not store.flush() and refuse["open"] == -1  # left alone for a while
        refuse.clear()
        monkeypatch.setattr(module, "PAUSE", 0.0)
        assert store._remote is not None
        store._remote.until = 0.0
        assert put(store, chain(3, 300)).kept and store.flush()
        assert "no failure" in store.stats().remote and "to be sent" not in store.stats().remote
        refuse["open"] = 0
        assert put(store, chain(4, 300)).kept
    assert "closed before all was sent" in caplog.text
    refuse.clear()
    with KVStore(tmp_path / "b", budget="64 MiB", remote=url) as store:
        for i, n in ((1, 5000), (2, 300), (3, 300)):
            assert store.find(Prefixes(ROOT, chain(i, n))).frontiers.keys() >= {n}
            assert check_content(store, chain(i, n)) == n


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The remote takes nothing before this is set."""
    free = threading.Event()
    for kind in ("memory", "file"):
        cls = fsspec.get_filesystem_class(kind)
        real = cls.info

        def info(self: Any, *args: Any, _real: Any = real, **kwargs: Any) -> Any:
            if threading.current_thread().name == "ds4v41-remote":
                assert free.wait(60)
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(cls, "info", info)
    return free


def test_no_call_waits_for_what_is_sent(url: str, tmp_path: Path, slow: threading.Event) -> None:
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store:
        assert put(store, chain(1, 3000)).kept and put(store, chain(2, 3000)).kept
        assert check_content(store, chain(1, 3000)) == 3000 and store.stats().frontiers == 2
        assert "6 objects wait to be sent" in store.stats().remote and objects(url) == []
        slow.set()
        assert store.flush() and len(objects(url)) == 6 and "to be sent" not in store.stats().remote
    assert not [t for t in threading.enumerate() if t.name == "ds4v41-remote"]


def test_what_went_before_it_was_sent_is_counted(url: str, tmp_path: Path, slow: threading.Event) -> None:
    with KVStore(tmp_path / "a", budget="1 MiB", remote=url) as store:
        assert put(store, chain(0, 8000)).kept
        for i in range(1, 6):
            assert put(store, chain(i, 8000)).kept
        slow.set()
        assert store.flush()
        assert "were deleted here before they were sent" in store.stats().remote
        assert store.verify().clean


def test_what_another_process_could_not_send_is_sent_with_the_same_prompt(
    url: str, tmp_path: Path, refuse: dict[str, int]
) -> None:
    ids = chain(1, 5000)
    refuse["open"] = 0
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store:
        assert put(store, ids).kept
        report = store.verify()
        assert not report.clean and "wait to be sent" in str(report.damaged)  # what was asked for is not there
    refuse.clear()
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store:
        assert put(store, ids).why == "it was stored before" and store.flush()
        assert len(objects(url)) == 4 and store._remote is not None
        sent = store._remote.sent_bytes
        assert put(store, ids).kept and store.flush() and store._remote.sent_bytes == sent > 0
    with KVStore(tmp_path / "b", budget="64 MiB", remote=url) as store:
        assert check_content(store, ids) == 5000


def test_a_remote_that_never_answers_does_not_hold_up_the_end(
    url: str, tmp_path: Path, slow: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "PATIENCE", 0.3)
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store:
        assert put(store, chain(1, 3000)).kept
    assert "closed before all was sent" in caplog.text

    def interrupted(self: Any, patience: float | None = None) -> bool:
        raise KeyboardInterrupt

    store = KVStore(tmp_path / "a", budget="64 MiB", remote=url)
    assert put(store, chain(1, 3000)).kept
    monkeypatch.setattr(sender.Sender, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    assert store._sender is not None and store._sender._closed
    with pytest.raises(StoreError):
        store.ls()
    slow.set()


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Strange(BaseException):
    pass


@pytest.mark.parametrize("error", [Mute(), Strange("strange"), CancelledError(), RuntimeError("x" * 10**6)])
def test_odd_failures_of_a_file_system(
    error: BaseException, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store:
        assert store._remote is not None
        with monkeypatch.context() as patch:
            patch.setattr(type(store._remote._fs), "open", fail)
            assert put(store, chain(1, 300)).kept and not store.flush()
            said = store.stats().remote
            assert type(error).__name__ in said and "wait to be sent" in said and len(said) < 1000
        store._remote.until = 0.0
        assert store.flush() and "no failure" in store.stats().remote
        if isinstance(error, Strange):
            return  # in a call of the user's own thread it is the user's
        with monkeypatch.context() as patch:
            patch.setattr(type(store._remote._fs), "ls", fail)
            assert not store.verify().clean and type(error).__name__ in store.stats().remote
            store._remote.until = 0.0
            assert not store.find(Prefixes(ROOT, chain(2, 300))).pages


def test_a_pipe_in_the_remote_is_not_read(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared"
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store:
        assert put(store, chain(1, 300)).kept and store.flush()
    victim = next((tmp_path / "shared").rglob("*.page"))
    victim.unlink()
    os.mkfifo(victim)
    with KVStore(tmp_path / "b", budget="64 MiB", remote=url) as store:
        assert store.verify().checked == 1 and check_content(store, chain(1, 300)) == 0


def test_a_forgotten_store_is_not_kept_by_its_sender(url: str, tmp_path: Path, slow: threading.Event) -> None:
    store = KVStore(tmp_path / "a", budget="64 MiB", remote=url)
    assert put(store, chain(1, 300)).kept
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    slow.set()


def test_a_store_that_nobody_closed_sends_what_waits(tmp_path: Path) -> None:
    code = f"""
from tests.kv.fake import chain, put
from ds4v41 import KVStore
store = KVStore({str(tmp_path / "a")!r}, remote="file://{tmp_path}/shared")
assert put(store, chain(1, 5000)).kept
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])
    assert len(objects(f"file://{tmp_path}/shared")) == 4


def test_the_budget_is_that_of_the_folder(url: str, tmp_path: Path) -> None:
    with KVStore(tmp_path / "a", budget="64 MiB", remote=url) as store:
        for i in range(6):
            assert put(store, chain(i, 8000)).kept
    with KVStore(tmp_path / "b", budget="1 MiB", remote=url) as store:
        for i in range(6):
            assert check_content(store, chain(i, 8000)) > 0
            assert store.stats().disk_bytes <= 1 << 20
        assert store.verify().clean
    assert len(objects(url)) > 20  # nothing was deleted there


def test_a_memory_store_and_a_memory_tree_go_with_it(url: str, tmp_path: Path) -> None:
    ids = chain(1, 3000)
    with KVStore(None, remote=url) as store:
        assert put(store, ids).kept
    for other in (KVStore(None, remote=url), KVStore(tmp_path / "b", memory="8 MiB", remote=url)):
        with other as store:
            assert check_content(store, ids) == 3000 and store.find(Prefixes(ROOT, ids)).frontiers[3000].kind == FULL


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, match in (
        ({"remote": "/tmp/x"}, "URL"), ({"remote": 3}, "URL"), ({"remote": "nosuch://x"}, "nosuch"),
        ({"remote": "memory://x", "read_only": True}, "read_only"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=match):
            KVStore(tmp_path / "s", **wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="remote="):
        KVStore("s3://bucket/x")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(OptionError, match=r"ds4v41\[remote\]"):
        KVStore(tmp_path / "s", remote="memory://x")
    assert not (tmp_path / "s").exists()


def test_both_references_agree() -> None:
    np.testing.assert_array_equal(reference_row(tokens(500)), reference().after(tokens(500))[0])


@pytest.mark.parametrize("url", ["github://a", "generic://x", "reference://x", "no-such-protocol://x"])
def test_a_url_that_its_file_system_refuses_is_an_option_error(url: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="remote: "):
        KVStore(tmp_path / "s", remote=url)


def test_a_remote_inside_the_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the store's own folder"):
        KVStore(tmp_path / "s", remote=f"file://{tmp_path}/s/objects")


def test_a_file_is_no_remote(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with KVStore(tmp_path / "s", remote=f"file://{tmp_path}/file") as store:
        assert "found a file" in store.verify().damaged[0]
