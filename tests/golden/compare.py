"""How golden numbers are compared: rows by norm, bfloat16 values by steps."""

from __future__ import annotations

import numpy as np

from tests.ref.formats import bf16_round


def row_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """|got - want| / |want| of each row (everything behind the first axis), float64."""
    a = got.reshape(len(got), -1).astype(np.float64)
    b = want.reshape(len(want), -1).astype(np.float64)
    return np.asarray(np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-300))


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want| of two whole arrays."""
    return float(row_errors(got[None], want[None])[0])


def bf16_steps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance in bfloat16 steps, element by element; both arrays must hold bfloat16 values. -0 and 0 are the same."""

    def key(x: np.ndarray) -> np.ndarray:
        value = np.ascontiguousarray(x, dtype=np.float32)
        assert np.array_equal(bf16_round(value), value), "not bfloat16 values"
        bits = (value.view(np.uint32) >> np.uint32(16)).astype(np.int64)
        return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)

    return np.asarray(np.abs(key(got) - key(want)))


def assert_bf16_close(got: np.ndarray, want: np.ndarray, *, steps: int = 1, share: float = 0.01) -> None:
    """At most `steps` bfloat16 steps anywhere, and fewer than `share` of the elements differ at all."""
    assert got.shape == want.shape
    distance = bf16_steps(got, want)
    assert distance.max(initial=0) <= steps, f"worst difference {distance.max()} steps, allowed {steps}"
    assert (distance > 0).mean() < share, f"{(distance > 0).mean():.2%} of the elements differ, allowed {share:.0%}"
