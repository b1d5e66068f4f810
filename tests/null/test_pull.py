"""pull: digests, resuming, joining, space, and what a killed download leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.null.hub_standin import Hub, standin

from ds4v41 import download as download_module
from ds4v41 import pull as pull_module
from ds4v41.download import Part, Sums, Target
from ds4v41.errors import OptionError, PullError
from ds4v41.pull import PUBLISHED, Pulled, pull

REPO = "antirez/deepseek-v4.1-flash-gguf"
Q4, Q2 = "DeepSeek-V4.1-Flash-Q4.gguf", "DeepSeek-V4.1-Flash-Q2.gguf"
SOURCE = "deepseek-ai/DeepSeek-V4.1-Flash"
PART1, PART2 = random.Random(1).randbytes(300_001), random.Random(2).randbytes(70_007)
WHOLE = PART1 + PART2


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pull_module, "_TIMEOUT", 5.0)
    # The digests are those of files of megabytes; smaller blocks give the tests many of them.
    monkeypatch.setattr(download_module, "BLOCK", 1 << 14)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with standin() as running:
        base = f"{REPO}/resolve/main/"
        running.files = {
            f"{base}{Q4}.part1": PART1,
            f"{base}{Q4}.part2": PART2,
            f"{base}{Q2}": PART2,
            f"{SOURCE}/resolve/main/a.safetensors": PART1,
            f"{SOURCE}/resolve/main/b.safetensors": PART2,
            f"{SOURCE}/resolve/main/config.json": b'{"small": true}',
        }
        running.plain = {f"{SOURCE}/resolve/main/config.json"}
        yield running


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The list of published files, with the structure of the real one and small files."""
    path = tmp_path / "published.json"
    path.write_text(json.dumps(_published()))
    return path


def _published() -> dict[str, Any]:
    def entry(data: bytes) -> dict[str, Any]:
        return {"bytes": len(data), "sha256": sha(data)}

    return {
        "repository": REPO,
        "files": {
            Q2: entry(PART2),
            Q4: {**entry(WHOLE), "published_as": [f"{Q4}.part1", f"{Q4}.part2"]},
            f"{Q4}.part1": entry(PART1),
            f"{Q4}.part2": entry(PART2),
        },
        "drafter_source": {
            "repository": SOURCE,
            "shards": ["a.safetensors", "b.safetensors"],
            "also": ["config.json"],
        },
    }


