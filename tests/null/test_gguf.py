"""The GGUF reader: official names, dialect checks, drafter files, and the released layout as a sparse file."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.null.gguf_sample import Records, Sample, raw_config

from ds4v41 import errors
from ds4v41.checkpoint import open_checkpoint
from ds4v41.checkpoint.gguf import open_drafter_gguf, open_gguf
from ds4v41.checkpoint.gguf_dialect import F32, STRING, U32, U64, Record
from ds4v41.checkpoint.gguf_header import read_header
from ds4v41.checkpoint.gguf_writer import pack_record, pack_text
from ds4v41.errors import CheckpointError
from ds4v41.inspect import inspect_checkpoint

SOURCE = Path(errors.__file__).parents[1]


def problems_of(path: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert caught.value.problems, "a fault inside a readable file must be listed"
    return list(caught.value.problems)


# ---- a right file ---------------------------------------------------------------------------------------------------


def test_opens_under_official_names(tmp_path: Path) -> None:
    sample = Sample()
    path = sample.write(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    assert checkpoint.dialect == "gguf" and checkpoint.config == sample.config and not checkpoint.problems
    by_gguf = {t.spec.name: t for t in sample.tensors}
    assert checkpoint.tensors.keys() == by_gguf.keys()
    start = len(sample.header())
    for name, tensor in checkpoint.tensors.items():
        planned = by_gguf[name]
        found = (tensor.dtype, tensor.shape, tensor.offset, tensor.nbytes)
        assert found == (planned.type, planned.shape, start + planned.offset, planned.nbytes), name
    experts = checkpoint.tensors["layers.3.ffn.experts.w2.weight"]
    assert experts.shape == (16, 128, 64) and experts.view().shape == (experts.nbytes,)
    assert checkpoint.token_map == [i % sample.config.engram_compressed_vocab_size for i in range(512)]


def test_tokenizer_metadata(tmp_path: Path) -> None:
    metadata = open_gguf(Sample().write(tmp_path / "m.gguf")).tokenizer_metadata
    assert metadata is not None
    assert metadata["tokens"][7] == "token000000007" and len(metadata["tokens"]) == 512
    assert metadata["token_types"] == [1] * 512 and metadata["merges"][3] == "token 000000003"
    assert (metadata["bos_token_id"], metadata["eos_token_id"], metadata["pre"]) == (0, 1, "joyai-llm")
    assert "add_eos_token" not in metadata


def test_engram_tables_are_never_mapped(tmp_path: Path) -> None:
    checkpoint = open_gguf(Sample().write(tmp_path / "m.gguf"))
    table = checkpoint.tensors["layers.4.engram.embed.weight"]
    assert table.dtype == "I8" and table.shape[1] == 33
    with pytest.raises(CheckpointError, match="never mapped"):
        table.view()
    assert table.read(0, 33) == bytes(33)
    first_table = min(t.offset for t in checkpoint.tensors.values() if t.segment is None)
    ends = {t.segment.end for t in checkpoint.tensors.values() if t.segment is not None}
    assert ends == {first_table}


def test_values_arrive_from_the_right_place(tmp_path: Path) -> None:
    sample = Sample()
    path = sample.write(tmp_path / "m.gguf")
    start = len(sample.header())
    with open(path, "r+b") as file:
        for i, tensor in enumerate(sample.tensors):
            file.seek(start + tensor.offset)
            file.write(struct.pack("<I", i))
    checkpoint = open_gguf(path)
    for i, planned in enumerate(sample.tensors):
        assert checkpoint.tensors[planned.spec.name].read(0, 4) == struct.pack("<I", i)


def test_leading_ones_of_a_shape_do_not_matter(tmp_path: Path) -> None:
    sample = Sample(kind="drafter")
    sample.tensors = [
        replace(t, shape=t.shape[1:]) if t.name.endswith("confidence_head.proj.weight") else t for t in sample.tensors
    ]
    checkpoint = open_drafter_gguf(sample.write(tmp_path / "d.gguf"), sample.config)
    assert checkpoint.tensors["mtp.2.confidence_head.proj.weight"].shape == (1, 144)


# ---- faults, all reported at once -----------------------------------------------------------------------------------


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    sample = Sample()
    sample.set("deepseek41.hidden_size", 129)
    sample.set("deepseek41.scoring_func", "softmax")
    del sample.records["deepseek41.hc_mult"]
    missing = next(t for t in sample.tensors if t.name == "blk.2.attn_kv.weight")
    sample.tensors = [
        replace(t, name="blk.99.attn_kv.weight") if t is missing else replace(t, type="Q4_K", shape=(128, 256))
        if t.name == "blk.3.attn_norm.weight" else t for t in sample.tensors
    ]
    found = "\n".join(problems_of(sample.write(tmp_path / "m.gguf")))
    for text in (
        "deepseek41.hidden_size: expected 128",
        "deepseek41.scoring_func: expected 'sqrtsoftplus'",
        "deepseek41.hc_mult is missing",
        "missing tensor blk.2.attn_kv.weight",
        "unexpected tensor 'blk.99.attn_kv.weight'",
        "'blk.3.attn_norm.weight': expected type BF16 or F16 or F32, found Q4_K",
    ):
        assert text in found


@pytest.mark.parametrize("cut", [1, 16_384, 1 << 20])
def test_truncated(tmp_path: Path, cut: int) -> None:
    sample = Sample()
    sample.cut = cut
    path = sample.write(tmp_path / "m.gguf")
    if cut == 1:  # only padding is missing
        assert open_gguf(path).tensors
        return
    found = problems_of(path)
    assert any("past the end of the file" in p and str(path) in p and "byte" in p for p in found)
    assert not any("missing tensor" in p for p in found), "a truncated tensor is not also missing"


def test_bytes_after_the_end(tmp_path: Path) -> None:
    sample = Sample()
    sample.cut = -16_384
    assert any("16384 bytes follow after the last tensor" in p for p in problems_of(sample.write(tmp_path / "m.gguf")))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("deepseek41.compress_ratios", (0, 0, 2, 2, 2, 1, 1, 2), "entry 7: expected 1"),
        ("deepseek41.kv_source_layer_ids", (2,), "expected 2 entries, found 1"),
        ("deepseek41.rms_norm_eps", 1e-6, "expected 1e-20"),
        ("deepseek41.norm_topk_prob", False, "expected True"),
        ("deepseek41.engram.encoding", "lloyd4_e5m3_32_r136", "encoded as 'lloyd4_e5m3_32_r136'"),
        ("deepseek41.engram.token_map", [999] * 512, "entry 0 is 999, expected less than"),
        ("deepseek41.engram.token_map", [0] * 511, "expected 512 entries, found 511"),
        ("deepseek41.engram.pad_id", 3, "expected 2"),
        ("tokenizer.ggml.tokens", ["a"], "expected 512 entries (the vocabulary), found 1"),
        ("tokenizer.ggml.bos_token_id", 4, "expected 0"),
    ],
)
def test_wrong_metadata(tmp_path: Path, key: str, value: Any, text: str) -> None:
    sample = Sample()
    sample.set(key, value)
    found = problems_of(sample.write(tmp_path / "m.gguf"))
    assert any(text in p for p in found), found


def test_wrong_kind_of_value(tmp_path: Path) -> None:
    sample = Sample()
    sample.set("deepseek41.hidden_size", 128.0, F32)
    sample.set("deepseek41.engram.multipliers", sample.records["deepseek41.engram.multipliers"].value[::-1], U64)
    found = "\n".join(problems_of(sample.write(tmp_path / "m.gguf")))
    assert "hidden_size: expected an integer, found a float" in found and "engram.multipliers: entry 0" in found


def test_wide_integers_are_accepted(tmp_path: Path) -> None:
    sample = Sample()
    sample.set("deepseek41.hidden_size", 128, U64)
    assert open_gguf(sample.write(tmp_path / "m.gguf")).config.hidden_size == 128


def test_not_strict_keeps_the_problems(tmp_path: Path) -> None:
    sample = Sample()
    sample.tensors = [t for t in sample.tensors if t.name != "blk.0.attn_norm.weight"]
    checkpoint = open_checkpoint(sample.write(tmp_path / "m.gguf"), strict=False)
    assert any("missing tensor blk.0.attn_norm.weight" in p for p in checkpoint.problems)
    assert "layers.0.attn_norm.weight" not in checkpoint.tensors and len(checkpoint.tensors) > 200


def test_tables_must_come_last(tmp_path: Path) -> None:
    sample = Sample()
    main = [t for t in sample.tensors if t.spec.part == "main"]
    tables = [t for t in sample.tensors if t.spec.part == "engram"]
    offset, moved = 0, []
    for tensor in [*main[:-1], *tables, main[-1]]:
        moved.append(replace(tensor, offset=offset))
        offset += tensor.padded_bytes
    sample.tensors = moved
    assert any("the tables must come last" in p for p in problems_of(sample.write(tmp_path / "m.gguf")))


def test_gate_and_up_of_one_type(tmp_path: Path) -> None:
    sample = Sample()
    assert {t.type for t in sample.tensors if t.name.endswith("_exps.weight")} == {"MXFP4"}  # rows of 128 and 64
    sample.tensors = [
        replace(t, type="IQ2_XXS", shape=(16, 64, 256)) if t.name == "blk.2.ffn_up_exps.weight" else t
        for t in sample.tensors
    ]
    assert any("expected shape [16, 64, 128]" in p for p in problems_of(sample.write(tmp_path / "m.gguf")))
    sample = Sample()
    up = next(t for t in sample.tensors if t.name == "blk.2.ffn_up_exps.weight")
    offset = max(t.offset + t.padded_bytes for t in sample.tensors if t.spec.part == "main")
    shift = 16 * 64 * 128 * 4
    sample.tensors = [
        replace(t, offset=t.offset + shift) if t.spec.part == "engram"
        else replace(t, type="F32", offset=offset, nbytes=shift) if t is up
        else t
        for t in sample.tensors
    ]
    assert any("gate and up must be of one type" in p for p in problems_of(sample.write(tmp_path / "m.gguf")))


# ---- other files ----------------------------------------------------------------------------------------------------


def test_llama_style_dialect_is_refused_by_name(tmp_path: Path) -> None:
    sample = Sample()
    sample.records = {k: r for k, r in sample.records.items() if not k.startswith("deepseek41.")}
    sample.records["deepseek41.embedding_length"] = Record("deepseek41.embedding_length", U32, 128)
    with pytest.raises(CheckpointError, match=r"llama\.cpp-style.*embedding_length.*ds4v41 convert"):
        open_gguf(sample.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("architecture", "text"),
    [("llama", "another model family"), ("deepseek4-vision", "image tower"), ("deepseek41-dspark", "Drafter.open")],
)
def test_other_architectures(tmp_path: Path, architecture: str, text: str) -> None:
    sample = Sample()
    sample.set("general.architecture", architecture)
    with pytest.raises(CheckpointError, match=text):
        open_gguf(sample.write(tmp_path / "m.gguf"))


def test_split_files_are_refused(tmp_path: Path) -> None:
    sample = Sample()
    sample.records["split.count"] = Record("split.count", U32, 2)
    with pytest.raises(CheckpointError, match="one part of a split GGUF"):
        open_gguf(sample.write(tmp_path / "m.gguf"))


def test_a_config_that_contradicts_itself(tmp_path: Path) -> None:
    raw = raw_config("tiny/fp8fp4")
    raw["text_config"]["num_experts_per_tok"] = 17
    sample = Sample()
    sample.set("deepseek41.config", json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"m\.gguf: byte \d+: metadata key deepseek41\.config"):
        open_gguf(sample.write(tmp_path / "m.gguf"))


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "missing.gguf", tmp_path, tmp_path / "pipe.gguf"):
        with pytest.raises(CheckpointError, match=r"no such file|expected a regular file"):
            open_gguf(path)
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_gguf(tmp_path / "empty.gguf")


# ---- drafter files --------------------------------------------------------------------------------------------------


def test_drafter_file(tmp_path: Path) -> None:
    sample = Sample(kind="drafter")
    path = sample.write(tmp_path / "d.gguf")
    checkpoint = open_drafter_gguf(path, sample.config)
    assert {t.spec.name for t in sample.tensors} == checkpoint.tensors.keys()
    assert checkpoint.tensors["mtp.1.ffn.experts.w3.weight"].shape == (8, 64, 128)
    report = inspect_checkpoint(path)
    assert report.kind == "drafter" and report.facts["dspark_block_size"] == 5 and not report.problems


def test_bare_drafter_keys(tmp_path: Path) -> None:
    sample = Sample(kind="drafter")
    names = {"n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    bare: Records = {}
    for key, record in sample.records.items():
        last = key.removeprefix("deepseek41.dspark.")
        if last in ("n_layers", "stage_count"):
            continue  # follows from the tensors
        new = key if last == key else "dspark." + names.get(last, last)
        bare[new] = replace(record, key=new)
    sample.records = bare
    sample.set("general.architecture", "deepseek4-dspark")
    sample.tensors = [t for t in sample.tensors if not t.name.endswith("_vl.bias")]
    assert open_drafter_gguf(sample.write(tmp_path / "d.gguf"), sample.config).tensors


def test_drafter_of_another_model(tmp_path: Path) -> None:
    sample = Sample(kind="drafter")
    sample.set("deepseek41.dspark.target_layer_ids", (1, 2, 3))
    sample.set("deepseek41.dspark.stage_count", 4)
    del sample.records["deepseek41.dspark.num_experts_per_tok"]
    sample.tensors[3] = replace(sample.tensors[3], name="mtp.0.hc_head_fn.weight")
    with pytest.raises(CheckpointError) as caught:
        open_drafter_gguf(sample.write(tmp_path / "d.gguf"), sample.config)
    found = "\n".join(caught.value.problems)
    for text in ("dspark_target_layer_ids (1, 2, 3)", "num_experts_per_tok is missing", "DeepSeek V4, not of V4.1",
                 "another key says 4"):
        assert text in found
    with pytest.raises(CheckpointError, match="expected a DSpark drafter"):
        open_drafter_gguf(Sample().write(tmp_path / "m.gguf"), sample.config)


# ---- the released layout --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the released layout and size: 518 GB, nearly all of it a hole."""
    sample = Sample("released")
    path = tmp_path_factory.mktemp("released") / "DeepSeek-V4.1-Flash-Q4.gguf"
    try:
        return sample.write(path)
    except OSError as error:
        pytest.skip(f"this file system holds no sparse files of 518 GB: {error}")


