"""The row encoders alone, read back by the decoders of the `gguf` package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ds4v41.checkpoint.safetensors import open_folder
from ds4v41.checkpoint.spec import tensor_table
from tests.model.convert_values import Bytes, Floats, e4m3, e8m0, fp4, official_values, rms

try:
    native = import_module("ds4v41._ext").convert
except ImportError:  # pragma: no cover
    pytest.skip("the extension is not built", allow_module_level=True)

NANO = Path(__file__).parents[2] / "src/ds4v41/data/nano"


def encode(values: NDArray[Any], type_name: str, *, threads: int = 1, search: bool = True) -> Bytes:
    rows, cols = values.shape
    raw = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
    out = np.empty(rows * native.row_bytes(type_name, cols), np.uint8)
    native.transcode("F32", raw, None, rows, cols, type_name, out, threads=threads, search=search)
    return out.reshape(rows, -1)


def decoded(values: NDArray[Any], type_name: str, **options: Any) -> Floats:
    result: Floats = dequantize(encode(values, type_name, **options), GGMLQuantizationType[type_name])
    return result


def spreads() -> Iterator[tuple[str, Floats]]:
    rng = np.random.default_rng(1)
    yield "normal", rng.normal(size=(64, 1024)).astype(np.float32)
    yield "heavy tails", rng.standard_t(3, size=(64, 1024)).astype(np.float32)
    yield "positive", np.abs(rng.normal(size=(64, 1024))).astype(np.float32)
    yield "tiny", (rng.normal(size=(64, 1024)) * 1e-5).astype(np.float32)
    codes = rng.integers(0, 256, size=(64, 512), dtype=np.uint8)
    yield "fp4", fp4(codes) * np.repeat(np.exp2(rng.integers(-8, -4, size=(64, 32))), 32, axis=1).astype(np.float32)


# RMS error of the search over that of the min/max encoder, measured, and rounded up to the next hundredth.
GAINS = {"normal": 0.90, "heavy tails": 0.90, "positive": 0.94, "tiny": 0.91, "fp4": 0.83}


@pytest.mark.parametrize(("name", "values"), list(spreads()), ids=[name for name, _ in spreads()])
def test_q4_k_search_beats_min_max(name: str, values: Floats) -> None:
    error = values - decoded(values, "Q4_K")
    plain = values - decoded(values, "Q4_K", search=False)
    assert rms(error) < GAINS[name] * rms(plain)
    blocks, plain_blocks = (np.square(e.astype(np.float64)).reshape(-1, 256).sum(1) for e in (error, plain))
    assert np.all(blocks <= plain_blocks * (1 + 1e-5) + 1e-30), "no block may get worse"


def test_q4_k_on_trained_fp4_experts() -> None:
    """The experts of the nano model: 5.0 % relative error, against 8.8 % without the search."""
    checkpoint = open_folder(NANO)
    total = np.zeros(3)
    for spec in tensor_table(checkpoint.config):
        if spec.role == "expert":
            values = official_values(spec, checkpoint.tensors)
            error, plain = (values - decoded(values, "Q4_K", search=search) for search in (True, False))
            total += [np.square(x.astype(np.float64)).sum() for x in (error, plain, values)]
    assert np.sqrt(total[0] / total[2]) < 0.051 and np.sqrt(total[0] / total[1]) < 0.57


@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.floats(-30, 12),
    shape=st.sampled_from([(1, 256), (3, 512), (5, 256)]),
    zeros=st.floats(0, 1),
    type_name=st.sampled_from(["Q8_0", "Q4_K", "MXFP4"]),
)
def test_encoders_on_any_values(seed: int, scale: float, shape: tuple[int, int], zeros: float, type_name: str) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_cauchy(shape).clip(-100, 100) * 2.0**scale * (rng.random(shape) >= zeros)).astype(np.float32)
    first = encode(values, type_name)
    assert np.array_equal(first, encode(values, type_name, threads=4))
    result = dequantize(first, GGMLQuantizationType[type_name]).astype(np.float64)
    error = np.abs(result - values)
    largest = np.abs(values).reshape(-1, 32).max(1, keepdims=True).astype(np.float64)
    if type_name == "Q8_0":  # half a step, the step at most 1/127 of the largest value, or of a subnormal f16
        assert np.all(error.reshape(-1, 32) <= largest / 127 / 2 * 1.001 + 2.0**-24)
    elif type_name == "MXFP4":  # the widest gap between codes is 2 of 6, and the scale may be one too large
        assert np.all(error.reshape(-1, 32) <= largest / 3 * 1.001)
    else:
        plain = np.abs(decoded(values, "Q4_K", search=False).astype(np.float64) - values)
        assert np.square(error).sum() <= np.square(plain).sum() * (1 + 1e-5) + 1e-30


@given(seed=st.integers(0, 2**32 - 1), low=st.integers(1, 240))
def test_mxfp4_is_exact_on_fp4(seed: int, low: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, size=(4, 64), dtype=np.uint8)
    scales = rng.integers(low, low + 10, size=(4, 4), dtype=np.uint8)
    values = fp4(codes) * np.repeat(e8m0(scales), 32, axis=1)
    assert np.array_equal(decoded(values, "MXFP4"), values), "encoding finds a scale that holds every value"
    out = np.empty(4 * native.row_bytes("MXFP4", 128), np.uint8)
    native.transcode("I8", codes.reshape(-1), scales.reshape(-1), 4, 128, "MXFP4", out)
    assert np.array_equal(out.reshape(4, 4, 17)[:, :, 0], scales), "repacking keeps the scales"
    assert np.array_equal(dequantize(out.reshape(4, -1), GGMLQuantizationType.MXFP4), values)


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32))
def test_f16_and_bf16_round_to_nearest_even(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32).reshape(1, 32)
    values = np.where(np.isfinite(values) & (np.abs(values) < 65_519), values, np.float32(0.1))
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    out = np.empty(64, np.uint8)
    n_inexact = native.transcode("F32", raw, None, 1, 32, "F16", out)
    half = values.astype(np.float16)
    assert np.array_equal(out.view(np.float16), half.reshape(-1))
    assert n_inexact == int((half.astype(np.float32) != values).sum())
    n_inexact = native.transcode("F32", raw, None, 1, 32, "BF16", out)
    words = values.view(np.uint32).astype(np.uint64)
    expected = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(out.view(np.uint16), expected.reshape(-1))
    assert n_inexact == int(((expected.astype(np.uint32) << 16).view(np.float32) != values).sum())


@given(rows=st.integers(1, 70), cols=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
def test_ragged_fp8_blocks(rows: int, cols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 127, size=(rows, cols), dtype=np.uint8)
    codes |= rng.integers(0, 2, size=(rows, cols), dtype=np.uint8) * np.uint8(128)
    scales = rng.integers(100, 140, size=(-(-rows // 32), -(-cols // 32)), dtype=np.uint8)
    out = np.empty(rows * cols * 4, np.uint8)
    native.transcode("F8_E4M3", codes.reshape(-1), scales.reshape(-1), rows, cols, "F32", out, threads=3)
    wide = np.repeat(np.repeat(e8m0(scales), 32, axis=0), 32, axis=1)[:rows, :cols]
    assert np.array_equal(out.view(np.float32).reshape(rows, cols), e4m3(codes) * wide)


def test_the_first_fault_is_named_whatever_the_threads() -> None:
    values = np.zeros((50, 256), np.float32)
    values[31, 7] = np.nan
    values[44, 0] = np.inf
    for threads in (1, 2, 7):
        with pytest.raises(ValueError) as caught:
            encode(values, "Q4_K", threads=threads)
        assert caught.value.args == ("NaN", 31, 7)


def test_bad_arguments() -> None:
    raw = np.zeros(4 * 32, np.uint8)
    for source, scales, rows, cols, target, n_out, text in (
        ("F64", None, 1, 32, "F16", 64, "source type"),
        ("F32", None, 1, 32, "Q5_K", 64, "target type"),
        ("F32", None, 1, 31, "F16", 62, "codes has 128 bytes, expected 124"),
        ("F32", None, 1, 32, "Q4_K", 64, "multiple of 256"),
        ("F32", None, 1, 32, "F16", 63, "out has 63 bytes, expected 64"),
        ("F8_E4M3", None, 4, 32, "F16", 256, "scales has 0 bytes, expected 1"),
        ("I8", np.zeros(4, np.uint8), 8, 31, "F16", 64, "multiple of 32"),
        ("F32", None, 0, 32, "F16", 0, "positive"),
    ):
        with pytest.raises(ValueError, match=text):
            native.transcode(source, raw, scales, rows, cols, target, np.zeros(n_out, np.uint8))
