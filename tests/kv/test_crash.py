"""A store after a killed process, a full disk, a lost index, damaged files: clear reports, never wrong content."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4v41 import KVStore, StoreError
from ds4v41.kvstore.format import FULL, HEADER_BYTES, PAGE, Header, Prefixes, checksum

from .fake import ROOT, chain, check_content, put
from .test_store import used

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
KILLS = int(os.environ.get("DS4V41_KILLS", "60"))


def killed_child(folder: Path, seed: int, budget: int, prune: bool, delay: float) -> list[tuple[int, int]]:
    """Puts (and prunes) in a child process until it is killed; returns the puts that it reported as kept."""
    ready, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        try:
            store = KVStore(folder, budget=budget)
            dice = random.Random(seed)
            os.write(out, struct.pack("<ii", -1, 0))
            while True:
                which, n = dice.randrange(1000), dice.randrange(1, 6000)
                if put(store, chain(which, n)).kept:
                    os.write(out, struct.pack("<ii", which, n))
                if prune and dice.random() < 0.3:
                    store.prune(budget=budget * 2 // 3)
        finally:
            os._exit(1)
    os.close(out)
    assert len(os.read(ready, 8)) == 8
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    data = b""
    while piece := os.read(ready, 1 << 16):
        data += piece
    os.close(ready)
    return [struct.unpack_from("<ii", data, i) for i in range(0, len(data) // 8 * 8, 8)]


def test_a_process_killed_at_any_moment_loses_nothing_committed(tmp_path: Path) -> None:
    dice = random.Random(1)
    kept: set[tuple[int, int]] = set()
    for i in range(KILLS):
        kept |= set(killed_child(tmp_path / "s", i, 1 << 30, False, dice.uniform(0, 0.06)))
        if i % 10 == 9:
            with KVStore(tmp_path / "s", budget=1 << 30) as store:
                assert store.verify().clean, store.verify()
    with KVStore(tmp_path / "s", budget=1 << 30) as store:
        for which, n in random.Random(2).sample(sorted(kept), min(len(kept), 150)):
            ids = chain(which, n)
            assert check_content(store, ids) == n
        store.prune()
        assert not list((tmp_path / "s" / "tmp").iterdir())


def test_killed_while_pruning_the_store_stays_clean_and_within_its_budget(tmp_path: Path) -> None:
    dice = random.Random(3)
    budget = 3 << 20
    for i in range(KILLS):
        puts = killed_child(tmp_path / "s", 1000 + i, budget, True, dice.uniform(0, 0.08))
        if i % 5 == 4:
            with KVStore(tmp_path / "s", budget=budget) as store:
                result = store.verify()
                assert result.clean, result
                for which, n in puts[-3:]:
                    check_content(store, chain(which, n))
                assert put(store, chain(5000 + i, 100)).kept
                store.prune()
                assert used(tmp_path / "s") <= budget


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if made.returncode != 0:
        pytest.skip("cannot mount a small file system here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_reported_and_harms_nothing(small_disk: Path) -> None:
    with KVStore(small_disk / "s", budget="64 MiB") as store:
        results = [put(store, chain(i, 3000)) for i in range(40)]
        failed = [r for r in results if not r.kept]
        assert results[0].kept and failed and all("not kept" in r.why for r in failed)
        assert store.verify().clean
        assert any(check_content(store, chain(i, 3000)) == 3000 for i in range(40))
        assert not list((small_disk / "s" / "tmp").iterdir())
        (small_disk / "s" / "objects").stat()
        store.prune(budget="1 MiB")
        assert put(store, chain(77, 3000)).kept  # goes on as soon as there is room


def test_a_read_only_folder_is_reported(small_disk: Path) -> None:
    with KVStore(small_disk / "s", budget="1 MiB") as store:
        assert put(store, chain(1, 300)).kept
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with KVStore(small_disk / "s", budget="1 MiB") as store:
        assert "Read-only" in store.read_only and "read-only" in repr(store)
        assert check_content(store, chain(1, 300)) == 300
        refused = put(store, chain(2, 300))
        assert not refused.kept and "read-only (Read-only file system)" in refused.why
    with pytest.raises(StoreError, match="cannot"):
        KVStore(small_disk / "new", budget="1 MiB")


@pytest.mark.parametrize("loss", ["deleted", "garbage", "empty"])
def test_a_lost_index_is_made_again_from_the_pages(loss: str, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with KVStore(folder, budget="64 MiB") as store:
        for i in range(12):
            assert put(store, chain(i, 2500)).kept
        before = [(i.id, i.begin, i.end, i.bytes) for i in store.ls()]
    for ending in ("", "-wal", "-shm"):
        path = folder / f"index.sqlite{ending}"
        if loss == "deleted" or ending:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(os.urandom(9000) if loss == "garbage" else b"")
    with KVStore(folder, budget="64 MiB") as store:
        assert [(i.id, i.begin, i.end, i.bytes) for i in store.ls()] == before
        assert store.verify().clean
        assert all(check_content(store, chain(i, 2500)) == 2500 for i in range(12))
    if loss == "garbage":
        assert list(folder.glob("index.damaged.*"))  # set aside, not deleted


def sections(path: Path) -> list[int]:
    header = Header.unpack(path.read_bytes()[:HEADER_BYTES], "")
    return [8, 60, HEADER_BYTES - 1, HEADER_BYTES, header.payload_offset, header.file_bytes]


class Reader:
    """What a restore needs of the extension's session."""

    def rows_bytes(self, begin: int, end: int) -> int:
        return (end - begin) * 64

    def expect_rows(self, end: int) -> None:
        pass

    def read_pages(self, pages: list, tokens: object, frontier: tuple | None) -> tuple[int, str] | None:
        parts = [(fd, offset, self.rows_bytes(begin, end), sum_) for begin, end, fd, offset, sum_, _ in pages]
        for i, (fd, offset, n, expected) in enumerate([*parts, *([frontier] if frontier else [])]):
            if checksum(os.pread(fd, n, offset)) != expected:
                return i, "checksum"
        return None


