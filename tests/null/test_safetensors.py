"""The official folder reader: what it accepts, and that nothing hostile gets past it or hurts the process."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4v41.checkpoint import Checkpoint, open_checkpoint
from ds4v41.checkpoint.finite import find_non_finite
from ds4v41.checkpoint.header import read_header
from ds4v41.checkpoint.safetensors import open_folder
from ds4v41.errors import CheckpointError, ConfigError
from ds4v41.synth import tiny_config, write_official

GOLDEN = Path(__file__).parents[1] / "golden"
NANO = Path(__file__).parents[2] / "src/ds4v41/data/nano"
SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "compress_ratios": (0, 2, 1),
    "kv_source_layer_ids": (1, 2),
    "index_source_layer_ids": (1, 2),
    "candidate_source_layer_id": 2,
    "engram_layer_ids": (1,),
    "engram_vocab_size": 50,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": (1, 2),
    "dspark_n_routed_experts": 2,
}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "m"
    write_official(folder, tiny_config(**SMALL), seed=1, storage="fp8fp4")
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "m"
    write_official(folder, tiny_config(**SMALL), seed=1, storage="fp8fp4", shard_bytes=300_000)
    return folder


@pytest.fixture
def one(single: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(single, tmp_path / "m"))


@pytest.fixture
def many(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "m"))


def problems_of(path: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        open_folder(path, **options)
    return caught.value.problems or (str(caught.value),)


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def join(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@contextlib.contextmanager
def header_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Edit the header of a folder's only file."""
    header, data = split(folder / "model.safetensors")
    yield header
    join(folder / "model.safetensors", header, data)


# ---- what is accepted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [GOLDEN / "tiny/bf16", GOLDEN / "tiny/fp8fp4", NANO], ids=["bf16", "fp8fp4", "nano"])
def test_real_checkpoints_equal_the_library(folder: Path) -> None:
    from safetensors import safe_open

    checkpoint = open_checkpoint(folder)
    assert (checkpoint.dialect, checkpoint.problems) == ("official", [])
    checkpoint.check()
    with safe_open(folder / "model.safetensors", framework="np") as reference:
        assert set(reference.keys()) == set(checkpoint.tensors)
        for name in ("layers.0.attn.attn_sink", "layers.2.hc_ffn_fn", "mtp.0.hc_attn_base"):
            tensor = checkpoint.tensors[name]
            expected = reference.get_tensor(name)
            assert tensor.shape == expected.shape
            assert np.array_equal(tensor.view().view("<f4").reshape(tensor.shape), expected)
    data = (folder / "model.safetensors").read_bytes()
    for tensor in checkpoint.tensors.values():
        expected_bytes = data[tensor.offset : tensor.offset + tensor.nbytes]
        assert tensor.read() == expected_bytes
        if tensor.segment is not None:
            assert tensor.view().tobytes() == expected_bytes


def test_nano_extras() -> None:
    checkpoint = open_checkpoint(str(NANO))
    assert checkpoint.tokenizer == NANO / "tokenizer.json"
    assert checkpoint.generation["temperature"] == 1.0
    assert set(open_checkpoint(NANO / "model.safetensors").tensors) == set(checkpoint.tensors)


def test_image_tensors_may_be_there() -> None:
    open_folder(GOLDEN / "tiny/bf16")
    folder = GOLDEN / "tiny_vl"
    missing = problems_of(folder / "extra.safetensors", parts=("main", "vision"))
    assert all(" layers." in p or " embed" in p or " head" in p or " norm" in p for p in missing)


def test_shards_with_and_without_an_index(sharded: Path, single: Path, many: Path) -> None:
    whole = open_checkpoint(single)
    indexed = open_checkpoint(sharded)
    (many / "model.safetensors.index.json").unlink()
    loose = open_checkpoint(many)
    assert len({tensor.file for tensor in indexed.tensors.values()}) > 2
    for checkpoint in (indexed, loose):
        assert checkpoint.tensors.keys() == whole.tensors.keys()
        for name, tensor in checkpoint.tensors.items():
            assert tensor.read() == whole.tensors[name].read(), name


