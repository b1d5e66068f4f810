"""Number formats (bfloat16, e4m3, e8m0, e2m1) and the three group quantisers of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Mode = Literal["fp32", "bf16", "fp8"]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

E2M1_MAGNITUDES: F32 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
E4M3_MAX = 448.0
E2M1_MAX = 6.0


def f32(x: Any) -> F32:
    """Round to single precision (or take it as it is when it already has it)."""
    return np.asarray(x, dtype=np.float32)


def bf16_round(x: Any) -> F32:
    """Round to the nearest bfloat16, ties to even; the result is held in float32. NaN stays NaN."""
    value = np.ascontiguousarray(f32(x))
    bits = value.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return f32(np.where(np.isnan(value), value, rounded.view(np.float32)))


def store(x: Any, mode: Mode) -> F32:
    """Round a result to the type in which the model keeps it: float32 in mode fp32, else bfloat16.

    There is one rounding from float64 to float32 before the one to bfloat16, as in a program that sums in fp32.
    """
    return f32(x) if mode == "fp32" else bf16_round(x)


def bf16_decode(raw: NDArray[np.uint16]) -> F32:
    """bfloat16 bit patterns to float32."""
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _e4m3_table() -> F32:
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    table = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    table[127] = np.nan
    return f32(table)


E4M3_MAGNITUDES: F32 = _e4m3_table()


def _nearest(magnitude: F32, table: F32) -> U8:
    """Index of the nearest table entry, ties to the even index; above the table the last entry."""
    middle = (table[:-1].astype(np.float64) + table[1:]) / 2
    index = np.searchsorted(middle, magnitude, side="left")
    on_tie = middle[np.minimum(index, len(middle) - 1)] == magnitude
    return np.asarray(index + (on_tie & (index % 2 == 1)), dtype=np.uint8)


def e4m3_encode(x: Any) -> U8:
    """Nearest e4m3 code, ties to even, saturating at +-448; NaN gives 0x7F."""
    value = f32(x)
    code = _nearest(np.abs(value), E4M3_MAGNITUDES[:127]) | (np.signbit(value).astype(np.uint8) << 7)
    return np.asarray(np.where(np.isnan(value), 0x7F, code), dtype=np.uint8)


def e4m3_decode(code: U8) -> F32:
    """e4m3 codes to float32."""
    magnitude = E4M3_MAGNITUDES[code & 0x7F]
    return f32(np.where(code & 0x80, -magnitude, magnitude))


def e2m1_encode(x: Any) -> U8:
    """Nearest e2m1 (fp4) code 0..15, ties to the even code, saturating at +-6; bit 3 is the sign."""
    value = f32(x)
    code = _nearest(np.abs(value), E2M1_MAGNITUDES) | (np.signbit(value).astype(np.uint8) << 3)
    return np.asarray(code, dtype=np.uint8)


def e2m1_decode(code: U8) -> F32:
    """e2m1 codes 0..15 to float32."""
    magnitude = E2M1_MAGNITUDES[code & 7]
    return f32(np.where(code & 8, -magnitude, magnitude))


def pack_nibbles(codes: U8) -> U8:
    """Two 4-bit codes a byte along the last axis (even length); the lower index goes into the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def unpack_nibbles(packed: U8) -> U8:
    """Inverse of `pack_nibbles`."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def e8m0_decode(raw: U8) -> F32:
    """Scale bytes to 2^(byte-127), float32."""
    return f32(np.ldexp(1.0, raw.astype(np.int32) - 127))


def ceil2(x: Any) -> F32:
    """Smallest power of two >= x, for positive normal float32."""
    bits = np.ascontiguousarray(f32(x)).view(np.uint32)
    exponent = (bits >> np.uint32(23)) + ((bits & np.uint32(0x7FFFFF)) != 0)
    return f32((exponent.astype(np.uint32) << np.uint32(23)).view(np.float32))


def e8m0_encode(power_of_two: F32) -> U8:
    """Scale byte of an exact power of two."""
    return (np.ascontiguousarray(power_of_two).view(np.uint32) >> np.uint32(23)).astype(np.uint8)


@dataclass(frozen=True)
class Quantised:
    """Vectors cut into groups along the last axis: one code per element, one scale per group."""

    codes: U8  # [..., n], one byte per element also for 4-bit codes
    scale: F32  # [..., ceil(n / group)]
    scale_raw: U8  # the stored scale byte (e8m0, or e4m3 for Q4c)
    values: F32  # [..., n], code * scale


def _group_amax(x: F32, group: int) -> F32:
    """Largest magnitude of each group; the last group may be short."""
    short = -x.shape[-1] % group
    padded = np.pad(np.abs(x), [(0, 0)] * (x.ndim - 1) + [(0, short)])
    return f32(padded.reshape(*x.shape[:-1], padded.shape[-1] // group, group).max(axis=-1))


def _spread(scale: F32, group: int, n: int) -> F32:
    return np.repeat(scale, group, axis=-1)[..., :n]


def quantise_q8(x: F32) -> Quantised:
    """Q8: e4m3 codes, a power-of-two scale per 32. Used for window rows and in front of fp8 and fp4 weights."""
    amax = np.maximum(_group_amax(x, 32), np.float32(1e-4))
    scale = ceil2(amax * np.float32(1 / 448))
    wide = _spread(scale, 32, x.shape[-1])
    codes = e4m3_encode(np.clip(x / wide, -E4M3_MAX, E4M3_MAX))
    return Quantised(codes, scale, e8m0_encode(scale), e4m3_decode(codes) * wide)


def quantise_q4i(x: F32) -> Quantised:
    """Q4i: e2m1 codes, a power-of-two scale per 32. Used for index queries and index keys."""
    amax = np.maximum(_group_amax(x, 32), np.float32(6 * 2.0**-126))
    scale = ceil2(amax * np.float32(1 / 6))
    wide = _spread(scale, 32, x.shape[-1])
    codes = e2m1_encode(np.clip(x / wide, -E2M1_MAX, E2M1_MAX))
    return Quantised(codes, scale, e8m0_encode(scale), e2m1_decode(codes) * wide)


def quantise_q4c(x: F32) -> Quantised:
    """Q4c: e2m1 codes, an e4m3 scale per 16 (not a power of two; it can be below amax / 6, so clipping is real)."""
    amax = np.maximum(_group_amax(x, 16), np.float32(6 * 2.0**-9))
    scale_raw = e4m3_encode(amax / np.float32(6))
    scale = e4m3_decode(scale_raw)
    wide = _spread(scale, 16, x.shape[-1])
    codes = e2m1_encode(np.clip(x / wide, -E2M1_MAX, E2M1_MAX))
    return Quantised(codes, scale, scale_raw, e2m1_decode(codes) * wide)


def dequantise_blocks(codes: F32, scale: F32, block: tuple[int, int]) -> F32:
    """Weight values from decoded codes [out, in] and one scale per block (rows, columns); edges may be ragged."""
    rows, columns = codes.shape
    wide = np.repeat(np.repeat(scale, block[0], axis=0), block[1], axis=1)[:rows, :columns]
    return f32(codes * wide)
