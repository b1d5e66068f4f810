"""What the operation tests share: instruction sets, a shape, stored matrices, and comparison of bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from ds4v41 import _ext
from tests.golden.load import TensorFile, checkpoint_folder, intermediates
from tests.ref import formats
from tests.ref.formats import F32, U8, f32

OPS: Any = _ext.ops
ISAS: list[str] = OPS.isas()
THREADS = (1, 2, 3, 5)
MODES = ("fp32", "bf16", "fp8")

COLUMN_BLOCK = {
    "f32": 1,
    "f16": 1,
    "bf16": 1,
    "fp8_block": 1,
    "fp8_row": 32,
    "fp4_row": 32,
    "q8_0": 32,
    "mxfp4": 32,
    "q4_k": 256,
    "q2_k": 256,
    "iq2_xxs": 256,
}
"""All row types, and of how many columns a row must be a multiple."""

GGML_TYPES = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "mxfp4": gguf.GGMLQuantizationType.MXFP4,
    "q4_k": gguf.GGMLQuantizationType.Q4_K,
    "q2_k": gguf.GGMLQuantizationType.Q2_K,
    "iq2_xxs": gguf.GGMLQuantizationType.IQ2_XXS,
}
_HALF_SCALES = {"q8_0": (34, (0,)), "q4_k": (144, (0, 2)), "q2_k": (84, (80, 82)), "iq2_xxs": (66, (0,))}
"""Block bytes, and where the half-precision scales of a block stand."""


class Stored(NamedTuple):
    """A matrix as the extension takes it, and its decoded values."""

    kind: str
    rows: int
    cols: int
    data: U8
    scale: U8 | None
    values: F32  # [rows, cols]

    def argument(self) -> tuple[Any, ...]:
        """What methods of `Backend` take."""
        return (self.kind, self.rows, self.cols, self.data, self.scale)

    def product(self, isa: str, x: F32) -> F32:
        """x [n, cols] times this matrix."""
        return np.asarray(OPS.product(isa, self.kind, self.rows, self.data, self.scale, x))

    def decode(self, isa: str) -> F32:
        """All rows as float32."""
        return np.asarray(OPS.decode(isa, self.kind, self.rows, self.cols, self.data, self.scale))


def flat(array: np.ndarray) -> U8:
    """The bytes of an array."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def bf16_bytes(values: F32) -> U8:
    """bfloat16 values, held in float32, as they are stored."""
    return flat((np.ascontiguousarray(f32(values)).view(np.uint32) >> 16).astype(np.uint16))


def stored_plain(values: F32, kind: str = "bf16") -> Stored:
    """A matrix of kind f32, f16 or bf16; the values must fit."""
    data = bf16_bytes(values) if kind == "bf16" else flat(values.astype({"f32": np.float32, "f16": np.float16}[kind]))
    return Stored(kind, values.shape[0], values.shape[1], data, None, f32(values))


def stored_fp8(codes: U8, scale: U8, kind: str = "fp8_block") -> Stored:
    """e4m3 codes [rows, cols] with one scale byte per 32 x 32 block, or per row and 32 columns (fp8_row)."""
    block = (32, 32) if kind == "fp8_block" else (1, 32)
    values = formats.dequantise_blocks(formats.e4m3_decode(codes), formats.e8m0_decode(scale), block)
    return Stored(kind, codes.shape[0], codes.shape[1], flat(codes), flat(scale), values)


def stored_fp4(packed: U8, scale: U8) -> Stored:
    """e2m1 pairs [rows, cols / 2] with one scale byte per row and 32 columns."""
    codes = formats.e2m1_decode(formats.unpack_nibbles(packed))
    values = formats.dequantise_blocks(codes, formats.e8m0_decode(scale), (1, 32))
    return Stored("fp4_row", values.shape[0], values.shape[1], flat(packed), flat(scale), values)


