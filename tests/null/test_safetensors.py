"""The official folder reader: what it accepts, faults of tensors, and NaN and infinity in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.null.folder_sample import SMALL, header_of, join, problems_of, split

from ds4v41.checkpoint import Checkpoint, open_checkpoint
from ds4v41.checkpoint.finite import find_non_finite
from ds4v41.checkpoint.safetensors import open_folder
from ds4v41.errors import CheckpointError
from ds4v41.synth import tiny_config, write_official

GOLDEN = Path(__file__).parents[1] / "golden"
NANO = Path(__file__).parents[2] / "src/ds4v41/data/nano"


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
