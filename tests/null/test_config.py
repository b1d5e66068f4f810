"""ModelConfig: what the published files say, derived facts, and refusal of everything that makes no model."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4v41.checkpoint.config import ModelConfig
from ds4v41.checkpoint.engram_hash import bucket_primes, is_prime
from ds4v41.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = json.loads((GOLDEN / "tiny/bf16/config.json").read_text())
RELEASED = json.loads((GOLDEN / "released/config.json").read_text())


def released() -> ModelConfig:
    return ModelConfig.from_hf(RELEASED, "released")


def changed(base: dict[str, Any], **text: Any) -> dict[str, Any]:
    config = copy.deepcopy(base)
    config["text_config"].update(text)
    return config


def problems_of(config: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(config, "the file")
    assert str(caught.value).startswith("the file: ")
    assert caught.value.problems
    return caught.value.problems


@pytest.mark.parametrize("name", ["released", "tiny/bf16", "tiny/fp8fp4", "tiny_vl"])
def test_published_files_round_trip(name: str) -> None:
    published = json.loads((GOLDEN / name / "config.json").read_text())
    config = ModelConfig.from_hf(published, name)
    assert config.ignored_keys == ()
    written = config.to_hf()
    assert ModelConfig.from_hf(written, "again") == config
    assert json.loads(json.dumps(written)) == written
    uninteresting = {"attention_dropout", "initializer_range", "use_cache"}
    expected = {k: v for k, v in published["text_config"].items() if k not in uninteresting}
    assert {k: written["text_config"][k] for k in expected} == expected
    assert written.get("quantization_config") == published.get("quantization_config")
    assert written["vision_config"] == published["vision_config"]


def test_released_values() -> None:
    c = released()
    assert (c.hidden_size, c.num_hidden_layers, c.vision_layers, c.quant_method, c.expert_dtype) == (
        5120,
        40,
        32,
        "fp8",
        "fp4",
    )
    assert c.rms_norm_eps == 1e-20
    assert c.rope_scaling_original_max_position_embeddings == 65536
    assert len(c.compress_ratios) == 40
    assert c.hc_mix_rows == 24
    assert (c.n_engram_columns, c.engram_in_dim, c.q_dim) == (24, 6144, 32768)


def test_released_sources() -> None:
    c = released()
    layers = range(40)
    assert [c.kv_source_of(i) for i in layers] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    expected = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [c.index_source_of(i) for i in layers] == expected
    assert [i for i in layers if c.uses_candidates(i)] == [24, 28, 32, 36]
    for layer in (-1, 40):
        with pytest.raises(IndexError, match=r"0\.\.39"):
            c.kv_source_of(layer)


def test_released_engram_constants() -> None:
    c = released()
    assert c.engram_multipliers(0) == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert c.engram_multipliers(1) == [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    assert c.engram_primes(0)[:2] == [16000057, 16000079]
    assert [sum(c.engram_primes(i)) for i in (0, 1)] == [384006168, 384016682]
    primes, offsets = c.engram_primes(1), c.engram_offsets(1)
    assert len(offsets) == 24
    assert offsets[0] == 0
    assert offsets[-1] + primes[-1] == 384016682


def test_engram_constants_equal_the_reference_vectors() -> None:
    from safetensors.numpy import load_file

    golden = load_file(GOLDEN / "units/engram_released.safetensors")
    c = released()
    found = {
        "multipliers": [c.engram_multipliers(i) for i in (0, 1)],
        "primes": [c.engram_primes(i) for i in (0, 1)],
        "offsets": [c.engram_offsets(i) for i in (0, 1)],
    }
    for key, values in found.items():
        assert golden[key].reshape(2, -1).tolist() == values


def test_primes_are_consecutive_and_the_start_counts() -> None:
    assert [n for n in range(100) if is_prime(n)] == [n for n in range(2, 100) if all(n % d for d in range(2, n))]
    assert not is_prime(3215031751)  # passes Miller-Rabin for the witnesses 2, 3, 5 and 7
    assert bucket_primes(503, 2, 3) == ((503, 509, 521), (523, 541, 547))


# ---- refusal ------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 5}, "multiple of o_groups"),
    ({"head_dim": 48}, "multiple of 32"),
    ({"index_head_dim": 48}, "multiple of 32"),
    ({"qk_rope_head_dim": 15}, "even"),
    ({"qk_rope_head_dim": 66}, "must not exceed head_dim"),
    ({"qk_rope_head_dim": 34}, "must not exceed index_head_dim"),
    ({"hidden_size": 0}, "from 1 to 65536"),
    ({"hidden_size": True}, "found true"),
    ({"hidden_size": 128.0}, r"found 128\.0"),
    ({"hidden_size": "128"}, "found '128'"),
    ({"hidden_size": 70000}, "from 1 to 65536"),
    ({"hidden_size": 10**5000}, "too long to show"),
    ({"vocab_size": 2**24 + 1}, "vocab_size"),
    ({"max_position_embeddings": 2**24 + 1}, "max_position_embeddings"),
    ({"num_hidden_layers": 1025}, "num_hidden_layers"),
    ({"hc_mult": 9}, "hc_mult"),
    ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters"),
    ({"index_topk": 4097}, "index_topk"),
    ({"num_experts_per_tok": 17}, "exceeds n_routed_experts"),
    ({"dspark_num_experts_per_tok": 9}, "exceeds dspark_n_routed_experts"),
    ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0]}, "expected 11"),
    ({"compress_ratios": [0, 0, 2, 2, 3, 1, 1, 1]}, "expected 0, 1 or 2"),
    ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 1, 0]}, "draft stages"),
    ({"compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1]}, "no KV source is at or before"),
    ({"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1]}, "has ratio 2"),
    ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 0]}, "no compressed entries"),
    ({"kv_source_layer_ids": [5, 2]}, "strictly increasing"),
    ({"kv_source_layer_ids": [2, 2, 5]}, "strictly increasing"),
    ({"kv_source_layer_ids": [2, 5, 8]}, r"layers 0\.\.7"),
    ({"index_source_layer_ids": [2, 4, 7]}, "must hold every KV source"),
    ({"candidate_source_layer_id": 4}, "one of kv_source_layer_ids"),
    ({"candidate_source_layer_id": 3}, "one of index_source_layer_ids"),
    ({"candidate_source_layer_id": 8}, "out of range"),
    ({"candidate_source_layer_id": 2}, "entries of other KV sources"),
    ({"candidate_topk_blocks": 3}, "at least index_topk"),
    ({"candidate_topk_blocks": None}, "candidate_topk_blocks"),
    ({"engram_layer_ids": [4, 1]}, "strictly increasing"),
    ({"engram_layer_ids": [1, 9]}, "names layers"),
    ({"engram_layer_ids": [1]}, "engram_num_embeddings has 2 entries"),
    ({"engram_num_embeddings": [3144, 3425]}, "expected 3424"),
    ({"engram_head_dim": 40}, "multiple of 32"),
    ({"engram_compressed_vocab_size": 513}, "exceeds vocab_size"),
    ({"engram_vocab_size": 2**31, "engram_n_heads": 256, "engram_max_ngram_size": 16}, "at most 4096"),
    ({"engram_pad_token_id": 512}, "outside the vocabulary"),
    ({"dspark_noise_token_id": 512}, "outside the vocabulary"),
    ({"dspark_target_layer_ids": [5, 6, 8]}, "names layers"),
    ({"dspark_target_layer_ids": []}, "is empty"),
    ({"dspark_block_size": 0}, "dspark_block_size"),
    ({"scoring_func": "sigmoid"}, "only value"),
    ({"hidden_act": "gelu"}, "only value"),
    ({"topk_method": "greedy"}, "only value"),
    ({"norm_topk_prob": False}, "only value"),
    ({"num_key_value_heads": 2}, "only value"),
    ({"tie_word_embeddings": True}, "only value"),
    ({"rms_norm_eps": float("nan")}, "not a finite number"),
    ({"swiglu_limit": -1.0}, "swiglu_limit"),
    ({"rope_scaling": None}, "YaRN"),
    ({"rope_scaling": {**TINY["text_config"]["rope_scaling"], "rope_type": "linear"}}, "only value"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "beta_fast"),
]


@pytest.mark.parametrize(("change", "expected"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_values_are_refused(change: dict[str, Any], expected: str) -> None:
    problems = problems_of(changed(TINY, **change))
    assert any(re.search(expected, problem) for problem in problems), problems
    assert any(key in problem for key in change for problem in problems) or "layer" in " ".join(problems)


@pytest.mark.parametrize("key", sorted(TINY["text_config"].keys() - {"model_type"}))
def test_a_missing_key_is_named_once(key: str) -> None:
    config = copy.deepcopy(TINY)
    del config["text_config"][key]
    optional = {"attention_bias", "attention_dropout", "initializer_range", "tie_word_embeddings"}
    if key in optional:
        ModelConfig.from_hf(config, "x")
    elif key == "candidate_source_layer_id":
        assert ModelConfig.from_hf(config, "x").candidate_source_layer_id is None
    else:
        (found,) = [problem for problem in problems_of(config) if f"text_config.{key}:" in problem] or [""]
        absent_drafter = key == "num_nextn_predict_layers"
        assert "missing" in found or absent_drafter


def test_all_problems_come_at_once() -> None:
    config = changed(TINY, head_dim=True, index_topk=0, scoring_func="x", kv_source_layer_ids=[5, 2])
    config["model_type"] = "deepseek_v4"
    config["eos_token_id"] = 512
    config["quantization_config"] = {"quant_method": "awq", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    text = "\n".join(problems_of(config))
    for key in (
        "head_dim",
        "index_topk",
        "scoring_func",
        "kv_source",
        "model_type",
        "eos",
        "quant_method",
        "block_size",
    ):
        assert key in text


def test_without_drafter_its_keys_may_be_absent() -> None:
    config = copy.deepcopy(TINY)
    for key in [k for k in config["text_config"] if k.startswith(("dspark_", "num_nextn"))]:
        del config["text_config"][key]
    config["text_config"]["compress_ratios"] = config["text_config"]["compress_ratios"][:8]
    c = ModelConfig.from_hf(config, "x")
    assert (c.num_nextn_predict_layers, c.dspark_target_layer_ids) == (0, ())
    assert ModelConfig.from_hf(c.to_hf(), "again") == c


def test_candidates_are_optional() -> None:
    config = changed(TINY, candidate_source_layer_id=None)
    c = ModelConfig.from_hf(config, "x")
    assert not any(c.uses_candidates(i) for i in range(8))


def test_numbers_published_in_two_ways() -> None:
    scaling = {**TINY["text_config"]["rope_scaling"], "original_max_position_embeddings": 256.0, "factor": 16.0}
    c = ModelConfig.from_hf(changed(TINY, rope_theta=10000, rope_scaling=scaling), "x")
    assert c == ModelConfig.from_hf(TINY, "x")


def test_fp4_experts_need_whole_groups() -> None:
    config = json.loads((GOLDEN / "tiny/fp8fp4/config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 48
    assert any("multiple of 32" in p for p in problems_of(config))
    ModelConfig.from_hf(changed(TINY, moe_intermediate_size=48), "bf16 experts have no groups")


def test_unknown_keys_are_listed() -> None:
    config = changed(TINY, num_hash_layers=3)
    config["foo"] = 1
    assert set(ModelConfig.from_hf(config, "x").ignored_keys) == {"foo", "text_config.num_hash_layers"}


@pytest.mark.parametrize("config", [None, [], "x", 3, {}, {"text_config": []}, {"text_config": {}, "model_type": 1}])
def test_not_a_configuration_at_all(config: Any) -> None:
    problems_of(config)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TEXT_KEYS = sorted(TINY["text_config"])


@given(st.dictionaries(st.sampled_from(TEXT_KEYS), JSON, min_size=1, max_size=4))
def test_any_value_gives_a_config_or_a_config_error(change: dict[str, Any]) -> None:
    try:
        config = ModelConfig.from_hf(changed(TINY, **change), "x")
    except ConfigError as error:
        assert error.problems
    else:
        assert ModelConfig.from_hf(config.to_hf(), "again") == config


@given(
    st.lists(st.sampled_from([0, 1, 2]), min_size=8, max_size=8),
    st.sets(st.integers(0, 7)).map(sorted),
    st.sets(st.integers(0, 7)).map(sorted),
    st.none() | st.integers(0, 7),
)
def test_accepted_layer_lists_give_every_layer_its_sources(
    ratios: list[int], kv: list[int], index: list[int], candidate: int | None
) -> None:
    change = {
        "compress_ratios": ratios,
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": sorted({*kv, *index}),
        "candidate_source_layer_id": candidate,
    }
    try:
        c = ModelConfig.from_hf(changed(TINY, **change), "x")
    except ConfigError:
        return
    for layer, ratio in enumerate(ratios):
        source, selection = c.kv_source_of(layer), c.index_source_of(layer)
        if ratio == 0:
            assert source is None and selection is None
        else:
            assert source is not None and selection is not None
            assert source <= selection <= layer
            assert ratios[source] == ratio
            assert c.kv_source_of(selection) == source
            if c.uses_candidates(layer):
                assert source == candidate
