"""The library and its commands with input that cannot work: a clear error, at once, and nothing waits for ever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ds4v41
from ds4v41 import KVStore, bench
from ds4v41.atomic import write_atomically
from ds4v41.errors import CheckpointError, MemoryPlanError, OptionError, StoreError
from ds4v41.model import NANO
from ds4v41.synth_gguf import write_gguf
from tests.model.cli_support import PROMPT, run

AB = ("bench", "ab", "--b", "threads=1", "--pairs", "1", "--a")
SYNTH = ("synth", "s.gguf", "--shape", "tiny", "--experts", "4")


@pytest.fixture
def session() -> Iterator[ds4v41.Session]:
    with ds4v41.Model.open(threads=1) as model, model.session(64) as session:
        yield session


@pytest.mark.parametrize(
    "args",
    [
        ("store", "ls", "STORE", "--dry-run"),
        ("store", "verify", "STORE", "--dry-run"),
        ("store", "ls", "STORE", "--budget", "1 GiB"),
        ("store", "verify", "STORE", "--budget", "1 GiB"),
        (*SYNTH, "--drafter-experts", "4"),
        (*SYNTH, "--drafter", "./s.gguf"),
        (*SYNTH, "--drafter", ""),
        (*SYNTH, "--drafter", "d.gguf", "--drafter-experts", "0"),
        (*SYNTH, "--seed=-1"),
        ("chat", "hi", "--json", "--reasoning", "show"),
        ("chat", "hi", "--history", "lines"),
        ("chat", "--whole", "--history", "lines"),
        ("verify", "--mac-day", "report.json", "--contexts", "64"),
        ("pull", "q4", "--check", "--dry-run"),
        ("bench", "ops", "--types", ""),
        ("bench", "ops", "--rows", ""),
        ("bench", "ops", "--rows", "0"),
        ("bench", "roof", "--threads", "0"),
        ("bench", "decode", "--context", ""),
        ("bench", "decode", "--context=-2"),
        ("bench", "decode", "--steps", "0"),
        ("bench", "decode", "--steps", "90000"),
        ("bench", "depth", "--context=-2"),
        ("bench", "prefill", "--behind", ""),
        ("bench", "prefill", "--context", "0"),
        (*AB[:-1], "--a", "rows=-1"),
        (*AB, "rows=9"),
        (*AB, "context=99999999999"),
        (*AB, "context=-6"),
        (*AB, "threads=1", "threads=2"),
        ("bench", "ab", "--a", "threads=1", "--b", "threads=1", "--pairs", "0"),
        ("bench", "engram", str(NANO), "--seconds", "nan"),
        ("bench", "engram", str(NANO), "--step-ms", "0"),
        ("bench", "engram", str(NANO), "--chunk", "0"),
        ("generate", PROMPT, "-m", ""),
        ("generate", PROMPT, "-m", "~nobody-of-this-name/x"),
        ("chat", "hi", "--think", "9" * 5000),
    ],
)
def test_an_option_that_could_not_have_an_effect_is_refused(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    KVStore(tmp_path / "STORE").close()
    before = sorted(os.listdir(tmp_path))
    result = call(*args)
    assert result.code == 2 and result.out == "" and "Traceback" not in result.err
    assert sorted(os.listdir(tmp_path)) == before


def test_a_drafter_that_cannot_be_written_is_refused_before_the_model_is(call: Any, tmp_path: Path) -> None:
    (tmp_path / "d.gguf").write_bytes(b"mine")
    out = tmp_path / "m.gguf"
    result = call("synth", str(out), "--shape", "tiny", "--experts", "4", "--drafter", str(tmp_path / "d.gguf"))
    assert result.code == 1 and "exists already" in result.err
    assert not out.exists() and (tmp_path / "d.gguf").read_bytes() == b"mine"


def test_text_that_never_ends_is_refused() -> None:
    result = run("generate", "--file", "/dev/zero", "--max-tokens", "1")
    assert result.returncode == 2 and b"expected at most" in result.stderr


def test_plan_looks_at_the_drafter(session: ds4v41.Session) -> None:
    for wrong in (True, "own", 3):
        with pytest.raises(OptionError, match="drafter: expected a Drafter"):
            session.model.plan(64, drafter=wrong)  # type: ignore[arg-type]


def test_benchmarks_refuse_memory_that_is_not_there() -> None:
    with pytest.raises(MemoryPlanError, match="are not available"):
        bench.roof(gib=1023, threads=1)


@pytest.mark.parametrize("name", ["/", ".", ".."])
def test_a_folder_is_no_name_of_a_file(
    session: ds4v41.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    session.prefill([5, 6])
    with pytest.raises(StoreError, match="this is a folder"):
        session.save(name)
    with pytest.raises(CheckpointError, match="this is a folder"):
        write_gguf(name, "tiny", experts=4, engram_rows=1000)
    assert os.listdir(tmp_path) == []


def test_a_pipe_is_no_saved_session(session: ds4v41.Session, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(StoreError, match="expected a regular file"):
            session.model.load_session(path)


def test_an_interrupted_save_leaves_nothing(
    session: ds4v41.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.prefill([5, 6])

    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.save(tmp_path / "s")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("kind", ["pipe", "folder", "zeros"])
def test_objects_of_a_store_that_are_no_files(tmp_path: Path, kind: str, index: bool) -> None:
    prompt = list(range(10, 60))
    with ds4v41.Model.open(threads=1) as model:
        with KVStore(tmp_path / "s") as store, model.session(64, store=store) as session:
            session.generate(prompt, max_tokens=2, temperature=0).finish()
        objects = sorted((tmp_path / "s" / "objects").iterdir())
        assert objects
        for path in objects:
            path.unlink()
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "folder":
                path.mkdir()
            else:
                path.symlink_to("/dev/zero")
        if not index:
            (tmp_path / "s" / "index.sqlite").unlink()
        with model.session(64) as plain:
            wanted = plain.generate(prompt, max_tokens=2, temperature=0).finish().tokens
        with KVStore(tmp_path / "s") as store, model.session(64, store=store) as session:
            assert session.generate(prompt, max_tokens=2, temperature=0).finish().tokens == wanted
            assert session.stats.restored == 0


def test_what_is_no_file_is_never_replaced(session: ds4v41.Session, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    session.prefill([5, 6])
    with pytest.raises(StoreError, match="left as it is"):
        session.save(pipe)
    with pytest.raises(CheckpointError, match="left as it is"):
        write_gguf(pipe, "tiny", experts=4, engram_rows=1000, overwrite=True)
    with pytest.raises(OSError, match="found a folder, pipe or device"):
        write_atomically(pipe, "text")
    assert os.listdir(tmp_path) == ["pipe"] and pipe.is_fifo()
