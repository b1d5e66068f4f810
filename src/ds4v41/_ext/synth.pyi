"""
Weights that follow from a seed, made where they are used (benchmarks).
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

import ds4v41._ext


class Memory:
    """Memory of one tensor, on the host or on a device."""

    def __init__(self, backend: str, bytes: int, threads: int = 1) -> None: ...

    def fill(self, units: tuple[int, int, int, int, int], table: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], first: int, n: int) -> None:
        """
        Writes units first .. first + n - 1 to its start. units: (kind, bytes, bytes of heads, bytes of codes, key), as metal/synth_units.h says.
        """

    def read(self, offset: int, n: int) -> NDArray[numpy.uint8]:
        """A copy of some of its bytes, also from a device."""

    def array(self) -> NDArray[numpy.uint8]:
        """
        uint8 [bytes] over the memory itself. On a device with memory of its own Python must not look at the values.
        """

def engram(tables: Sequence[tuple[int, int, tuple[int, int, int, int, int], Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]]], threads: int = 16, cache_bytes: int = 0) -> ds4v41._ext.Engram:
    """
    Engram tables without files: (rows, codes a row, units, table) for each.
    """
