"""The tensor table against the released counts and against the headers of real checkpoints."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ds4v41.checkpoint.config import ModelConfig
from ds4v41.checkpoint.spec import (
    PARTS,
    ROLES,
    TensorSpec,
    expert_specs,
    is_stacked,
    official_names,
    stacked_table,
    tensor_table,
)
from ds4v41.errors import OptionError
from ds4v41.synth import tiny_config

GOLDEN = Path(__file__).parents[1] / "golden"
NANO = Path(__file__).parents[2] / "src/ds4v41/data/nano"


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((folder / "config.json").read_text()), str(folder))


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__", None)
    return header


RELEASED = config_of(GOLDEN / "released")
CASES = {
    "bf16": (GOLDEN / "tiny/bf16", [GOLDEN / "tiny/bf16/model.safetensors"]),
    "fp8fp4": (GOLDEN / "tiny/fp8fp4", [GOLDEN / "tiny/fp8fp4/model.safetensors"]),
    "nano": (NANO, [NANO / "model.safetensors"]),
    "image": (GOLDEN / "tiny_vl", [GOLDEN / "tiny/bf16/model.safetensors", GOLDEN / "tiny_vl/extra.safetensors"]),
}


def test_released_counts() -> None:
    names = official_names(RELEASED)
    assert len(names) == len(set(names)) == 96_085
    assert sum(name.startswith("mtp.") for name in names) == 2_401


def test_released_gguf_counts_and_extents() -> None:
    main = stacked_table(RELEASED, ("main", "engram"))
    assert (len(main), len(stacked_table(RELEASED, ("drafter",))), len(stacked_table(RELEASED, ("vision",)))) == (
        1046,
        81,
        266,
    )
    assert [spec.part for spec in main[-2:]] == ["engram", "engram"]
    assert len({spec.gguf_name for spec in main}) == 1046
    table_bytes = [spec.shape[0] * (256 + 8) for spec in main[-2:]]
    assert table_bytes == [101_377_628_352, 101_380_404_048]
    assert sum(-(-n // 16384) * 16384 for n in table_bytes) == 202_758_045_696


@pytest.mark.parametrize("case", CASES)
def test_real_headers_match(case: str) -> None:
    folder, files = CASES[case]
    config = config_of(folder)
    found: dict[str, Any] = {}
    for file in files:
        found |= header_of(file)
    assert sorted(official_names(config)) == sorted(found)
    for spec in tensor_table(config, PARTS):
        if spec.name not in found:
            assert spec.optional
            continue
        entry = found[spec.name]
        assert entry["dtype"] in spec.types, spec.name
        assert tuple(entry["shape"]) == spec.storage_shape(entry["dtype"]), spec.name
        assert (spec.scale_name in found if spec.scale != "none" else False) == spec.needs_scale(entry["dtype"])
        if spec.needs_scale(entry["dtype"]):
            assert tuple(found[spec.scale_name]["shape"]) == spec.scale_shape


def test_parts_and_roles() -> None:
    config = tiny_config(vision_layers=1, **VISION)
    whole = tensor_table(config, PARTS)
    assert Counter(spec.part for spec in whole).keys() == set(PARTS)
    assert {spec.role for spec in whole} == ROLES
    one_by_one = [spec for part in PARTS for spec in tensor_table(config, (part,))]
    assert one_by_one == sorted(whole, key=lambda spec: PARTS.index(spec.part))
    with pytest.raises(OptionError, match="everything"):
        tensor_table(config, ("everything",))


VISION = {
    "vision_hidden_size": 64,
    "vision_num_attention_heads": 4,
    "vision_intermediate_size": 96,
    "vision_patch_size": 14,
    "vision_downsample_ratio": 3,
    "vision_max_image_tokens": 64,
    "vision_min_pixels": 1764,
    "vision_rope_theta": 10000.0,
}


def test_stacked_experts_are_the_same_tensors() -> None:
    config = tiny_config()
    stacked = [spec for spec in stacked_table(config) if is_stacked(spec)]
    assert len(stacked) == 3 * config.num_hidden_layers
    single = [spec for spec in tensor_table(config) if spec.role == "expert"]
    assert [spec for s in stacked for spec in expert_specs(s)] == single
    assert stacked[0].name == "layers.0.ffn.experts.w1.weight"
    assert stacked[0].shape == (16, 64, 128)
    assert (single[1].name, single[1].shape) == ("layers.0.ffn.experts.1.w1.weight", (64, 128))
    assert stacked[0].gguf_name == single[1].gguf_name == "blk.0.ffn_gate_exps.weight"


def test_gguf_names_and_shapes_of_the_dialect() -> None:
    table = {spec.gguf_name: spec for spec in stacked_table(RELEASED, ("main", "drafter", "engram"))}
    expected = {  # in the order that GGUF writes dimensions, innermost first
        "token_embd.weight": (5120, 129280),
        "blk.0.hc_attn_fn.weight": (20480, 24),
        "blk.0.attn_q_b.weight": (1280, 32768),
        "blk.0.attn_output_a.weight": (4096, 8192),
        "blk.0.attn_output_b.weight": (8192, 5120),
        "blk.2.attn_compressor_gate.weight": (5120, 512),
        "blk.20.indexer.attn_k.weight": (512, 128),
        "blk.36.indexer.attn_q_b.weight": (1280, 4096),
        "blk.36.indexer.proj.weight": (5120, 32),
        "blk.3.ffn_down_exps.weight": (2304, 5120, 384),
        "blk.1.engram_q_norm.weight": (5120, 4),
        "blk.1.engram_kv.weight": (6144, 25600),
        "mtp.0.main_proj.weight": (15360, 5120),
        "mtp.2.markov_head.markov_w1.weight": (256, 129280),
        "mtp.2.confidence_head.proj.weight": (5376, 1),
        "mtp.1.ffn_gate_inp.weight": (5120, 128),
    }
    assert {name: table[name].shape[::-1] for name in expected} == expected
    assert "blk.20.attn_compressor_gate.weight" not in table  # ratio 1 has nothing to weigh
    assert "blk.24.indexer.attn_k.weight" not in table


def test_ragged_blocks_and_packed_codes() -> None:
    spec = TensorSpec("a.weight", "a", (70, 100), "linear", frozenset({"F8_E4M3"}), "block32x32", "main")
    assert (spec.scale_name, spec.scale_shape, spec.storage_shape("F8_E4M3")) == ("a.scale", (3, 4), (70, 100))
    expert = TensorSpec("e.weight", "e", (64, 128), "expert", frozenset({"I8", "BF16"}), "row32", "main")
    assert (expert.storage_shape("I8"), expert.storage_shape("BF16")) == ((64, 64), (64, 128))
    assert (expert.scale_shape, expert.needs_scale("I8"), expert.needs_scale("BF16")) == ((64, 4), True, False)
    plain = TensorSpec("n.weight", "n", (3,), "norm", frozenset({"BF16"}), "none", "main")
    with pytest.raises(ValueError, match="no scale"):
        _ = plain.scale_shape