def test_symbolic_links_are_followed(single: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    for file in single.iterdir():
        (folder / file.name).symlink_to(file)
    (tmp_path / "folder").symlink_to(folder)
    open_checkpoint(tmp_path / "folder").check()


def test_views_are_read_only_shared_and_lazy(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    a, b = checkpoint.tensors["embed.weight"], checkpoint.tensors["norm.weight"]
    assert a.segment is not None
    assert a.segment is b.segment
    assert a.segment._map is None
    view = a.view()
    assert (view.dtype, view.shape) == (np.uint8, (a.nbytes,))
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    assert a.segment._map is not None


def test_engram_tables_are_never_mapped(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    table = checkpoint.tensors["layers.1.engram.embed.weight"]
    with pytest.raises(CheckpointError, match="never mapped"):
        table.view()
    row = table.read(3 * 32, 32)
    assert row == table.file.read_bytes()[table.offset + 96 : table.offset + 128]
    for bad in ((-1, 4), (table.nbytes, 1), (0, -1)):
        with pytest.raises(IndexError):
            table.read(*bad)
    mapped = [tensor.segment for tensor in checkpoint.tensors.values() if tensor.segment is not None]
    assert all(s.end <= table.offset or s.start >= table.offset + table.nbytes for s in mapped)


def test_a_file_that_changes_after_opening_is_refused(one: Path) -> None:
    checkpoint = open_checkpoint(one)
    file = one / "model.safetensors"
    table = checkpoint.tensors["layers.1.engram.embed.weight"]
    os.truncate(file, 5000)
    with pytest.raises(CheckpointError, match="changed after it was opened"):
        checkpoint.tensors["embed.weight"].view()
    with pytest.raises(CheckpointError, match=r"ends at offset \d+"):
        table.read()


def test_the_drafter_alone_needs_only_its_shards(sharded: Path, many: Path) -> None:
    index = json.loads((many / "model.safetensors.index.json").read_text())["weight_map"]
    drafter_shards = {shard for name, shard in index.items() if name.startswith("mtp.")}
    for shard in set(index.values()) - drafter_shards:
        (many / shard).unlink()
    drafter = open_folder(many, parts=("drafter",))
    assert {n for n in index if n.startswith("mtp.")} <= set(drafter.tensors)
    assert any("is missing" in p for p in problems_of(many))


def test_text_does_not_need_the_drafter(one: Path) -> None:
    header, data = split(one / "model.safetensors")
    kept = {n: e for n, e in header.items() if not n.startswith("mtp.")}
    body, position = b"", 0
    for name, entry in kept.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        body += data[start:end]
        entry["data_offsets"] = [position, position + end - start]
        position += end - start
    join(one / "model.safetensors", kept, body)
    open_folder(one).check()
    found = problems_of(one, parts=("main", "engram", "drafter"))
    assert all("missing tensor mtp.0." in p for p in found)


# ---- faults of tensors --------------------------------------------------------------------------------------------


def test_all_faults_come_at_once(one: Path) -> None:
    with header_of(one) as header:
        header["norm.wait"] = header.pop("norm.weight")
        header["layers.0.attn_norm.weight"]["dtype"] = "I16"
        header["layers.0.attn.wkv.weight"]["shape"] = [128, 64]
        header["layers.0.attn.wkv.scale"]["shape"] = [1, 8]
        header["layers.1.attn.wq_a.scale"]["dtype"] = "U8"
        header["layers.0.foo.scale"] = header.pop("layers.0.attn.wq_b.scale")
    text = "\n".join(problems_of(one))
    for expected in (
        "missing tensor norm.weight",
        "unexpected tensor norm.wait",
        "layers.0.attn_norm.weight: expected type BF16 or F16 or F32, found I16",
        "layers.0.attn.wkv.weight: expected F8_E4M3 shape [64, 128], found [128, 64]",
        "layers.0.attn.wkv.scale: expected F8_E8M0 [2, 4], found F8_E8M0 [1, 8]",
        "layers.1.attn.wq_a.scale: expected F8_E8M0 [3, 4], found U8 [3, 4]",
        "missing tensor layers.0.attn.wq_b.scale",
        "unexpected tensor layers.0.foo.scale",
    ):
        assert expected in text


def test_lenient_opening_keeps_the_problems(one: Path) -> None:
    with header_of(one) as header:
        header["norm.wait"] = header.pop("norm.weight")
    checkpoint = open_checkpoint(one, strict=False)
    assert len(checkpoint.problems) == 2
    assert "norm.wait" in checkpoint.tensors


def test_the_message_is_capped_and_counts(one: Path) -> None:
    with header_of(one) as header:
        for name in [n for n in header if n != "__metadata__"]:
            header[f"x.{name}"] = header.pop(name)
    with pytest.raises(CheckpointError) as caught:
        open_folder(one)
    assert len(caught.value.problems) > 100
    lines = str(caught.value).splitlines()
    assert len(lines) == 43
    assert f"... and {len(caught.value.problems) - 40} more" in str(caught.value)


def test_scale_beside_a_plain_weight(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_official(folder, tiny_config(**SMALL), seed=1)
    with header_of(folder) as header:
        header["layers.0.attn.wkv.scale"] = {"dtype": "F8_E8M0", "shape": [0], "data_offsets": [0, 0]}
    (problem,) = problems_of(folder)
    assert "its weight is BF16, which has no scale" in problem


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
    assert "config.json: no such file" in problems_of(tmp_path)[0]
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


# ---- NaN and infinity ---------------------------------------------------------------------------------------------


def poke(checkpoint: Checkpoint, name: str, element: int, value: bytes) -> None:
    tensor = checkpoint.tensors[name]
    with open(tensor.file, "r+b") as file:
        file.seek(tensor.offset + element * len(value))
        file.write(value)


def test_check_names_every_bad_tensor(one: Path) -> None:
    checkpoint = open_checkpoint(one)
    poke(checkpoint, "embed.weight", 128 * 3 + 5, b"\x80\x7f")
    poke(checkpoint, "layers.0.attn.attn_sink", 2, b"\x00\x00\xc0\x7f")
    poke(checkpoint, "layers.0.attn.wkv.weight", 128 * 2 + 1, b"\xff")
    poke(checkpoint, "layers.0.ffn.experts.1.w1.scale", 7, b"\xff")
    poke(checkpoint, "layers.0.ffn.experts.1.w1.weight", 3, b"\xff")  # two fp4 codes: always numbers
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(one).check()
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    assert "embed.weight (BF16) holds infinity at position [3, 5]" in text
    assert "layers.0.attn.attn_sink (F32) holds NaN at position [2]" in text
    assert "layers.0.attn.wkv.weight (F8_E4M3) holds NaN at position [2, 1]" in text
    assert "layers.0.ffn.experts.1.w1.scale (F8_E8M0) holds NaN at position [1, 3]" in text
    sink = checkpoint.tensors["layers.0.attn.attn_sink"]
    assert f"byte {sink.offset + 8}:" in text


def test_check_reports_progress(single: Path) -> None:
    steps: list[tuple[int, int]] = []
    open_checkpoint(single).check(progress=lambda done, total: steps.append((done, total)))
    assert steps[-1][0] == steps[-1][1] > 0
    assert steps == sorted(steps)


@given(st.sampled_from(["BF16", "F16", "F32"]), st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_finite_agrees_with_numpy(dtype: str, word: int, at: int) -> None:
    words = np.zeros(7, dtype="<u4" if dtype == "F32" else "<u2")
    words[at] = word & (0xFFFFFFFF if dtype == "F32" else 0xFFFF)
    wide = words.astype("<u4") << 16 if dtype == "BF16" else words
    values = wide.view("<f2" if dtype == "F16" else "<f4")
    found = find_non_finite(words.view(np.uint8), dtype, (7,))
    if np.isfinite(values).all():
        assert found is None
    else:
        assert found == ((at,), at * words.itemsize, "NaN" if np.isnan(values[at]) else "infinity")


def test_finite_across_chunks() -> None:
    data = np.zeros(20 << 20, dtype=np.uint8)
    data[-1] = 0x7F
    data[-2] = 0x80
    assert find_non_finite(data, "BF16", (10, 1 << 20)) == ((9, (1 << 20) - 1), data.size - 2, "infinity")


@pytest.mark.parametrize(
    ("dtype", "block", "at", "value", "kind"),
    [
        ("Q8_0", 34, 0, 0x7C00, "infinity"),
        ("Q4_K", 144, 2, 0xFE00, "NaN"),
        ("Q2_K", 84, 82, 0x7C00, "infinity"),
        ("IQ2_XXS", 66, 0, 0x7E01, "NaN"),
        ("MXFP4", 17, 0, 0xFF, "NaN"),
    ],
)
def test_block_scales(dtype: str, block: int, at: int, value: int, kind: str) -> None:
    n = 32 if block < 40 else 256
    data = np.zeros(6 * block, dtype=np.uint8)
    data[:] = 0x11
    assert find_non_finite(data, dtype, (2, 3 * n)) is None
    width = 1 if dtype == "MXFP4" else 2
    data[4 * block + at : 4 * block + at + width] = list(value.to_bytes(width, "little"))
    assert find_non_finite(data, dtype, (2, 3 * n)) == ((1, n), 4 * block + at, kind)


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
