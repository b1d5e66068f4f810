"""Every tolerance of the operation tests, each with its reason.

Three kinds: limits from tests/golden/README.md, error bounds that follow from the number of roundings of an operation
(they hold for any data, so a random test never fails by bad luck), and limits in norm for operations with a rounding
in the middle, where one flipped rounding upstream moves everything behind it.
"""

from __future__ import annotations

import numpy as np

from tests.golden.compare import bf16_steps, row_errors
from tests.ref.formats import F32, bf16_round, f32

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

GOLDEN_LAYER = {"fp32": 1e-5, "bf16": 5e-3, "fp8": 5e-3}
"""One operation of the tiny model from golden inputs, in norm over all rows, by mode.

README: 5e-3 for a whole layer in the rounded modes (one value that flips costs a bf16, fp8 or fp4 step). In fp32 nothing
can flip except codes of the key and value quantisers, which such a test compares apart.
"""

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
    return product_bound(x, values) * (1 + -(-x.shape[1] // 32) / chain(x.shape[1]))


def norm_relative(n: int) -> float:
    """RMSNorm of n elements: the sum of squares (its error is halved by the root), five steps behind it."""
    return (chain(n) / 2 + 6) * UNIT


def sum_bound(magnitude: np.ndarray, terms: int) -> np.ndarray:
    """A sum of a few products in index order; `magnitude` is the sum of the magnitudes of its terms."""
    return np.asarray((terms + 1) * UNIT * magnitude + SMALLEST_NORMAL)


def sigmoid_relative(argument: np.ndarray) -> np.ndarray:
    """Coefficient sigmoids: scale and base are applied in two fp32 steps, and an argument error e moves the result by e.

    With the function's own units in the last place, the factor 2 or the + eps behind it.
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

# ---------------------------------------------------------------- limits in norm

ATTEND = {"fp32": 2e-6, "bf16": 2.0**-8}
"""Attention output rows in norm. fp32: scores of size 10 have an error of 10 * 20 roundings at most, and it enters exp.
bf16: one last rounding everywhere would be 2^-9 relative; probabilities flip by a step now and then."""

EXPERTS = {"fp32": 3e-6, "bf16": 2.0**-7, "fp8": 0.05}
"""Expert sums in norm: gate, up, inner value and output are each rounded. fp32: three products and silu in a row. fp8: an
e4m3 code of the inner activation that flips is 1/16 of that element."""

ENGRAM = {"fp32": 5e-6, "bf16": 2.0**-7, "fp8": 2.0**-7}
"""Engram output rows in norm. The rows read are exact in the activation quantiser, so fp8 is like bf16; the gate's dot
product cancels, and the root of a small value doubles its relative error."""

QUANTISED_SLACK = {"fp32": 1e-5, "bf16": 2.0**-7, "fp8": 2.0**-7}
"""Relative error of values in front of a key quantiser: two bf16 roundings (norm, rotation) may flip, one step each half.
Relative to the largest of a rotated pair, because a rotation can cancel."""

ROUTING = 2e-6
"""Routing weights, relative: softplus, root, a sum of a few positive numbers, a division, a product."""

ROUTING_GAP = 1e-5
"""Scores that are closer than this may be ranked either way; a logit's own error bound is below it for sizes up to 10."""

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
    """`got` is the bfloat16 of some value within `bound` of `want` (float64): a rounding may only flip near its middle."""
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


def assert_rows_close(got: F32, want: F32, limit: float) -> None:
    """Every row within `limit` in norm; rows of zeros must be zeros."""
    assert got.shape == want.shape
    errors = row_errors(got, want)
    assert (errors <= limit).all(), f"worst row error {errors.max():.2e}, allowed {limit:.2e}"
