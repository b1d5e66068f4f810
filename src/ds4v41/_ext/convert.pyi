"""Row encoders of the converters."""

from typing import Annotated

import numpy
from numpy.typing import NDArray


def transcode(source: str, codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, rows: int, cols: int, target: str, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')] | None, *, threads: int = 1, search: bool = True) -> int:
    """
    Encode `rows` official rows of `cols` values (source type F32, F16, BF16, F8_E4M3 with 32x32 block scales, or I8 = packed
    fp4 with row scales) to rows of `target`, written to `out` (None: only check and count). All arrays are flat uint8.
    Returns how many values F16 or BF16 could not hold exactly. Raises ValueError(text, row, column) for NaN, infinity and
    overflow. The bytes do not depend on `threads`. search=False uses the plain min/max encoder for Q4_K.
    """

def pack_engram_rows(codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: int, dim: int, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], *, threads: int = 1) -> None:
    """
    Put e4m3 codes [rows, dim] and e8m0 scales [rows, dim/32] side by side. Raises ValueError(text, row, column) for NaN.
    """

def row_bytes(target: str, cols: int) -> int:
    """Bytes of one row of `cols` values."""