def test_released_layout(released: Path) -> None:
    checkpoint = open_gguf(released)
    assert len(checkpoint.tensors) == 1046
    start = read_header(released).data_start
    first, second = (checkpoint.tensors[f"layers.{i}.engram.embed.weight"] for i in (1, 14))
    assert (first.offset - start, first.nbytes) == (315_832_188_928, 101_377_628_352)
    assert (second.offset - first.offset, second.nbytes) == (417_215_660_032 - 315_838_021_632, 101_380_404_048)
    experts = checkpoint.tensors["layers.39.ffn.experts.w1.weight"]
    assert (experts.dtype, experts.shape, experts.nbytes) == ("Q4_K", (384, 2304, 5120), 2_548_039_680)


PEAK = """
def peak():
    try:  # ru_maxrss would count the parent's memory as well, from before this program replaced its copy
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) * 1024
    except OSError:
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
"""


def run_measured(code: str) -> tuple[float, int]:
    """Runs a snippet in a fresh interpreter; its seconds (the best of three) and the peak memory of the process."""
    program = (
        f"import time\n{PEAK}\nbegan = time.perf_counter()\n{code}\nseconds = time.perf_counter() - began\n"
        "print(seconds, peak())"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    runs = []
    for _ in range(3):
        run = [sys.executable, "-c", program]
        done = subprocess.run(run, capture_output=True, text=True, env=environment, check=True)
        seconds, peak = done.stdout.split()
        runs.append((float(seconds), int(peak)))
    return min(runs)


def test_open_and_inspect_are_quick_and_small(released: Path) -> None:
    assert released.stat().st_size > 518 * 10**9
    path = str(released)
    opened = run_measured(f"from ds4v41.checkpoint import open_checkpoint\nopen_checkpoint({path!r})")
    seen = run_measured(f"from ds4v41.inspect import inspect_checkpoint\ninspect_checkpoint({path!r}).to_json()")
    for seconds, peak in (opened, seen):
        assert seconds < 1.0 and peak < 200 << 20, (seconds, peak)


def test_inspect_released(released: Path) -> None:
    report = inspect_checkpoint(released)
    assert not report.problems and report.kind == "model"
    families = {f.name: f for f in report.families}
    assert families["experts"].by_type == {"Q4_K": (120, 120 * 2_548_039_680)}
    assert families["experts"].read_per_token == 120 * 2_548_039_680 * 6 // 384
    assert families["engram tables"].read_per_token == 2 * 24 * 264
    assert report.disk_bytes == 101_377_628_352 + 101_380_404_048
    assert round(report.read_per_token / 1e9, 2) == 13.51
    assert json.loads(json.dumps(report.to_json()))["resident_bytes"] == report.resident_bytes


def test_records_pack_as_the_container_wants() -> None:
    assert pack_record(Record("k", U32, 7)) == b"\x01\0\0\0\0\0\0\0k\x04\0\0\0\x07\0\0\0"
    packed = pack_record(Record("k", STRING, ["ab", ""], True))
    assert packed == pack_text("k") + struct.pack("<IIQ", 9, 8, 2) + b"\x02\0\0\0\0\0\0\0ab" + bytes(8)
    assert resource.getpagesize() <= 16_384  # the alignment is a multiple of the page
