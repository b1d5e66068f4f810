"""The official folder reader: damaged headers and folders, and random bytes; nothing hostile gets past it."""

from __future__ import annotations

import builtins
import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.null.folder_sample import header_of, join, problems_of

from ds4v41.checkpoint import open_checkpoint
from ds4v41.checkpoint.header import read_header
from ds4v41.checkpoint.safetensors import open_folder
from ds4v41.errors import CheckpointError, ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"
NANO = Path(__file__).parents[2] / "src/ds4v41/data/nano"


# ---- faults of headers --------------------------------------------------------------------------------------------

EMBED = "embed.weight"
Edit = Callable[[dict[str, Any]], Any]
LIES: list[tuple[Edit, str]] = [
    (lambda h: h[EMBED].update(dtype="F7"), "unknown dtype 'F7'"),
    (lambda h: h[EMBED].update(dtype=3), "unknown dtype 3"),
    (lambda h: h[EMBED].update(dtype=["BF16"]), "unknown dtype"),
    (lambda h: h[EMBED].update(shape=[512, -128]), "shape must be"),
    (lambda h: h[EMBED].update(shape=[True, 65536]), "shape must be"),
    (lambda h: h[EMBED].update(shape=[512, 128.0]), "shape must be"),
    (lambda h: h[EMBED].update(shape="512"), "shape must be"),
    (lambda h: h[EMBED].update(shape=[1] * 9), "at most 8"),
    (lambda h: h[EMBED].update(shape=[2**62, 2**62]), r"more than 2\^63 bytes"),
    (lambda h: h[EMBED].update(shape=[2**40, 2**20]), "needs 2305843009213693952 bytes"),
    (lambda h: h[EMBED].update(shape=[10**4000]), "shape must be"),
    (lambda h: h[EMBED].update(shape=[513, 128]), "needs 131328 bytes, but data_offsets span 131072"),
    (lambda h: h[EMBED].update(data_offsets=[5, 4]), "not an ascending range"),
    (lambda h: h[EMBED].update(data_offsets=[0, 2**62]), "not an ascending range"),
    (lambda h: h[EMBED].update(data_offsets=[-2, 4]), "two whole numbers"),
    (lambda h: h[EMBED].update(data_offsets=[0, 1, 2]), "two whole numbers"),
    (lambda h: h[EMBED].update(data_offsets=None), "two whole numbers"),
    (lambda h: h[EMBED].update(data_offsets=h["head.weight"]["data_offsets"]), "overlaps"),
    (lambda h: h.pop(EMBED), "belong to no tensor"),
    (lambda h: h[EMBED].pop("shape"), "expected an object with dtype, shape and data_offsets"),
    (lambda h: h.update({EMBED: []}), "expected an object with dtype"),
    (lambda h: h.update(__metadata__={"a": 1}), "__metadata__"),
]