def stored_ggml(kind: str, data: U8) -> Stored:
    """A matrix [rows, row bytes] of ggml blocks, decoded by the gguf package."""
    values = f32(gguf.dequantize(data, GGML_TYPES[kind]))
    return Stored(kind, values.shape[0], values.shape[1], flat(data), None, values)


def random_stored(kind: str, rows: int, cols: int, rng: np.random.Generator) -> Stored:
    """A matrix with values around 1 that uses every code of its type."""

    def bytes_of(*shape: int) -> U8:
        return rng.integers(0, 256, size=shape, dtype=np.uint8)

    def scales(*shape: int) -> U8:
        return rng.integers(121, 131, size=shape, dtype=np.uint8)

    if kind in ("f32", "f16", "bf16"):
        values = rng.normal(size=(rows, cols))
        if kind == "f16":
            values = values.astype(np.float16)
        return stored_plain(formats.bf16_round(values) if kind == "bf16" else f32(values), kind)
    groups = -(-cols // 32)
    if kind in ("fp8_block", "fp8_row"):
        codes = bytes_of(rows, cols)
        codes[codes & 0x7F == 0x7F] = 0
        return stored_fp8(codes, scales(-(-rows // 32) if kind == "fp8_block" else rows, groups), kind)
    if kind == "fp4_row":
        return stored_fp4(bytes_of(rows, cols // 2), scales(rows, groups))
    if kind == "mxfp4":
        blocks = bytes_of(rows, groups, 17)
        blocks[:, :, 0] = scales(rows, groups)
        return stored_ggml(kind, blocks.reshape(rows, -1))
    block_bytes, where = _HALF_SCALES[kind]
    blocks = bytes_of(rows, cols // COLUMN_BLOCK[kind], block_bytes)
    for at in where:
        half = (rng.normal(size=blocks.shape[:2]) * 0.05).astype(np.float16)
        blocks[:, :, at : at + 2] = half[..., None].view(np.uint8)
    return stored_ggml(kind, blocks.reshape(rows, -1))


def small_shape(**changes: Any) -> dict[str, Any]:
    """Sizes of a model for `Backend`: those of the tiny golden model, one layer of each kind, and your changes."""
    shape: dict[str, Any] = {
        "vocab": 512,
        "hidden": 128,
        "n_layers": 1,
        "n_heads": 4,
        "head_dim": 64,
        "rope_dim": 16,
        "q_rank": 96,
        "o_rank": 32,
        "o_groups": 2,
        "n_experts": 16,
        "top_k": 3,
        "expert_dim": 64,
        "route_scale": 1.5,
        "swiglu_limit": 10.0,
        "norm_eps": 1e-20,
        "window": 16,
        "index_heads": 8,
        "index_dim": 32,
        "index_topk": 16,
        "candidate_source": -1,
        "candidate_blocks": 8,
        "candidate_block_size": 4,
        "n_streams": 4,
        "sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_columns": 6,
        "engram_dim": 32,
        "max_context": 4096,
        "rope_base": 10000.0,
        "compress_rope_base": 160000.0,
        "yarn_factor": 16.0,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_original": 256.0,
        "ratio": [0],
        "kv_source": [-1],
        "index_source": [-1],
        "engram_index": [-1],
        "source_layer": [],
    }
    unknown = changes.keys() - shape.keys()
    assert not unknown, f"no such sizes: {unknown}"
    return shape | changes


def backend(shape: dict[str, Any], mode: str, isa: str = ISAS[0], threads: int = 1) -> Any:
    """A back end of this shape; `mode` is fp32, bf16 or fp8."""
    return OPS.Backend(shape, mode, isa, threads)


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal bit for bit (-0 is not 0), except that any NaN equals any other."""
    assert a.shape == b.shape and a.dtype == b.dtype
    if a.dtype != np.float32:
        np.testing.assert_array_equal(a, b)
        return
    left, right = (np.where(np.isnan(x), np.uint32(0x7FC00000), np.ascontiguousarray(x).view("u4")) for x in (a, b))
    np.testing.assert_array_equal(left, right)


def _arrays(result: Any) -> list[np.ndarray]:
    if isinstance(result, dict):
        return [np.asarray(v) for _, v in sorted(result.items())]
    return [np.asarray(v) for v in (result if isinstance(result, tuple) else (result,))]


def same_on_all_isas(run: Callable[[str], Any]) -> list[np.ndarray]:
    """Run with every instruction set, demand equal bits, and give the arrays of the first one."""
    first = _arrays(run(ISAS[0]))
    for isa in ISAS[1:]:
        for a, b in zip(first, _arrays(run(isa)), strict=True):
            same_bits(a, b)
    return first


def same_on_all_backends(shape: dict[str, Any], mode: str, run: Callable[[Any], Any]) -> list[np.ndarray]:
    """Run on a back end of every instruction set and thread count, demand equal bits, and give the first arrays."""
    first: list[np.ndarray] = []
    for isa in ISAS:
        for threads in THREADS:
            arrays = _arrays(run(backend(shape, mode, isa, threads)))
            first = first or arrays
            for a, b in zip(first, arrays, strict=True):
                same_bits(a, b)
    return first


def values_of(style: str, shape: tuple[int, ...], rng: np.random.Generator) -> F32:
    """Random numbers: `normal`, `bf16`, `integers`, `wide` (exponents from -20 to 20), `holes` (half of them +-0)."""
    x = rng.normal(size=shape)
    if style == "bf16":
        return formats.bf16_round(x)
    if style == "integers":
        return f32(rng.integers(-8, 9, size=shape))
    if style == "wide":
        return f32(x * np.exp2(rng.integers(-20, 21, size=shape)))
    if style == "holes":
        return f32(x * rng.choice([0.0, -0.0, 1.0, 1.0], size=shape))
    return f32(x)


STYLES = ("normal", "bf16", "integers", "wide", "holes")
SPECIAL: F32 = f32([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 2.0**-126, 3e38, -3e38, 448, -448, 6, 1e-4])


def sprinkle(x: F32, rng: np.random.Generator, share: float = 0.05) -> F32:
    """The same with some elements replaced by zeros, infinities, NaN, subnormals and format limits."""
    return np.where(rng.random(x.shape) < share, rng.choice(SPECIAL, size=x.shape), x)


def identity_rope(n: int, rope_dim: int) -> tuple[F32, F32]:
    """cos and sin that rotate by nothing."""
    return np.ones((n, rope_dim // 2), np.float32), np.zeros((n, rope_dim // 2), np.float32)


def golden_mode(mode: str) -> str:
    """The golden name of a mode: fp8 is release precision."""
    return "fp8fp4" if mode == "fp8" else mode


@cache
def inside(mode: str) -> TensorFile:
    """Everything inside the tiny model for one prompt, in a mode."""
    return intermediates(golden_mode(mode))


@cache
def tiny_checkpoint(mode: str) -> TensorFile:
    """Tensors of the tiny model that a mode runs."""
    return TensorFile(checkpoint_folder(golden_mode(mode)) / "model.safetensors")


@cache
def tiny_matrix(mode: str, name: str) -> Stored:
    """A matrix of the tiny model in its stored form."""
    file = tiny_checkpoint(mode)
    raw, kind = file.raw(f"{name}.weight"), file.dtype(f"{name}.weight")
    if kind == "BF16":
        return stored_plain(file[f"{name}.weight"])
    scale = file.raw(f"{name}.scale")
    return stored_fp4(raw.view(np.uint8), scale) if kind == "I8" else stored_fp8(raw, scale)


def rope_of(shape: dict[str, Any], yarn: bool, first: int, n: int) -> tuple[NDArray[np.float32], ...]:
    """Frequencies [pairs], cos and sin [n, pairs] from the extension."""
    return tuple(np.asarray(a) for a in _ext.rope(shape, yarn, first, n))