def get(hub: Hub, published: Path, what: str, folder: Path, **options: Any) -> list[Pulled]:
    return pull(what, folder, published=published, endpoint=hub.endpoint, retry_seconds=0.001, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_two_parts_are_joined(hub: Hub, published: Path, tmp_path: Path) -> None:
    (item,) = get(hub, published, "q4", tmp_path / "models")
    assert item.path == tmp_path / "models" / Q4 and item.downloaded == item.size == len(WHOLE)
    assert item.path.read_bytes() == WHOLE
    assert names(tmp_path / "models") == [Q4]  # no part, no partial file, no note is left


def test_a_second_pull_downloads_nothing(hub: Hub, published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    get(hub, published, "q4", folder)
    before = len(hub.downloads())
    assert get(hub, published, "q4", folder, check=True)[0].downloaded == 0
    assert len(hub.downloads()) == before


def test_check_finds_a_changed_byte(hub: Hub, published: Path, tmp_path: Path) -> None:
    (item,) = get(hub, published, "q2", tmp_path / "m")
    damaged = bytearray(PART2)
    damaged[1234] ^= 1
    item.path.write_bytes(damaged)
    assert get(hub, published, "q2", tmp_path / "m")[0].downloaded == 0  # the size is right: not read without check
    with pytest.raises(PullError, match="not the published ones"):
        get(hub, published, "q2", tmp_path / "m", check=True)
    assert item.path.read_bytes() == damaged  # never touched


def test_a_file_of_another_size_is_refused_and_kept(hub: Hub, published: Path, tmp_path: Path) -> None:
    (tmp_path / Q2).write_bytes(b"mine")
    with pytest.raises(PullError, match=r"exists with 4 bytes, the published one has 70,007; move it away"):
        get(hub, published, "q2", tmp_path)
    assert (tmp_path / Q2).read_bytes() == b"mine"


@pytest.mark.parametrize("cuts", [[1], [100_000, 100_000, 1], [300_000, 0, 50_000]])
def test_broken_connections_are_gone_on_with(hub: Hub, published: Path, tmp_path: Path, cuts: list[int]) -> None:
    hub.cut_after = list(cuts)
    (item,) = get(hub, published, "q4", tmp_path / "m")
    assert item.path.read_bytes() == WHOLE
    part1 = [wanted for path, wanted in hub.downloads() if path.endswith("part1")]
    assert part1[0] is None and part1[1] == f"bytes={cuts[0]}-"


def test_passing_errors_are_tried_again_and_lasting_ones_are_not(hub: Hub, published: Path, tmp_path: Path) -> None:
    hub.refuse = [503, 429, 403]
    assert get(hub, published, "q2", tmp_path / "a")[0].path.read_bytes() == PART2
    hub.refuse = [410]
    with pytest.raises(PullError, match="410"):
        get(hub, published, "q2", tmp_path / "b")
    assert Q2 not in names(tmp_path / "b")


def test_giving_up_keeps_what_is_there(hub: Hub, published: Path, tmp_path: Path) -> None:
    hub.cut_after = [200_000] + [0] * 20
    with pytest.raises(PullError, match=r"200,000 of 370,008 bytes are there, run the command again"):
        get(hub, published, "q4", tmp_path / "m")
    assert names(tmp_path / "m") == [f"{Q4}.incomplete", f"{Q4}.incomplete.json"]
    hub.cut_after, hub.asked = [], []
    (item,) = get(hub, published, "q4", tmp_path / "m")
    assert item.path.read_bytes() == WHOLE and item.downloaded == len(WHOLE) - 200_000
    assert hub.downloads()[0][1] == "bytes=200000-"


def test_what_is_damaged_on_the_way_is_never_taken(hub: Hub, published: Path, tmp_path: Path) -> None:
    hub.damage = {f"{REPO}/resolve/main/{Q4}.part2"}
    with pytest.raises(PullError, match=r"part2: what arrived has another digest"):
        get(hub, published, "q4", tmp_path / "m")
    assert (tmp_path / "m" / f"{Q4}.incomplete").stat().st_size == len(PART1)  # the good part stays
    hub.damage, hub.asked = set(), []
    assert get(hub, published, "q4", tmp_path / "m")[0].path.read_bytes() == WHOLE
    assert all(path.endswith("part2") for path, _ in hub.downloads())


def test_a_partial_file_that_was_damaged_on_disk_is_cut_back(hub: Hub, published: Path, tmp_path: Path) -> None:
    hub.cut_after = [len(PART1), 1000] + [0] * 20
    with pytest.raises(PullError):
        get(hub, published, "q4", tmp_path / "m")
    partial = tmp_path / "m" / f"{Q4}.incomplete"
    data = bytearray(partial.read_bytes())
    assert len(data) == len(PART1) + 1000
    data[77] ^= 4
    partial.write_bytes(data)
    hub.cut_after, hub.asked = [], []
    (item,) = get(hub, published, "q4", tmp_path / "m")
    assert item.path.read_bytes() == WHOLE
    assert hub.downloads()[0][1] is None  # from the start of the part that was wrong


@pytest.mark.parametrize("note", [None, "{}", "not json"])
def test_a_partial_file_of_something_else_is_not_gone_on_with(
    hub: Hub, published: Path, tmp_path: Path, note: str | None
) -> None:
    (tmp_path / f"{Q2}.incomplete").write_bytes(b"x" * 5000)
    if note is not None:
        (tmp_path / f"{Q2}.incomplete.json").write_text(note)
    (item,) = get(hub, published, "q2", tmp_path)
    assert item.path.read_bytes() == PART2 and item.downloaded == len(PART2)


def test_a_server_without_ranges_is_refused_when_resuming(hub: Hub, published: Path, tmp_path: Path) -> None:
    hub.cut_after, hub.no_ranges = [5000], True
    with pytest.raises(PullError, match="expected bytes 5000-"):
        get(hub, published, "q2", tmp_path / "m")
    assert Q2 not in names(tmp_path / "m")


def test_a_replaced_file_is_refused_before_anything_is_downloaded(hub: Hub, published: Path, tmp_path: Path) -> None:
    hub.files[f"{REPO}/resolve/main/{Q4}.part2"] = PART2 + b"!"
    with pytest.raises(PullError, match=r"expected 70,007 bytes .* 70,008 bytes .* was replaced"):
        get(hub, published, "q4", tmp_path / "m")
    assert hub.downloads() == [] and not (tmp_path / "m").exists()


def test_space_is_checked_first(hub: Hub, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": len(WHOLE) - 1}))
    with pytest.raises(PullError, match=r"370,008 bytes are needed, 370,007 are free \(1 short\)"):
        get(hub, published, "q4", tmp_path / "m")
    assert hub.downloads() == []
    monkeypatch.setattr(pull_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": len(WHOLE)}))
    get(hub, published, "q4", tmp_path / "m")  # its own size is enough: the parts are never there twice


def test_the_disk_never_holds_more_than_the_file(hub: Hub, published: Path, tmp_path: Path) -> None:
    most = 0

    def progress(done: int, total: int, title: str) -> None:
        nonlocal most
        assert total == len(WHOLE) and 0 <= done <= total and Q4 in title
        most = max(most, sum(path.stat().st_size for path in (tmp_path / "m").iterdir() if path.suffix != ".json"))

    get(hub, published, "q4", tmp_path / "m", progress=progress)
    assert most == len(WHOLE)


def test_drafter_source(hub: Hub, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = pull("drafter-source", published=published, endpoint=hub.endpoint)
    assert [str(item.path) for item in done] == [
        f"DeepSeek-V4.1-Flash/{name}" for name in ("config.json", "a.safetensors", "b.safetensors")
    ]
    assert (tmp_path / "DeepSeek-V4.1-Flash" / "config.json").read_bytes() == b'{"small": true}'
    assert (tmp_path / "DeepSeek-V4.1-Flash" / "b.safetensors").read_bytes() == PART2


def test_small_files_are_checked_by_their_git_digest(hub: Hub, published: Path, tmp_path: Path) -> None:
    hub.damage = {f"{SOURCE}/resolve/main/config.json"}
    with pytest.raises(PullError, match="another digest"):
        get(hub, published, f"{SOURCE}:config.json", tmp_path / "m")
    assert "config.json" not in names(tmp_path / "m")


def test_repo_and_file(hub: Hub, published: Path, tmp_path: Path) -> None:
    hub.files["some/repo/resolve/v2/deep/er/model.gguf"] = PART2
    (item,) = get(hub, published, "some/repo:deep/er/model.gguf", tmp_path, revision="v2")
    assert item.path == tmp_path / "model.gguf" and item.path.read_bytes() == PART2
    with pytest.raises(PullError, match=r"some/repo:nope.gguf \(revision main\): cannot be looked up"):
        get(hub, published, "some/repo:nope.gguf", tmp_path)


@pytest.mark.parametrize("what", ["q5", "", "repo:file", "a/b:", "a/b:../x", "a/b:/etc/x", "a/b:c//d", "a/b/c:d"])
def test_names_that_mean_nothing(hub: Hub, published: Path, tmp_path: Path, what: str) -> None:
    with pytest.raises(OptionError, match="pull: expected"):
        get(hub, published, what, tmp_path)
    assert hub.asked == []


def test_dry_run(hub: Hub, published: Path, tmp_path: Path) -> None:
    (item,) = get(hub, published, "q4", tmp_path / "m", dry_run=True)
    assert (item.size, item.downloaded) == (len(WHOLE), len(WHOLE))
    assert hub.downloads() == [] and not (tmp_path / "m").exists()


def test_the_token_goes_to_the_hub_only(
    hub: Hub, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    get(hub, published, f"{SOURCE}:config.json", tmp_path)
    get(hub, published, "q2", tmp_path)
    seen = {(path.startswith("/storage/"), method): auth for method, path, _, auth in hub.asked}
    assert seen[False, "HEAD"] == seen[False, "GET"] == "Bearer hf_secret"
    assert seen[True, "GET"] is None


def test_two_processes_do_not_write_one_file(hub: Hub, published: Path, tmp_path: Path) -> None:
    target = Target(tmp_path / "x", (Part("a/b", "x", "main", 10, "0" * 64),))
    with (
        download_module._locked(target),
        pytest.raises(PullError, match="another process"),
        download_module._locked(target),
    ):
        pass


CHILD = """
import sys
from ds4v41 import download
from ds4v41.pull import pull
download.BLOCK = 1 << 14
pull("q4", sys.argv[1], published=sys.argv[2], endpoint=sys.argv[3])
"""


def test_kill_leaves_nothing_that_is_taken_for_whole(hub: Hub, published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    hub.pace = 0.02  # 64 KiB every 20 ms: some 120 ms for the whole
    source = str(Path(pull_module.__file__).parents[1])
    command = [sys.executable, "-c", CHILD, str(folder), str(published), hub.endpoint]
    kills = 0
    for wanted in (1, 70_000, 200_000, len(PART1) + 1):
        child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": source, "PYTHONWARNINGS": "ignore"})
        partial = folder / f"{Q4}.incomplete"
        while child.poll() is None and not (partial.exists() and partial.stat().st_size >= wanted):
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        kills += child.wait() == -signal.SIGKILL
        if not (folder / Q4).exists():
            assert set(names(folder)) <= {f"{Q4}.incomplete", f"{Q4}.incomplete.json"}
    assert kills >= 3
    hub.pace = 0
    (item,) = get(hub, published, "q4", folder)
    assert item.path.read_bytes() == WHOLE and item.downloaded < len(WHOLE)
    assert names(folder) == [Q4]


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), st.data())
def test_sums_agree_with_hashlib_for_any_cut(pieces: list[bytes], data: st.DataObject) -> None:
    parts = tuple(Part("a/b", f"p{i}", "main", len(piece), sha(piece)) for i, piece in enumerate(pieces))
    whole = b"".join(pieces)
    sums = Sums(Target(Path("x"), parts, sha(whole)))
    restarts = 0
    while not sums.done:
        n = data.draw(st.integers(1, sums.left_in_part))
        sums.add(whole[sums.position : sums.position + n])
        if restarts < 3 and data.draw(st.booleans()):
            sums.restart_part()
            restarts += 1
        elif sums.left_in_part == 0:
            assert sums.part_is_right()
            sums.next_part()
    assert sums.position == len(whole) and sums.whole_is_right()


def test_the_packaged_list_adds_up() -> None:
    known = json.loads(PUBLISHED.read_bytes())
    files = known["files"]
    for name in pull_module.NAMES.values():
        pieces = files[name].get("published_as", [name])
        assert sum(files[piece]["bytes"] for piece in pieces) == files[name]["bytes"]
        assert all(len(files[piece]["sha256"]) == 64 for piece in pieces)
    assert files[Q4]["bytes"] == 518_596_067_328 and len(files[Q4]["published_as"]) == 2
    assert len(known["drafter_source"]["shards"]) == 3
