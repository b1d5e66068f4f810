"""`ds4v41 store`: the same facts as the library's, as text and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds4v41 import KVStore
from ds4v41.cli import main

from .fake import chain, put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with KVStore(tmp_path / "s", budget="64 MiB") as store:
        for i in range(4):
            assert put(store, chain(i, 3000)).kept
    return tmp_path / "s"


def test_ls_and_stats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "ls", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in rows} == {"page", "full"} and sum(row["kind"] == "full" for row in rows) == 4
    assert main(["store", "ls", str(folder)]) == 0
    assert "0 .. 2,048" in capsys.readouterr().out
    assert main(["store", "stats", str(folder), "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["frontiers"] == 4 and stats["pages"] == len(rows) - 4
    assert main(["store", "stats", str(folder)]) == 0
    assert "4 frontiers" in capsys.readouterr().out


def test_verify_names_the_damaged_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", str(folder)]) == 0
    assert "clean" in capsys.readouterr().out
    victim = next((folder / "objects").glob("*.page"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert main(["store", "verify", str(folder)]) == 1
    assert victim.name in capsys.readouterr().out
    assert victim.exists()  # verify deletes nothing


def test_the_remote_is_looked_at_when_asked(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/shared"
    with KVStore(folder, budget="64 MiB", remote=url) as store:
        assert put(store, chain(9, 3000)).kept
    assert main(["store", "stats", str(folder), "--remote", url]) == 0 and url in capsys.readouterr().out
    assert main(["store", "verify", str(folder), "--remote", url]) == 0
    victim = next((tmp_path / "shared").rglob("*.page"))
    victim.write_bytes(victim.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["store", "verify", str(folder)]) == 0
    assert main(["store", "verify", str(folder), "--remote", url]) == 1 and victim.name in capsys.readouterr().out
    assert main(["store", "ls", str(folder), "--remote", url]) == 2


def test_prune_tells_before_it_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["store", "prune", str(folder), "--budget", "400 KiB"]
    assert main([*args, "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    planned = [line.split(": ", 1)[1] for line in said if "would delete" in line]
    assert re.fullmatch(r"would free [\d.,]+ \w+; [\d.,]+ \w+ would be left, the budget is 400.0 KiB", said[-1])
    assert planned
    assert main(args) == 0
    done = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("deleted")]
    assert done == planned
    assert main([*args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["names"] == []


def test_no_store_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "stats", str(tmp_path)]) == 1
    assert "no store here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["store", "stats", str(tmp_path), "--budget", "much"]) in (1, 2)
