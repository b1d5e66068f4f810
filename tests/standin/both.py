"""Operations on the Metal back end (run by the stand-in) and on the CPU: equal bits, in every order of threads.

In a build with DS4_CUDA, on a machine with an NVIDIA GPU, the same tests run the kernels there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ds4v41 import _ext
from tests.ops.support import ISAS, OPS, same_bits

STANDIN: Any = getattr(_ext, "standin", None)
ORDERS = ("forward", "reverse", "shuffled")
CUDA = STANDIN is None and not _ext.device_missing("cuda")
# A build with a sanitizer has no checked kernels; there only values and the sanitizer's own findings count.
CHECKED = STANDIN is not None and STANDIN.has_checked
needs_checked = pytest.mark.skipif(not CHECKED, reason="this build has no checked kernels (sanitizers)")
needs_standin = pytest.mark.skipif(
    STANDIN is None and not CUDA, reason="this build has no stand-in for Metal, and no GPU"
)


def _arrays(result: Any) -> list[np.ndarray]:
    if isinstance(result, dict):
        return [np.asarray(v) for _, v in sorted(result.items())]
    return [np.asarray(v) for v in (result if isinstance(result, tuple) else (result,))]


def same_on_metal(
    shape: dict[str, Any], mode: str, run: Callable[[Any], Any], checked: bool = True
) -> list[np.ndarray]:
    """Run on the CPU and on Metal in three orders of threads, demand equal bits, give the arrays.

    With `checked` every access of the kernels is watched in the first order, where the build can do so: races, bounds,
    missing barriers.
    """
    want = _arrays(run(OPS.Backend(shape, mode, ISAS[0], 1)))
    if CUDA:
        for a, b in zip(want, _arrays(run(OPS.Backend(shape, mode, "cuda", 1))), strict=True):
            same_bits(a, b)
        return want
    try:
        for order in ORDERS:
            STANDIN.set_options(order=order, checked=checked and CHECKED and order == ORDERS[0])
            before = STANDIN.counters()["dispatches"]
            got = _arrays(run(OPS.Backend(shape, mode, "metal", 1)))
            assert STANDIN.counters()["dispatches"] > before
            for a, b in zip(want, got, strict=True):
                same_bits(a, b)
    finally:
        STANDIN.set_options(order=ORDERS[0], checked=False)
    return want
