"""A damaged index, before a store is opened and while it is open: made again from the objects or reported, never an
error of SQLite, never wrong content, never a lost object."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ds4v41 import KVStore, StoreError
from ds4v41.cli import main
from ds4v41.kvstore.format import Prefixes

from .fake import ROOT, chain, check_content, put

DAMAGES = int(os.environ.get("DS4V41_INDEX_DAMAGES", "240"))
CHAINS = 6
N = 2500
FILES = ("", "-wal", "-shm")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with some chains, its log not folded in, as a killed process leaves it."""
    folder = tmp_path_factory.mktemp("index")
    with KVStore(folder / "s", budget="64 MiB") as store:
        for i in range(CHAINS):
            assert put(store, chain(i, N)).kept
        for i in range(CHAINS - 1):
            store.touch(store.ls()[i : i + 3])
        store._write_uses()
        shutil.copytree(folder / "s", folder / "killed")
    return folder / "killed"


Damage = Callable[[Path, random.Random], None]


def flip(path: Path, dice: random.Random) -> None:
    """Some bytes get other values: in one place, or all over."""
    data = bytearray(path.read_bytes())
    for _ in range(dice.choice((1, 1, 3, 50))):
        data[dice.randrange(len(data))] = dice.randrange(256)
    overwrite(path, bytes(data))


def cut(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.choice((0, 1, dice.randrange(path.stat().st_size))))


