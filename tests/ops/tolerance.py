"""Every tolerance of the operation tests, each with its reason.

Three kinds: limits from tests/golden/README.md, error bounds that follow from the number of roundings of an operation
(they hold for any data, so a random test never fails by bad luck), and limits in norm for operations with a rounding
in the middle, where one flipped rounding upstream moves everything behind it.
"""

from __future__ import annotations

import numpy as np

from tests.golden.compare import bf16_steps, row_errors
from tests.ref import formats
from tests.ref.formats import F32, U8, bf16_round, f32
from tests.ref.hc import sigmoid

UNIT = 2.0**-24
"""Largest relative error of one fp32 rounding."""

SMALLEST_NORMAL = 2.0**-126
"""Results below it are flushed to zero, so every comparison allows this much."""

BF16_STEP = 2.0**-7
"""Largest distance of two neighbouring bfloat16 values, relative to the smaller one."""

# ---------------------------------------------------------------- from tests/golden/README.md

GOLDEN_FP32 = 1e-6
"""fp32 unit results, relative."""

GOLDEN_SINKHORN = 1e-5
"""Twenty row and column divisions pass every rounding on to the next one."""

GOLDEN_ROPE = 2e-6
"""cos and sin, absolute."""

GOLDEN_TWO_STEPS = 2
"""bfloat16 steps for expert and Engram layer: a product is rounded before the last one."""

GOLDEN_ATTEND_ABSOLUTE = 1e-6
"""fp32 attention output: elements that cancel to nearly nothing have no relative accuracy."""

GOLDEN_ATTEND_LAYER = 2e-6
"""fp32 attention of the tiny model, rows in norm: the golden sums are themselves up to 8.4e-7 off the exact value."""

GOLDEN_LAYER_FP32 = 2e-6
"""fp32 experts and Engram of the tiny model from golden inputs, in norm over all rows. Another order of summation alone
gives 5e-7 (the golden program against itself). In the rounded modes such results must be within two bf16 steps in under
1 % of the elements."""

GOLDEN_CODES_DIFFER = 0.01
"""Share of fp4 elements of compressed rows and index keys that may sit on the neighbouring code.

The README accepts one rounding step in under 1 % of rounded elements; a code is a rounding too.
"""

# ---------------------------------------------------------------- scalar functions, units in the last place

ULPS = {"exp": 1.0, "log": 1.0, "rsqrt": 1.5, "softplus": 2.5, "sigmoid": 3.0, "silu": 4.0}
"""exp and log carry an error of their own (argument reduction, polynomial) and a last rounding. The others add to that:
rsqrt two correctly rounded steps, softplus an exp, a log and two sums, sigmoid an exp and three roundings, silu one
more. The measured worst cases are 0.92, 0.77, 1.49, 1.92, 2.65 and 3.39."""

# ---------------------------------------------------------------- bounds by counting roundings