@pytest.mark.parametrize("how", ["cut", "flip"])
@pytest.mark.parametrize("kind", [PAGE, FULL])
def test_damage_anywhere_is_found_dropped_and_named(how: str, kind: int, tmp_path: Path) -> None:  # BL-025
    ids = chain(1, 300)
    with KVStore(tmp_path / "s", budget="64 MiB") as store:
        assert put(store, ids).kept
        item = next(i for i in store.ls() if i.kind == kind)
        path = store._files.path(item.id, kind)  # type: ignore[union-attr]
        whole = path.read_bytes()
        for at in sections(path):
            path.write_bytes(whole)
            store._upkeep.adopt()
            assert store.verify().clean
            rest = b"" if how == "cut" else bytes([whole[at - 1] ^ 4]) + whole[at:]
            path.write_bytes(whole[: at - 1] + rest)
            report = store.verify()
            assert not report.clean and path.name in str(report.damaged)
            tokens_only = how == "flip" and kind == PAGE and HEADER_BYTES < at <= HEADER_BYTES + 4 * 300
            if tokens_only:  # rows do not need the stored ids; who reads these finds the damage
                with pytest.raises(StoreError):
                    store._files.tokens(item.id)
                continue
            with pytest.raises(StoreError):
                pages, frontier = ([item], None) if kind == PAGE else ([], item)
                store.restore(Reader(), ids, pages, frontier)  # type: ignore[arg-type]
            assert not path.exists() and path.name in str(store.stats().damaged[-1])


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [2_000_000_000.0]

    def earlier() -> float:
        now[0] -= 86_400
        return now[0]

    monkeypatch.setattr(time, "time", earlier)
    with KVStore(tmp_path / "s", budget="1 MiB") as store:
        for i in range(12):
            assert put(store, chain(100 + i, 2000)).kept
            assert used(tmp_path / "s") <= 1 << 20
        assert check_content(store, chain(111, 2000)) == 2000  # the last one is there, the first ones went
        assert check_content(store, chain(100, 2000)) < 2000


def test_a_copied_store_works_elsewhere(tmp_path: Path) -> None:
    with KVStore(tmp_path / "s", budget="64 MiB") as store:
        put(store, chain(1, 3000))
    shutil.copytree(tmp_path / "s", tmp_path / "t")
    with KVStore(tmp_path / "t", budget="64 MiB") as store:
        assert check_content(store, chain(1, 3000)) == 3000
        assert store.find(Prefixes(ROOT, chain(1, 3000))).reach == 3000