@pytest.mark.parametrize(("edit", "expected"), LIES, ids=[str(i) for i in range(len(LIES))])
def test_lies_in_the_header(edit: Edit, expected: str, one: Path) -> None:
    with header_of(one) as header:
        edit(header)
    problems = problems_of(one)
    assert any(re.search(expected, p) and "model.safetensors: byte " in p for p in problems), problems


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b"{", "byte 9: not valid JSON"),
        (b'{"a": \xff}', "byte 14: not valid UTF-8"),
        (b'{"a": {}, "a": {}}', "'a' is there twice"),
        (b"[" * 200_000, "nested too deeply"),
        (b"[" + b"[]," * 1_000_000, "far more values"),
        (b"[" + b"1," * 1_000_000, "far more values"),
        (b"[" + b"[[[[]]]]," * 200_000, "far more values"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "not acceptable JSON"),
    ],
)
def test_headers_that_are_no_json_object(header: bytes, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    join(file, header, b"")
    read = read_header(file)
    assert not read.readable
    (problem,) = read.problems
    assert expected in problem
    assert str(file) in problem


@pytest.mark.parametrize(
    ("length", "expected"),
    [(2**64 - 1, "above the limit"), (100_000_001, "above the limit"), (50_000_000, "past the end of the file")],
)
def test_absurd_header_length_allocates_nothing(length: int, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + b"{}" * 50)
    tracemalloc.start()
    read = read_header(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert expected in read.problems[0]
    assert peak < 1_000_000


def test_trailing_bytes_and_truncation(one: Path) -> None:
    file = one / "model.safetensors"
    size = file.stat().st_size
    with open(file, "ab") as f:
        f.write(b"xyz")
    assert any("goes on for 3 bytes after its last tensor" in p for p in problems_of(one))
    for cut in (size - 1, size // 2, 100, 8, 7, 0):
        os.truncate(file, cut)
        problems = problems_of(one)
        assert any("truncated" in p for p in problems), (cut, problems)
        assert not any("missing tensor" in p for p in problems)  # the one cause is enough


# ---- faults of folders --------------------------------------------------------------------------------------------


def test_index_faults(many: Path) -> None:
    path = many / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    weight_map = index["weight_map"]
    shards = sorted(set(weight_map.values()))
    elsewhere = next(s for s in shards if s != weight_map["norm.weight"])
    weight_map["norm.weight"] = elsewhere
    weight_map["extra.weight"] = shards[0]
    del weight_map["embed.weight"]
    weight_map["outside"] = "../model-00001.safetensors"
    weight_map["not.a.name"] = 3
    path.write_text(json.dumps(index))
    shutil.copy(many / shards[0], many / "model-00099-of-00099.safetensors")
    text = "\n".join(problems_of(many))
    for expected in (
        "puts tensor norm.weight here, but the file does not hold it",
        "tensor norm.weight is here, but",
        "puts tensor extra.weight here, but",
        "tensor embed.weight is here, but",
        "weight_map['outside']",
        "weight_map['not.a.name']",
        "model-00099-of-00099.safetensors: model.safetensors.index.json does not name this file",
    ):
        assert expected in text


def test_missing_shards(many: Path, tmp_path: Path) -> None:
    weight_map = json.loads((many / "model.safetensors.index.json").read_text())["weight_map"]
    shard = weight_map["embed.weight"]
    (many / shard).unlink()
    (problem,) = problems_of(many)
    assert shard in problem and "is missing" in problem
    (many / "model.safetensors.index.json").unlink()
    (problem,) = problems_of(many)
    assert "1 of " in problem and "shards are missing: 1" in problem


def test_a_tensor_in_two_shards(many: Path) -> None:
    (many / "model.safetensors.index.json").unlink()
    shutil.copy(min(many.glob("model-00001-of-*")), many / "again.safetensors")
    problems = problems_of(many)
    assert all("is in again.safetensors too" in p for p in problems)
    assert any("embed.weight" in p for p in problems)


def test_a_stray_shard_beside_a_single_file(one: Path) -> None:
    shutil.copy(one / "model.safetensors", one / "model-00001-of-00002.safetensors")
    (problem,) = problems_of(one)
    assert "beside model.safetensors" in problem
    (one / "model-00001-of-00002.safetensors").rename(one / "runs.safetensors")
    open_folder(one)  # a file that has nothing to do with the model


@pytest.mark.parametrize("index", [b"{", b"[]", b'{"weight_map": []}', b'{"weight_map": {}}', b"\xff"])
def test_damaged_index(index: bytes, many: Path) -> None:
    (many / "model.safetensors.index.json").write_bytes(index)
    assert any("index.json" in p for p in problems_of(many))


def test_folder_without_a_model(tmp_path: Path) -> None:
    assert "there is no config.json in this folder" in problems_of(tmp_path)[0]
    shutil.copy(GOLDEN / "tiny/bf16/config.json", tmp_path)
    assert "no .safetensors file" in problems_of(tmp_path)[0]


@pytest.mark.parametrize("config", [b"", b"{", b"\xff", b'{"a":1,"a":2}', b"[" * 100_000])
def test_damaged_config_file(config: bytes, one: Path) -> None:
    (one / "config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(one)


def test_wrong_config(one: Path) -> None:
    (one / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="text_config"):
        open_checkpoint(one)


def test_damaged_generation_config(one: Path) -> None:
    (one / "generation_config.json").write_text("[1]")
    assert any("generation_config.json: expected a JSON object" in p for p in problems_of(one))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling"])
def test_things_that_are_no_files(name: str, kind: str, one: Path) -> None:
    path = one / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)  # opening it would wait for a writer for ever
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(one / "nowhere")
    expected = {"pipe": "found a pipe", "folder": "found a folder", "dangling": "link to nothing"}[kind]
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(one)


def test_paths_that_are_no_checkpoints(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "empty").write_bytes(b"")
    for path, expected in [
        (tmp_path / "nothing", "no such file or folder"),
        (tmp_path / "pipe.safetensors", "found a pipe"),
        (tmp_path / "text.txt", "neither a GGUF file"),
        (tmp_path / "empty", "neither a GGUF file"),
        (Path("a\0b"), "cannot look at this path"),
        (Path("/dev/null"), "character device"),
    ]:
        with pytest.raises(CheckpointError, match=expected):
            open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"no config.json in this folder; give an official folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"no config.json in this folder; name the file itself: model.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="expected a folder with"):
        open_folder(tmp_path / "text.txt")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_unreadable_files(name: str, one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who can read everything, so the refusal is simulated."""
    really_open = builtins.open

    def refusing(path: Any, *args: Any, **options: Any) -> Any:
        if isinstance(path, str | Path) and str(path).endswith(f"/{name}"):
            raise PermissionError(13, "Permission denied")
        return really_open(path, *args, **options)

    monkeypatch.setattr(builtins, "open", refusing)
    assert any(f"{name}: permission to read the file is denied" in p for p in problems_of(one))


# ---- fuzzing ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory, single: Path) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("fuzz") / "m"
    shutil.copytree(single, folder)
    return folder, (folder / "model.safetensors").read_bytes()


def opens_or_refuses(folder: Path) -> None:
    """Opens and can be read in full, or is refused with reasons. Anything else is a failure."""
    try:
        checkpoint = open_folder(folder)
    except CheckpointError as error:
        assert error.problems
        assert all("model.safetensors" in p or "missing tensor" in p for p in error.problems)
    else:
        for tensor in checkpoint.tensors.values():
            assert len(tensor.read()) == tensor.nbytes
            if tensor.segment is not None:
                assert tensor.view().nbytes == tensor.nbytes


@given(data=st.data())
def test_flipped_bits(scratch: tuple[Path, bytes], data: st.DataObject) -> None:
    folder, original = scratch
    header_end = 8 + int.from_bytes(original[:8], "little")
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header_end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "model.safetensors").write_bytes(damaged)
    opens_or_refuses(folder)


@given(st.integers(0, 2**20))
def test_truncated(scratch: tuple[Path, bytes], at: int) -> None:
    folder, original = scratch
    (folder / "model.safetensors").write_bytes(original[: at % len(original)])
    with pytest.raises(CheckpointError):
        open_folder(folder)


WHOLE = st.sampled_from([0, 1, 2, 64, 128, 512, 2**31, 2**53, 2**63 - 1, 2**64, -1]) | st.integers()
JUNK = st.none() | st.booleans() | st.floats() | st.text(max_size=3) | WHOLE
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["BF16", "F32", "F8_E4M3", "I8", "F9"]) | JUNK,
        "shape": st.lists(WHOLE | JUNK, max_size=4) | JUNK,
        "data_offsets": st.lists(WHOLE | JUNK, max_size=3) | JUNK,
    },
)


@given(st.dictionaries(st.sampled_from(["embed.weight", "norm.weight", "__metadata__"]) | st.text(), ENTRY | JUNK))
def test_random_headers(scratch: tuple[Path, bytes], header: dict[str, Any]) -> None:
    folder, original = scratch
    join(folder / "model.safetensors", header, original[-5000:])
    opens_or_refuses(folder)


@given(st.binary(max_size=200))
def test_random_bytes(scratch: tuple[Path, bytes], data: bytes) -> None:
    folder, _ = scratch
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError):
        open_folder(folder)