def chain(n: int) -> int:
    """Roundings on the longest path of a row product of n elements in the canonical order.

    An accumulator meets every 128th element of a segment of 2048, segments are added up, and 128 accumulators fold in
    seven steps. One more stands for the terms of second order.
    """
    return -(-min(n, 2048) // 128) + -(-n // 2048) + 7 + 1


def product_bound(x: F32, values: F32) -> np.ndarray:
    """Error bound [n, out] of x [n, in] times values [out, in] in fp32: roundings times the sum of magnitudes.

    `values` are the decoded weights, which are exact in fp32.
    """
    magnitude = np.abs(x).astype(np.float64) @ np.abs(values).astype(np.float64).T
    return np.asarray(chain(x.shape[1]) * UNIT * magnitude + SMALLEST_NORMAL)


def quantised_bound(x: F32, values: F32) -> np.ndarray:
    """As `product_bound`, against the reference that adds blocks of 32 in fp32 and so has an error of its own."""
    return np.asarray(product_bound(x, values) * (1 + -(-x.shape[1] // 32) / chain(x.shape[1])))


def norm_relative(n: int) -> float:
    """RMSNorm of n elements: the sum of squares (its error is halved by the root), five steps behind it."""
    return (chain(n) / 2 + 6) * UNIT


def sum_bound(magnitude: np.ndarray, terms: int) -> np.ndarray:
    """A sum of a few products in index order; `magnitude` is the sum of the magnitudes of its terms."""
    return np.asarray((terms + 1) * UNIT * magnitude + SMALLEST_NORMAL)


def sigmoid_relative(argument: np.ndarray) -> np.ndarray:
    """Coefficient sigmoids: an error e of the argument (scale and base are two fp32 steps) moves the result by e.

    With the function's own units in the last place, and the factor 2 or the + eps behind it.
    """
    return np.asarray((2 * np.abs(argument) + 8) * UNIT)


def index_score_bound(q: F32, k: F32, weights: F32) -> np.ndarray:
    """fp32 index scores [n, m]: groups of 32 are exact integers, then one rounding per group, weight and head."""
    n_heads, dim = q.shape[1:]
    size = np.einsum("nhd,md->nhm", np.abs(q).astype(np.float64), np.abs(k).astype(np.float64))
    size = (size * np.abs(weights)[:, :, None]).sum(axis=1)
    return np.asarray((dim // 32 + n_heads + 3) * UNIT * size + SMALLEST_NORMAL)


SINKHORN_ITERATED = 1e-5
"""As the golden limit, for logits up to 12 in magnitude: their fp32 error of 12 * 2^-23 is a relative error of exp."""


def attend_factor(q: F32, keys: F32, listed: int) -> np.ndarray:
    """fp32 attention, [n, H]: the error of an output in norm, as a share of the norm of sum(p |v|) / denominator.

    q [n, H, hd] and keys [m, hd]: a score has an error e (32 lanes of a sum), and changes every probability by a factor
    within exp(+-2 e), its own error and that of the maximum. The sums over the listed rows are one rounding a row.
    """
    width = q.shape[2]
    size = np.einsum("nhd,md->nhm", np.abs(q).astype(np.float64), np.abs(keys).astype(np.float64)).max(axis=2)
    return np.asarray(2 * (width // 32 + 8) * UNIT * size * width**-0.5 + (listed + 20) * UNIT)


def gate_bound(dot: np.ndarray, error: np.ndarray, floor: float = 1e-6) -> np.ndarray:
    """Engram gate: sigmoid is flat (slope 1/4), but the signed root of a dot product near zero is steep, or jumps."""
    low, high = (np.sqrt(np.maximum(np.abs(dot) + e, floor)) for e in (-error, error))
    jump = np.where(np.abs(dot) <= error, 2 * high, 0)
    return np.asarray((high - low + jump) / 4 + 8 * UNIT)


def expert_bound(x: F32, w1: F32, w2: F32, w3: F32, limit: float, weight: np.ndarray) -> np.ndarray:
    """fp32 expert, [n, D]: errors of gate and up pass through silu (slope up to 1.1) and the product into the last sum.

    x [n, D]; w1 and w3 [F, D], w2 [D, F]; weight [n].
    """
    wide = x.astype(np.float64)
    gate, up = np.minimum(wide @ w1.T, limit), np.clip(wide @ w3.T, -limit, limit)
    silu = gate * sigmoid(gate)
    inner = np.abs(silu * up)
    error = 1.1 * product_bound(x, w1) * np.abs(up) + np.abs(silu) * product_bound(x, w3) + 10 * UNIT * inner
    scale = weight[:, None]
    last = (error * scale) @ np.abs(w2).astype(np.float64).T
    return np.asarray(1.01 * last + product_bound(f32(inner * scale), w2) + SMALLEST_NORMAL)


# ---------------------------------------------------------------- limits in norm

ATTEND_BF16 = 2.0**-8
"""Attention output in norm, against the same size as `attend_factor`: the last rounding is 2^-9 relative everywhere,
and a probability in front of it flips by a step now and then."""

EXPERTS = {"bf16": 2.0**-7, "fp8": 0.05}
"""Expert sums, rows in norm: gate, up, inner value and output are each rounded, and a few of them flip. fp8: an e4m3
code of the inner activation that flips is 1/16 of that element."""

ENGRAM_ROUNDED = 2.0**-7
"""Engram output rows in norm, against stream plus value: a key that flips by a bf16 step moves a gate whose dot product
nearly cancels by a few steps. The rows read are exact in the activation quantiser, so fp8 is like bf16."""

QUANTISED_SLACK = {"fp32": 1e-5, "bf16": 2.0**-7, "fp8": 2.0**-7}
"""Error of values in front of a key quantiser, relative to the row's largest: up to four bf16 roundings may flip by a
step of 2^-8 of their value, and the index key is a sum over such values."""

ROUTING = 2e-6
"""Routing weights, relative, and score gaps: softplus, root, a short sum of positive numbers, a division, a product.
The error of the logits comes on top: a score moves by less than that, in itself and relatively."""

# ---------------------------------------------------------------- assertions


def ulps(got: F32, want: np.ndarray) -> np.ndarray:
    """Distance of fp32 results from float64 values, in units in the last place of the wanted value."""
    unit = np.spacing(np.maximum(np.abs(f32(want)), np.float32(SMALLEST_NORMAL))).astype(np.float64)
    return np.asarray(np.abs(got.astype(np.float64) - want) / unit)


def assert_within(got: F32, want: np.ndarray, bound: np.ndarray | float) -> None:
    """|got - want| <= bound, element by element."""
    assert got.shape == np.shape(want)
    error = np.abs(got.astype(np.float64) - want) - bound
    worst = np.unravel_index(error.argmax(), error.shape) if error.size else ()
    assert not (error > 0).any(), f"at {worst}: got {got[worst]!r}, want {want[worst]!r} within {bound!r}"


def assert_rounds(got: F32, want: np.ndarray, bound: np.ndarray) -> None:
    """`got` is the bfloat16 of a value within `bound` of `want` (float64): a rounding may flip only near its middle."""
    assert got.shape == np.shape(want)
    assert np.array_equal(bf16_round(got), got), "not bfloat16 values"
    low, high = bf16_round(f32(want - bound)), bf16_round(f32(want + bound))
    assert ((low <= got) & (got <= high)).all(), f"worst: {bf16_steps(got, bf16_round(f32(want))).max()} bf16 steps"


def assert_stored(got: F32, want: np.ndarray, bound: np.ndarray, *, rounded: bool) -> None:
    """`assert_rounds` for a result that is kept in bfloat16, else `assert_within`."""
    if rounded:
        assert_rounds(got, want, bound)
    else:
        assert_within(got, want, bound)


def assert_fp4_rows(kind: str, raw: U8, exact: F32, slack: float) -> None:
    """Packed rows (`compressed` or `index`) of values [n, width] that are known up to slack times a row's largest one.

    The scale of each group is that of the largest value, and each element is on the nearest code.
    """
    n, width = exact.shape
    assert raw.shape[0] == n
    group = 16 if kind == "compressed" else 32
    scales = raw[:, width // 2 :]
    scale = formats.e4m3_decode(scales) if kind == "compressed" else formats.e8m0_decode(scales)
    codes = formats.e2m1_decode(formats.unpack_nibbles(raw[:, : width // 2]))
    quantise = formats.quantise_q4c if kind == "compressed" else formats.quantise_q4i
    error = slack * np.abs(exact).max(axis=1, initial=0, keepdims=True)
    amax = np.abs(exact).reshape(n, width // group, group).max(axis=2)
    low, high = (quantise(f32(np.repeat(amax + e, group, axis=1))).scale for e in (-error, error))
    assert ((low <= scale) & (scale <= high)).all(), "the scale of a group is not that of its largest value"
    wide = np.repeat(scale, group, axis=1)
    ratio = np.abs(exact) / wide
    half_step = np.select([ratio < 2, ratio < 4], [0.25, 0.5], 1.0)
    assert_within(codes * wide, exact.astype(np.float64), half_step * wide + error)


def assert_rows_close(got: F32, want: F32, limit: float) -> None:
    """Every row within `limit` in norm; rows of zeros must be zeros."""
    assert got.shape == want.shape
    errors = row_errors(got, want)
    assert (errors <= limit).all(), f"worst row error {errors.max():.2e}, allowed {limit:.2e}"


def assert_norms_within(error: np.ndarray, size: np.ndarray, factor: np.ndarray | float) -> None:
    """The norm of `error` along the last axis is at most `factor` times that of `size`."""
    got, most = np.linalg.norm(error.astype(np.float64), axis=-1), factor * np.linalg.norm(size, axis=-1)
    assert (got <= most).all(), f"worst {(got / np.maximum(most, SMALLEST_NORMAL)).max():.2f} times the allowed norm"
