"""Synthetic checkpoints: they open, are what was asked for, repeat, and have sane values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ds4v41.checkpoint import open_checkpoint
from ds4v41.checkpoint.safetensors import open_folder
from ds4v41.checkpoint.spec import PARTS, official_names
from ds4v41.checkpoint.tokenmap import compressed_token_map
from ds4v41.errors import ConfigError, OptionError
from ds4v41.synth import tiny_config, write_official
from ds4v41.synth_tokenizer import CONTROLS, default_compressed_size, synthetic_tokenizer

VISION: dict[str, Any] = {
    "vision_layers": 2,
    "vision_hidden_size": 64,
    "vision_num_attention_heads": 4,
    "vision_intermediate_size": 96,
    "vision_patch_size": 14,
    "vision_downsample_ratio": 3,
    "vision_max_image_tokens": 64,
    "vision_min_pixels": 1764,
    "vision_rope_theta": 10000.0,
}
OTHER_SHAPES: list[dict[str, Any]] = [
    {},
    VISION,
    {"hidden_size": 96, "q_lora_rank": 50, "o_lora_rank": 33, "vocab_size": 300, "hc_mult": 2},
    {"num_nextn_predict_layers": 0, "dspark_target_layer_ids": ()},
    {"engram_layer_ids": (0,), "engram_n_heads": 3, "engram_max_ngram_size": 3, "engram_head_dim": 64},
    {"candidate_source_layer_id": None, "hc_mult": 1, "o_groups": 4},
    {
        "num_hidden_layers": 1,
        "compress_ratios": (0,),
        "kv_source_layer_ids": (),
        "index_source_layer_ids": (),
        "candidate_source_layer_id": None,
        "engram_layer_ids": (),
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": (),
    },
]


@pytest.mark.parametrize("storage", ["bf16", "fp8fp4"])
@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=[str(i) for i in range(len(OTHER_SHAPES))])
def test_every_shape_opens(shape: dict[str, Any], storage: str, tmp_path: Path) -> None:
    config = write_official(tmp_path / "m", tiny_config(**shape), seed=3, storage=storage)
    checkpoint = open_folder(tmp_path / "m", parts=PARTS)
    assert checkpoint.config == config
    assert sorted(checkpoint.tensors) == sorted(official_names(config))
    checkpoint.check()
    token_map = checkpoint.token_map
    assert token_map is not None
    assert max(token_map) + 1 == config.engram_compressed_vocab_size
    dtypes = {tensor.dtype for tensor in checkpoint.tensors.values()}
    assert ("I8" in dtypes) == (storage == "fp8fp4") == (config.quant_method == "fp8")


def test_the_seed_decides_and_the_layout_does_not(tmp_path: Path) -> None:
    config = tiny_config()
    for name, seed, options in [("a", 1, {}), ("b", 1, {"shard_bytes": 200_000}), ("c", 2, {})]:
        write_official(tmp_path / name, config, seed, "fp8fp4", **options)
    a, b, c = (open_checkpoint(tmp_path / name) for name in "abc")
    assert a.tensors.keys() == b.tensors.keys()
    assert all(tensor.read() == b.tensors[name].read() for name, tensor in a.tensors.items())
    name = "layers.0.attn.wkv.weight"
    assert a.tensors[name].read() != c.tensors[name].read()
    assert a.tensors[name].read() != a.tensors["layers.1.attn.wkv.weight"].read()


def decoded(folder: Path, name: str) -> NDArray[np.float64]:
    """Values of a weight, written out here from the definition of the formats."""
    tensors = open_checkpoint(folder).tensors
    tensor = tensors[name]
    raw = tensor.view()
    if tensor.dtype == "BF16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4").reshape(tensor.shape).astype(np.float64)
    scale = tensors[name.removesuffix("weight") + "scale"]
    factors = 2.0 ** (scale.view().astype(np.float64).reshape(scale.shape) - 127)
    if tensor.dtype == "I8":
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(tensor.shape[0], -1)
        values = magnitudes[codes & 7] * np.where(codes & 8, -1, 1)
        return values * np.repeat(factors, 32, axis=1)
    exponent, mantissa = (raw >> 3) & 15, (raw & 7) / 8
    small = mantissa * 2.0**-6
    values = np.where(exponent == 0, small, (1 + mantissa) * 2.0 ** (exponent.astype(float) - 7))
    values = (values * np.where(raw & 0x80, -1, 1)).reshape(tensor.shape)
    rows, columns = tensor.shape
    return values * np.repeat(np.repeat(factors, 32, axis=0), 32, axis=1)[:rows, :columns]


@pytest.mark.parametrize("storage", ["bf16", "fp8fp4"])
def test_sizes_of_the_values(storage: str, tmp_path: Path) -> None:
    config = tiny_config()
    write_official(tmp_path / "m", config, 5, storage)
    for name, columns, gain in [
        ("layers.0.attn.wq_a.weight", 128, 1.0),
        ("layers.0.attn.wq_b.weight", 96, 1.5),
        ("layers.3.ffn.experts.2.w1.weight", 128, 4.0),
        ("layers.3.ffn.shared_experts.w2.weight", 64, 0.03),
    ]:
        values = decoded(tmp_path / "m", name)
        assert values.shape[1] == columns
        expected = gain / np.sqrt(columns)
        assert 0.6 * expected < values.std() < 2.2 * expected, name
        assert abs(values.mean()) < 0.1 * expected
    norm = decoded(tmp_path / "m", "layers.0.attn_norm.weight")
    assert 0.9 < norm.mean() < 1.1


def test_bf16_values_are_rounded_to_nearest() -> None:
    from ds4v41.synth import _bf16

    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-9, 1 + 2**-8 + 2**-20], dtype=np.float32)
    back = (_bf16(values).astype("<u4") << 16).view("<f4")
    assert back.tolist() == [1.0, 1.0, 1 + 2**-6, -1.0, 1 + 2**-7]


def test_refusals(tmp_path: Path) -> None:
    config = tiny_config()
    with pytest.raises(OptionError, match="storage must be one of"):
        write_official(tmp_path / "m", config, 1, "fp16")
    with pytest.raises(OptionError, match="shard_bytes"):
        write_official(tmp_path / "m", config, 1, shard_bytes=0)
    with pytest.raises(OptionError, match="unknown parts"):
        write_official(tmp_path / "m", config, 1, parts=("all",))
    assert not (tmp_path / "m").exists()
    (tmp_path / "m").mkdir()
    (tmp_path / "m/notes.txt").write_text("mine")
    with pytest.raises(OptionError, match="not empty"):
        write_official(tmp_path / "m", config, 1)
    with pytest.raises(OptionError, match="num_layers"):
        tiny_config(num_layers=3)
    with pytest.raises(ConfigError, match="o_groups"):
        tiny_config(o_groups=3)
    with pytest.raises(ConfigError, match="multiple of 32"):
        write_official(tmp_path / "n", tiny_config(moe_intermediate_size=48), 1, "fp8fp4")
    with pytest.raises(OptionError, match="at least 267 ids"):
        write_official(tmp_path / "n", tiny_config(vocab_size=200), 1)


SPECIAL = {0: "<a>", 1: "<b>", 5: "<c>"}


@given(st.integers(265, 3000), st.integers(-400, 400))
@settings(max_examples=25)
def test_tokenizers_have_the_wanted_compressed_size_or_are_refused(vocab_size: int, shift: int) -> None:
    wanted = default_compressed_size(vocab_size) + shift
    try:
        data = synthetic_tokenizer(vocab_size, wanted, SPECIAL)
    except OptionError as error:
        assert str(vocab_size) in str(error)
        assert shift != 0
        return
    token_map, size = compressed_token_map(data, vocab_size)
    assert (len(token_map), size) == (vocab_size, wanted)
    tokenizer = Tokenizer.from_buffer(data)
    assert tokenizer.get_vocab_size() == vocab_size
    for text in ("hello World, aa  bb\n", "Ünïcode 日本 🙂"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert {i: tokenizer.id_to_token(i) for i in SPECIAL} == SPECIAL
    assert tokenizer.encode("<think>").ids == [vocab_size - len(CONTROLS) + CONTROLS.index("<think>")]


def test_every_word_can_come_out_of_encoding() -> None:
    tokenizer = Tokenizer.from_buffer(synthetic_tokenizer(600, 450, SPECIAL))
    words = [t for t in tokenizer.get_vocab() if len(t) > 1 and t.lstrip("Ġ").isalpha() and t.isascii()]
    assert len(words) > 100
    assert all(tokenizer.encode(word).tokens == [word] for word in words)
