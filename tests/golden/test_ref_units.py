"""The numpy references against the vectors of single operations."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.ref import attend, engram, formats, hc, linear, moe, norm, rope, select

from .compare import assert_bf16_close, relative
from .load import unit

EPS = 1e-20
HC_EPS = 1e-6


def bf16_weight(values: np.ndarray) -> linear.Weight:
    return linear.Weight(values, "bf16")


def test_quantiser_q8() -> None:
    v = unit("quant")
    got = formats.quantise_q8(v["x"])
    assert_array_equal(got.codes, v.raw("fp8.codes"))
    assert_array_equal(got.scale, v["fp8.scale_f32"])
    assert_array_equal(got.scale_raw, v["fp8.scale_e8m0"])
    assert_array_equal(got.values, v["fp8.dequant_bf16"])


@pytest.mark.parametrize("name", ["fp4_e8m0_b32", "fp4_e4m3_b16"])
def test_quantisers_fp4(name: str) -> None:
    v = unit("quant")
    quantise = formats.quantise_q4i if name == "fp4_e8m0_b32" else formats.quantise_q4c
    got = quantise(v["x"])
    assert_array_equal(formats.pack_nibbles(got.codes), v[f"{name}.packed"])
    assert_array_equal(got.scale, v[f"{name}.scale_f32"])
    assert_array_equal(got.scale_raw, v[f"{name}.scale_raw"])
    assert_array_equal(got.values, v[f"{name}.dequant_bf16"])
    assert_array_equal(formats.bf16_round(got.values), got.values)


def test_product_with_fp8_blocks() -> None:
    v = unit("gemm")
    values = formats.dequantise_blocks(v["w_fp8"], formats.e8m0_decode(v["w_fp8_scale"]), (32, 32))
    assert_allclose(linear.product_quantised(v["a"], values), v["out_fp8_f32"], rtol=1e-6)
    assert_bf16_close(linear.linear(v["a"], linear.Weight(values, "fp8"), "fp8"), v["out_fp8_bf16"])


def test_product_with_fp4_groups() -> None:
    v = unit("gemm")
    codes = formats.e2m1_decode(formats.unpack_nibbles(v["w_fp4_packed"]))
    values = formats.dequantise_blocks(codes, formats.e8m0_decode(v["w_fp4_scale"]), (1, 32))
    assert_allclose(linear.product_quantised(v["a"], values), v["out_fp4_f32"], rtol=1e-6)
    assert_bf16_close(linear.linear(v["a"], linear.Weight(values, "fp4"), "fp8"), v["out_fp4_bf16"])


def test_ragged_weight_blocks() -> None:
    v = unit("gemm")
    got = formats.dequantise_blocks(v["w_ragged_fp8"], formats.e8m0_decode(v["w_ragged_scale"]), (32, 32))
    assert_array_equal(got, v["w_ragged_dequant_f32"])


def test_norm_keeps_tiny_rows() -> None:
    v = unit("norm_and_hc")
    assert_allclose(norm.rms_norm(v["x"], v["weight"], EPS, "fp32"), v["out_f32"], rtol=1e-6, atol=0)
    assert_bf16_close(norm.rms_norm(v["x"], v["weight"], EPS, "bf16"), v["out_bf16"])


def test_collapse_and_expand() -> None:
    v = unit("norm_and_hc")
    assert_bf16_close(hc.collapse(v["hc.stream"], v["hc.pre"], "bf16"), v["hc.collapsed_bf16"])
    got = hc.expand(v["hc.sublayer_out"], v["hc.stream"], v["hc.post"], v["hc.comb"], "bf16")
    assert_bf16_close(got, v["hc.expanded_bf16"])


@pytest.mark.parametrize(
    ("iterations", "key"), [(20, "comb"), (1, "comb_iters1"), (2, "comb_iters2"), (3, "comb_iters3")]
)
def test_sinkhorn(iterations: int, key: str) -> None:
    v = unit("sinkhorn")
    got = hc.split(v["mixes"], v["scale"], v["base"], 4, iterations, HC_EPS)
    assert_allclose(got.pre, v["pre"], rtol=1e-6)
    assert_allclose(got.post, v["post"], rtol=1e-6, atol=1e-30)
    assert_allclose(got.comb, v[key], rtol=1e-5)


def test_sinkhorn_of_three_copies() -> None:
    v = unit("sinkhorn")
    ones, zeros = np.ones(3, np.float32), np.zeros(15, np.float32)
    got = hc.split(v["n3.mixes"], ones, zeros, 3, 5, HC_EPS)
    for name in ("pre", "post", "comb"):
        assert_allclose(getattr(got, name), v[f"n3.{name}"], rtol=1e-5)


YARN = rope.Yarn(16, 65536, 32, 1)


@pytest.mark.parametrize(
    ("name", "base", "yarn"), [("window_theta10000", 1e4, None), ("compress_theta160000_yarn", 1.6e5, YARN)]
)
def test_rope_tables(name: str, base: float, yarn: rope.Yarn | None) -> None:
    v = unit("rope_released")
    freq = rope.frequencies(64, base, yarn)
    assert_allclose(freq, v[f"{name}.inv_freq"], rtol=1e-6)
    cos, sin = rope.angles(v["positions"], freq)
    assert_allclose(cos, v[f"{name}.cos"], rtol=0, atol=2e-6)
    assert_allclose(sin, v[f"{name}.sin"], rtol=0, atol=2e-6)


def test_yarn_ramp() -> None:
    v = unit("rope_released")
    bounds = rope.yarn_bounds(64, 1.6e5, YARN)
    assert list(bounds) == list(v["compress_theta160000_yarn.low_high"]) == [15, 25]
    assert_allclose(rope.yarn_ramp(64, *bounds), v["compress_theta160000_yarn.ramp"], rtol=1e-6)


def test_rope_rotation_and_its_inverse() -> None:
    v = unit("rope_released")
    x = v["apply.x"]
    positions = v["apply.first_position"][0] + np.arange(len(x))
    cos, sin = rope.angles(positions, rope.frequencies(64, 1.6e5, YARN))
    assert_bf16_close(rope.rotate_tail(x, cos, sin, "bf16"), v["apply.rotated"])
    assert_bf16_close(rope.rotate_tail(x, cos, sin, "bf16", inverse=True), v["apply.inverse"])


def test_attend() -> None:
    v = unit("sparse_attn")
    args = (v["q"], v["kv"], v["idx"], v["sink"], 0.125)
    assert_bf16_close(attend.attend(*args, "bf16"), v["out_bf16"])
    assert_allclose(attend.attend(*args, "fp32"), v["out_f32"], rtol=1e-6, atol=1e-6)
    assert_array_equal(attend.attend(*args, "bf16")[1], 0)


def test_attend_needs_the_blocked_walk() -> None:
    """One block for the whole list rounds other probabilities: this vector can tell the two apart."""
    v = unit("sparse_attn")
    got = attend.attend(v["q"], v["kv"], v["idx"], v["sink"], 0.125, "bf16", block=80)
    assert 0.02 < (got != v["out_bf16"]).mean() < 0.35
    assert relative(got, v["out_bf16"]) < 5e-3


@pytest.mark.parametrize(
    "case",
    [
        "all_negative",
        "decode",
        "prefill_causal",
        "prefill_ratio2_with_empty_first_row",
        "short_context_keeps_all",
        "ties_all_equal",
        "ties_partial",
    ],
)
def test_candidate_blocks(case: str) -> None:
    v = unit("candidate_blocks")
    blocks, size = (int(i) for i in v[f"{case}.params"])
    got = select.candidate_mask(v[f"{case}.scores"], v[f"{case}.visible"], blocks, size)
    assert_array_equal(got, v[f"{case}.mask"])


def test_gate_with_text_bias() -> None:
    v = unit("gate")
    k, scale = v["params_topk_scale"]
    chosen, weights = moe.route(v["x"], v["weight"], v["bias"], int(k), float(scale))
    assert_array_equal(chosen, v["indices"])
    assert_allclose(weights, v["weights"], rtol=1e-6)


def test_gate_with_image_bias() -> None:
    v = unit("gate")
    k, scale = v["params_topk_scale"]
    bias = np.where(v["image_mask"][:, None], v["bias_vl"], v["bias"])
    chosen, weights = moe.route(v["x"], v["weight"], bias, int(k), float(scale))
    assert_array_equal(chosen, v["indices_vl"])
    assert_allclose(weights, v["weights_vl"], rtol=1e-6)


def test_expert() -> None:
    v = unit("expert")
    weights = moe.Expert(*(bf16_weight(v[name]) for name in ("w1", "w2", "w3")))
    assert_bf16_close(moe.expert(v["x"], weights, 10.0, "bf16"), v["out_unweighted"], steps=2)
    got = moe.expert(v["x"], weights, 10.0, "bf16", v["routing_weight"][:, 0])
    assert_bf16_close(got, v["out_weighted"], steps=2)


@pytest.mark.parametrize("masked", [False, True])
def test_engram_layer(masked: bool) -> None:
    v = unit("engram_layer")
    table = formats.dequantise_blocks(v["embed.weight"], formats.e8m0_decode(v["embed.scale"]), (1, 32))
    rows = table[v["hash_ids"]].reshape(len(v["hash_ids"]), -1)
    alive = v["token_mask"] if masked else None
    got = engram.engram(v["x"], rows, bf16_weight(v["wkv.weight"]), v["q_weight"], v["k_weight"], EPS, "bf16", alive)
    assert_bf16_close(got, v["out_masked" if masked else "out"], steps=2)


def released_plans() -> list[engram.HashPlan]:
    return engram.hash_plans([1, 14], 99092, 16_000_000, 4, 8)


def test_engram_hash_plan() -> None:
    v = unit("engram_released")
    for i, plan in enumerate(released_plans()):
        assert_array_equal(plan.multipliers, v["multipliers"][i])
        assert_array_equal(plan.primes, v["primes"][i])
        assert_array_equal(plan.offsets, v["offsets"][i])
        assert plan.n_rows == v["row_sums"][i]


@pytest.mark.parametrize("masked", [False, True])
def test_engram_hash_rows(masked: bool) -> None:
    v = unit("engram_released")
    want = v["hash_ids_masked" if masked else "hash_ids"]
    for batch, ids in enumerate(v["compressed_ids"]):
        alive = v["token_mask"][batch] if masked else None
        for i, plan in enumerate(released_plans()):
            assert_array_equal(engram.hash_rows(ids, plan, 2, alive), want[batch, :, i])


def test_engram_hash_rows_of_later_steps() -> None:
    v = unit("engram_released")
    for batch, ids in enumerate(v["compressed_ids"]):
        later = v["decode_compressed_ids"][batch]
        for i, plan in enumerate(released_plans()):
            got = engram.hash_rows(np.concatenate([ids, later]), plan, 2)[len(ids) :]
            assert_array_equal(got, v["decode_hash_ids"][batch, :, i])