def zero(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = dice.randrange(len(data)) // 512 * 512
    n = dice.choice((512, 4096, len(data)))
    data[at : at + n] = bytes(len(data[at : at + n]))
    overwrite(path, bytes(data))


def noise(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = dice.choice((0, dice.randrange(len(data))))
    n = dice.choice((16, 100, 4096, len(data)))
    data[at : at + n] = dice.randbytes(len(data[at : at + n]))
    overwrite(path, bytes(data))


def text(path: Path, dice: random.Random) -> None:
    overwrite(path, b"This is no database.\n" * dice.choice((1, 300)))


def overwrite(path: Path, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(data)


DAMAGE: tuple[Damage, ...] = (flip, flip, flip, cut, zero, noise, text)
STATEMENTS = (
    "DROP TABLE objects",
    "DROP TABLE meta",
    "DROP TABLE reservations",
    "DROP INDEX by_block",
    "DELETE FROM meta",
    "DELETE FROM objects",
    "UPDATE objects SET begin=0",
    "UPDATE objects SET bytes=1 << 60",
    "UPDATE objects SET score='x'",
    "UPDATE objects SET bytes=-4096",
    "UPDATE objects SET node=id",
    "UPDATE objects SET kind=9",
    "UPDATE objects SET score=1e300",
    "UPDATE objects SET tick='soon'",
    "UPDATE meta SET value='x'",
    "UPDATE meta SET value=x'00'",
    "UPDATE objects SET id=randomblob(7)",
    "ALTER TABLE objects DROP COLUMN score",
    "ALTER TABLE objects RENAME TO things",
    "ALTER TABLE meta RENAME COLUMN value TO n",
    "INSERT INTO reservations VALUES (1, x'ff', 'x', 'y')",
    "UPDATE objects SET parent=zeroblob(32)",
    "CREATE TRIGGER t BEFORE INSERT ON objects BEGIN SELECT RAISE(ABORT, 'no'); END",
)


def everything_works(store: KVStore, dice: random.Random) -> None:
    """Every method, in any order, without an error; content is right and nothing is lost."""
    calls: list[Callable[[], object]] = [
        store.stats, store.verify, store.ls, lambda: store.tick, lambda: store.other_bytes(ROOT),
        lambda: store.prune(dry_run=True), store.prune, lambda: store.find(Prefixes(ROOT, chain(1, N))),
        lambda: put(store, chain(dice.randrange(50, 99), 700)), lambda: store.touch(store.ls(), 0.5),
    ]  # fmt: skip
    for call in dice.sample(calls, len(calls)):
        call()


def nothing_is_lost(store: KVStore) -> None:
    for i in range(CHAINS):
        assert check_content(store, chain(i, N)) == N
    assert store.verify().clean, store.verify()


def objects(folder: Path) -> set[str]:
    return {p.name for p in (folder / "objects").iterdir()}


@pytest.mark.parametrize("part", range(3))
def test_damaged_before_it_is_opened(part: int, whole: Path, tmp_path: Path) -> None:
    for seed in range(part * DAMAGES // 3, (part + 1) * DAMAGES // 3):
        dice = random.Random(seed)
        folder = tmp_path / f"s{seed}"
        shutil.copytree(whole, folder)
        for ending in dice.sample(FILES, dice.choice((1, 1, 1, 2))):
            dice.choice(DAMAGE)(folder / f"index.sqlite{ending}", dice)
        before = objects(folder)
        try:
            store = KVStore(folder, budget="64 MiB")
        except StoreError as error:  # one byte of the version: a program must not take another's index for damaged
            assert "move the index away" in str(error), seed
            (folder / "index.sqlite").unlink()
            store = KVStore(folder, budget="64 MiB")
        with store:
            assert objects(folder) >= before, seed
            everything_works(store, dice)
            store.verify()
            nothing_is_lost(store)
        aside = list(folder.glob("index.damaged.*"))
        assert bool(aside) <= any("index" in report for report in store._damaged), seed
        shutil.rmtree(folder)


@pytest.mark.parametrize("part", range(3))
def test_damaged_while_it_is_open(part: int, whole: Path, tmp_path: Path) -> None:
    """Of the shared memory (-shm) only the content: who cuts it short under a process ends that process."""
    for seed in range(1000 + part * DAMAGES // 3, 1000 + (part + 1) * DAMAGES // 3):
        dice = random.Random(seed)
        folder = tmp_path / f"s{seed}"
        shutil.copytree(whole, folder)
        with KVStore(folder, budget="64 MiB") as store, KVStore(folder, budget="64 MiB") as other:
            for one in dice.sample((store, other), 2):
                everything_works(one, dice)
            for ending in dice.sample(FILES, dice.choice((1, 1, 2))):
                how = dice.choice(DAMAGE)
                path = folder / f"index.sqlite{ending}"
                if path.exists() and path.stat().st_size and not (ending == "-shm" and how is cut):
                    how(path, dice)
            for one in dice.sample((store, other, store, other), 4):
                everything_works(one, dice)
            for one in (store, other):
                one.prune()  # finds objects of lost transactions
                one.verify()  # finds values that are possible, but not those of the files
                nothing_is_lost(one)
        with KVStore(folder, budget="64 MiB") as store:
            nothing_is_lost(store)
        shutil.rmtree(folder)


@pytest.mark.parametrize("when", ["closed", "open"])
@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_database_that_holds_something_else(statement: str, when: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    shutil.copytree(whole, folder)
    store = KVStore(folder, budget="64 MiB") if when == "open" else None
    db = sqlite3.connect(folder / "index.sqlite", isolation_level=None)
    db.execute(statement)
    db.close()
    with store or KVStore(folder, budget="64 MiB") as store:
        everything_works(store, random.Random(1))
        nothing_is_lost(store)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_an_index_that_goes_away_while_it_is_open(how: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    shutil.copytree(whole, folder)
    with KVStore(folder, budget="64 MiB") as store:
        for ending in FILES:
            (folder / f"index.sqlite{ending}").unlink()
        if how == "replaced":
            sqlite3.connect(folder / "index.sqlite").close()
        nothing_is_lost(store)
        everything_works(store, random.Random(2))


def test_another_version_and_a_folder_in_its_place_say_what_to_do(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    shutil.copytree(whole, folder)
    db = sqlite3.connect(folder / "index.sqlite", isolation_level=None)
    db.execute("UPDATE meta SET value=2 WHERE key='version'")
    db.close()
    with pytest.raises(StoreError, match=r"version 2; this program knows version 1\. .*move the index away"):
        KVStore(folder)
    for ending in FILES:
        (folder / f"index.sqlite{ending}").unlink(missing_ok=True)
    (folder / "index.sqlite").mkdir()
    with pytest.raises(StoreError, match="move it away"):
        KVStore(folder)
    (folder / "index.sqlite").rmdir()
    with KVStore(folder, budget="64 MiB") as store:
        nothing_is_lost(store)


def test_a_closed_store_and_a_busy_one_say_so(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "s"
    shutil.copytree(whole, folder)
    store = KVStore(folder, budget="64 MiB")
    store._index._db.execute("PRAGMA busy_timeout=20")
    holder = sqlite3.connect(folder / "index.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    result = put(store, chain(77, 300))
    assert not result.kept and "Another process holds it" in result.why
    with pytest.raises(StoreError, match="Another process holds it"):
        store.prune(budget="1 KiB")
    holder.close()
    assert put(store, chain(77, 300)).kept
    store.close()
    for call in (store.stats, store.verify, store.ls, store.prune, lambda: store.find(Prefixes(ROOT, chain(1, N)))):
        with pytest.raises(StoreError, match="this store is closed"):
            call()
    assert "this store is closed" in put(store, chain(78, 300)).why
    store.close()


@pytest.mark.parametrize("action", ["ls", "stats", "verify", "prune"])
def test_the_command_line_too(action: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, damage in enumerate(DAMAGE):
        folder = tmp_path / f"s{seed}"
        shutil.copytree(whole, folder)
        (folder / "index.sqlite-wal").unlink()
        damage(folder / "index.sqlite", random.Random(seed))
        status = main(["store", action, str(folder)])
        said = capsys.readouterr()
        assert status == 0 or "move the index away" in said.err
        assert "sqlite3." not in said.err + said.out and "Traceback" not in said.err


def test_positions_that_the_files_contradict_are_never_used(whole: Path, tmp_path: Path) -> None:
    """A row that passes every check of types, but puts a page elsewhere."""
    folder = tmp_path / "s"
    shutil.copytree(whole, folder)
    ids = chain(1, N)
    with KVStore(folder, budget="64 MiB") as store:
        found = store.find(Prefixes(ROOT, ids))
        last = found.pages[-1]
        db = sqlite3.connect(folder / "index.sqlite", isolation_level=None)
        db.execute("UPDATE objects SET begin=? WHERE id=?", (0, last.id))
        db.close()
        wrong = store.find(Prefixes(ROOT, ids))

        class Reader:
            def rows_bytes(self, begin: int, end: int) -> int:
                return (end - begin) * 64

            def expect_rows(self, end: int) -> None:
                pass

            def read_pages(self, *_: object) -> None:
                raise AssertionError("a page was read to the wrong place")

        wrong_ids, right = [p.id for p in wrong.pages], [p.id for p in found.pages]
        if wrong_ids != right:
            with pytest.raises(StoreError, match="other positions"):
                store.restore(Reader(), np.asarray(ids), wrong.pages)  # type: ignore[arg-type]
        assert [p.id for p in store.find(Prefixes(ROOT, ids)).pages] == right
        nothing_is_lost(store)
