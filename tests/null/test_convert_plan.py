"""Plans of conversions: the released numbers to the byte, other shapes, options, and refusals. Needs no extension."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds4v41.checkpoint.config import ModelConfig
from ds4v41.checkpoint.convert import convert, convert_drafter
from ds4v41.checkpoint.convert_plan import Plan, plan_tensors
from ds4v41.checkpoint.gguf_dialect import config_records, engram_encoding, engram_records, engram_row_bytes
from ds4v41.checkpoint.gguf_writer import CompleteFile
from ds4v41.errors import CheckpointError, ConfigError, OptionError, TokenizerError

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASED = GOLDEN / "released"
NANO = Path(__file__).parents[2] / "src/ds4v41/data/nano"
OUT = Path("never-written.gguf")


def released_config() -> ModelConfig:
    return ModelConfig.from_hf(json.loads((RELEASED / "config.json").read_text()), "released")


def names(plan: Plan) -> list[str]:
    return [t.name for t in plan.tensors]


def test_released_q4_to_the_byte() -> None:
    plan = convert(RELEASED, OUT, "q4", dry_run=True)
    assert len(plan.tensors) == 1046
    assert plan.main_bytes == 315_832_188_928
    assert plan.engram_bytes == 202_758_045_696
    assert plan.data_start == 5_832_704 and plan.header == "released"
    assert plan.file_bytes == 518_596_067_328
    assert not OUT.exists()


def test_released_engram_tables_lie_where_the_published_file_has_them() -> None:
    plan = convert(RELEASED, OUT, dry_run=True)
    tables = [t for t in plan.tensors if t.type == "I8"]
    assert [t.name for t in tables] == names(plan)[-2:] == ["blk.1.engram_embd.weight", "blk.14.engram_embd.weight"]
    assert [plan.data_start + t.offset for t in tables] == [315_838_021_632, 417_215_660_032]
    assert [t.shape for t in tables] == [(384_006_168, 264), (384_016_682, 264)]


def test_released_drafter_to_the_byte() -> None:
    plan = convert_drafter(RELEASED, OUT, "q4", dry_run=True)
    assert len(plan.tensors) == 81
    assert sum(t.nbytes for t in plan.tensors) == 8_328_370_568
    assert plan.data_start == 16_384 and plan.header == "exact"
    assert plan.file_bytes == 8_328_937_472


def test_released_types_and_bytes() -> None:
    """Sums that are known of the published file, in GiB."""
    by_type = convert(RELEASED, OUT, dry_run=True).bytes_by_type()
    gib = {name: round(nbytes / 2**30, 2) for name, (_, nbytes) in by_type.items()}
    assert gib == {"Q4_K": 284.77, "Q8_0": 7.07, "F16": 2.01, "F32": 0.3, "I8": 188.83}
    assert {name: n for name, (n, _) in by_type.items()}["Q4_K"] == 120
    mxfp4 = convert(RELEASED, OUT, "mxfp4", dry_run=True)
    assert round(mxfp4.main_bytes / 2**30, 2) == 278.32
    assert mxfp4.engram_bytes == 202_758_045_696


def test_writing_order_of_a_layer() -> None:
    layer = [n.removeprefix("blk.2.") for n in names(convert(RELEASED, OUT, dry_run=True)) if n.startswith("blk.2.")]
    assert layer == [
        "hc_attn_fn.weight", "hc_attn_base.weight", "hc_attn_scale.weight", "attn_norm.weight",
        "hc_ffn_fn.weight", "hc_ffn_base.weight", "hc_ffn_scale.weight", "ffn_norm.weight",
        "attn_sinks.weight", "attn_q_a.weight", "attn_q_b.weight", "attn_q_a_norm.weight", "attn_kv.weight",
        "attn_kv_a_norm.weight", "attn_output_a.weight", "attn_output_b.weight",
        "attn_compressor_kv.weight", "attn_compressor_norm.weight", "indexer.attn_k.weight", "indexer.k_norm.weight",
        "attn_compressor_gate.weight", "indexer.attn_q_b.weight", "indexer.proj.weight",
        "ffn_gate_inp.weight", "exp_probs_b.bias", "exp_probs_b_vl.bias",
        "ffn_gate_shexp.weight", "ffn_gate_exps.weight", "ffn_up_shexp.weight", "ffn_up_exps.weight",
        "ffn_down_shexp.weight", "ffn_down_exps.weight",
    ]  # fmt: skip


def test_types_by_name() -> None:
    types = {t.name: t.type for t in convert(RELEASED, OUT, dry_run=True).tensors}
    expected = {
        "token_embd.weight": "F16", "output_norm.weight": "F32", "output.weight": "Q8_0",
        "blk.0.hc_ffn_fn.weight": "F16", "blk.0.hc_ffn_base.weight": "F32", "blk.0.attn_sinks.weight": "F32",
        "blk.0.attn_q_a.weight": "Q8_0", "blk.0.attn_output_a.weight": "Q8_0", "blk.2.attn_compressor_kv.weight": "F16",
        "blk.2.indexer.attn_k.weight": "F16", "blk.2.indexer.attn_q_b.weight": "F16",
        "blk.2.indexer.proj.weight": "F16",
        "blk.0.ffn_gate_inp.weight": "F32", "blk.0.exp_probs_b.bias": "F32", "blk.0.ffn_down_shexp.weight": "Q8_0",
        "blk.1.engram_q_norm.weight": "F32", "blk.1.engram_kv.weight": "F16",
    }  # fmt: skip
    assert {name: types[name] for name in expected} == expected
    drafter = {t.name: t.type for t in convert_drafter(RELEASED, OUT, dry_run=True).tensors}
    assert drafter["mtp.2.markov_head.markov_w1.weight"] == drafter["mtp.0.main_proj.weight"] == "Q8_0"
    assert drafter["mtp.2.confidence_head.proj.weight"] == "F32"


@pytest.mark.parametrize("recipe", ["q4", "mxfp4", "f16"])
@pytest.mark.parametrize("kind", ["model", "drafter"])
def test_offsets_are_aligned_and_dense(recipe: str, kind: str) -> None:
    planned, _ = plan_tensors(released_config(), kind, recipe, None, None)
    end = 0
    for tensor in planned:
        assert tensor.offset % 16_384 == 0 and 0 <= tensor.offset - end < 16_384
        end = tensor.offset + tensor.nbytes


def test_f16_recipe_without_weights_says_what_it_assumes() -> None:
    plan = convert(RELEASED, OUT, "f16", dry_run=True)
    assert any("assumed to be exact in F16" in note for note in plan.notes)
    assert {t.type for t in plan.tensors if t.name.endswith("_exps.weight")} == {"MXFP4"}


def test_rows_that_do_not_fit_a_block(tmp_path: Path) -> None:
    """Hidden 128 and width 64: no Q4_K. fp4 experts keep their codes (MXFP4), bf16 ones become Q8_0."""
    for name, expected in (("fp8fp4", "MXFP4"), ("bf16", "Q8_0")):
        (tmp_path / "config.json").write_bytes((GOLDEN / "tiny" / name / "config.json").read_bytes())
        plan = convert(tmp_path, OUT, "q4", dry_run=True)
        assert {t.type for t in plan.tensors if t.name.endswith("_exps.weight")} == {expected}
        assert any(f"do not fit Q4_K, stored as {expected}" in note for note in plan.notes)
        assert plan.header == "estimated" and any("estimated" in note for note in plan.notes)


def test_no_image_biases_without_an_image_tower(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((GOLDEN / "tiny/fp8fp4/config.json").read_bytes())
    assert not [n for n in names(convert(tmp_path, OUT, dry_run=True)) if "_vl" in n]
    assert len([n for n in names(convert(RELEASED, OUT, dry_run=True)) if "_vl" in n]) == 40


@pytest.mark.parametrize(("head_dim", "row"), [(256, 264), (32, 33), (64, 66), (128, 132)])
def test_engram_row_rule(head_dim: int, row: int) -> None:
    raw = json.loads((RELEASED / "config.json").read_text())
    raw["text_config"]["engram_head_dim"] = head_dim
    config = ModelConfig.from_hf(raw, "test")
    assert engram_row_bytes(config) == row
    assert engram_encoding(config) == f"e4m3_e8m0_32_row{row}"
    planned, _ = plan_tensors(config, "model", "q4", None, None)
    assert planned[-1].shape == (384_016_682, row) and planned[-1].nbytes == 384_016_682 * row


def test_metadata_values_of_the_release() -> None:
    values = {record.key.removeprefix("deepseek41."): record.value for record in config_records(released_config())}
    assert values["rope_theta"] == 10_000 and values["compress_rope_theta"] == 160_000
    assert values["compress_ratios"] == (0, 0, *[2] * 18, *[1] * 20)
    assert values["rms_norm_eps"] == 1e-20 and values["norm_topk_prob"] is True
    records = engram_records(released_config(), [0] * 129_280)
    engram = {record.key.removeprefix("deepseek41.engram."): record.value for record in records}
    assert engram["rows"] == (384_006_168, 384_016_682) and engram["encoding"] == "e4m3_e8m0_32_row264"
    assert engram["primes"][0] == 16_000_057 and len(engram["primes"]) == 48
    assert engram["multipliers"][:2] == [76632096046245, 4839876093313] and engram["multipliers"][4] == 67716810739261


def test_plan_as_json() -> None:
    plan = convert_drafter(RELEASED, OUT, dry_run=True)
    data: dict[str, Any] = json.loads(json.dumps(plan.to_json()))
    assert data["file_bytes"] == plan.file_bytes and data["n_tensors"] == len(data["tensors"]) == 81
    assert data["tensors"][0]["offset"] == plan.data_start
    assert "81 tensors" in repr(plan)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown recipe 'q5': choose from q4, mxfp4, f16"):
        convert(RELEASED, OUT, "q5", dry_run=True)
    with pytest.raises(OptionError, match="threads is 0"):
        convert(RELEASED, OUT, threads=0, dry_run=True)
    with pytest.raises(OptionError, match="40 hexadecimal digits"):
        convert(RELEASED, OUT, revision="main", dry_run=True)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        convert(tmp_path / "missing", OUT, dry_run=True)
    with pytest.raises(CheckpointError, match="expected an official checkpoint folder"):
        convert(RELEASED / "config.json", OUT, dry_run=True)
    with pytest.raises(CheckpointError, match="only dry_run=True is possible"):
        convert(RELEASED, tmp_path / "out.gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError):
        convert(tmp_path, OUT, dry_run=True)
    with pytest.raises(TokenizerError, match=r"compressed ids|tokens, but the model has"):
        convert(RELEASED, OUT, dry_run=True, tokenizer=NANO / "tokenizer.json")


def test_a_model_without_drafter(tmp_path: Path) -> None:
    raw = json.loads((GOLDEN / "tiny/bf16/config.json").read_text())
    raw["text_config"]["num_nextn_predict_layers"] = 0
    raw["text_config"]["compress_ratios"] = raw["text_config"]["compress_ratios"][:8]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="has no drafter"):
        convert_drafter(tmp_path, OUT, dry_run=True)


def test_revision_is_found_where_downloads_leave_it(tmp_path: Path) -> None:
    from ds4v41.checkpoint.convert import _revision

    commit = "df42c109f1defefcbfcedbe7d905718a12266e40"
    assert _revision(tmp_path / "snapshots" / commit, None) == commit
    assert _revision(tmp_path, None) == "unknown"
    note = tmp_path / ".cache/huggingface/download/config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{commit}\netag\n1.0\n")
    assert _revision(tmp_path, None) == commit


# ---- the output file ------------------------------------------------------------------------------------------------


def test_complete_file_appears_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    with CompleteFile(path) as file:
        file.write(b"abc")
        file.pad(8)
        assert not path.exists() and [p.name for p in tmp_path.iterdir()] == ["out.gguf.partial"]
    assert path.read_bytes() == b"abc" + bytes(5) and [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_failed_file_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), CompleteFile(tmp_path / "out.gguf") as file:
        file.write(b"abc")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_existing_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    path.write_bytes(b"old")
    with pytest.raises(CheckpointError, match="exists already"), CompleteFile(path):
        pass
    assert path.read_bytes() == b"old"
    with pytest.raises(ZeroDivisionError), CompleteFile(path, overwrite=True) as file:
        file.write(bytes(1 // 0))
    assert path.read_bytes() == b"old"
    with CompleteFile(path, overwrite=True) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_folder_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="this is a folder"), CompleteFile(tmp_path, overwrite=True):
        pass


def test_another_run_finished_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partial file was opened, then renamed by the run that owned it: its result must not be emptied."""
    import fcntl

    path = tmp_path / "out.gguf"
    partial = tmp_path / "out.gguf.partial"
    partial.write_bytes(b"whole")
    monkeypatch.setattr(fcntl, "flock", lambda *_: partial.rename(path))
    with pytest.raises(CheckpointError, match="another process"), CompleteFile(path):
        pass
    assert path.read_bytes() == b"whole"


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    with CompleteFile(path) as file:
        file.write(b"first")
        with pytest.raises(CheckpointError, match="another process is writing"), CompleteFile(path):
            pass
        file.write(b"!")
    assert path.read_bytes() == b"first!"


def test_leftovers_of_a_killed_run_are_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    (tmp_path / "out.gguf.partial").write_bytes(bytes(1000))
    with CompleteFile(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and [p.name for p in tmp_path.iterdir()] == ["out.gguf"]
