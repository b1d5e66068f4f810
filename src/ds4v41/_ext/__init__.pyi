"""
The compiled part of ds4v41. Use the classes of the ds4v41 package; this module may change at any time.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

from ds4v41._ext import (
    convert as convert,
    ops as ops,
    sampling as sampling
)


class ModelBuilder:
    """Puts a model together from named tensors."""

    def __init__(self, shape: dict, activations: str) -> None: ...

    def matrix(self, name: str, type: str, rows: int, cols: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], scale: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None: ...

    def vector(self, arg0: str, arg1: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], /) -> None: ...

    def hash(self, max_ngram: int, n_heads: int, token_map: Sequence[int], pad: int, multipliers: Sequence[Sequence[int]], primes: Sequence[Sequence[int]], offsets: Sequence[Sequence[int]]) -> None: ...

    def engram_table(self, n_rows: int, path: str, offset: int, row_bytes: int, scale_path: str = '', scale_offset: int = 0, scale_row_bytes: int = 0) -> None: ...

    def keep(self, arg: object, /) -> None:
        """Keeps an object (a memory map) alive as long as the model."""

    def build(self, isa: str, threads: int) -> Model: ...

class Model:
    """Weights and worker threads, shared by sessions."""

    @property
    def isa(self) -> str: ...

    @property
    def threads(self) -> int: ...

    def engram_rows(self, table: int, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], dead: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> NDArray[numpy.int64]:
        """Row numbers that each position reads: int64 [n, columns]."""

def cpu_isas() -> list[str]:
    """Instruction sets of this build that this machine has, best first."""

def memory_plan(shape: dict, activations: str, context: int, retain: int, chunk: int) -> dict:
    """
    Bytes of a session: caches reserved for the whole context, scratch of one chunk.
    """

def rope(shape: dict, yarn: bool, first: int, n: int) -> tuple:
    """Frequencies, cos and sin of positions."""

class Mark:
    """A position that a session can come back to."""

    @property
    def position(self) -> int: ...

    @property
    def valid(self) -> bool: ...

class Session:
    """State and runs of one session."""

    def __init__(self, model: object, context: int, retain: int, chunk: int) -> None: ...

    def run(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], logits: str = 'last', tick: object | None = None) -> NDArray[numpy.float32] | None:
        """
        Appends tokens; returns float32 [rows, vocab] for the wanted rows, or None. tick(done, total) is called now and then with the layers that are done; an exception from it stops the run.
        """

    def trace_run(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], logits: str = 'all', streams: dict = {}, mixes: dict = {}, after_engram: dict = {}) -> dict:
        """A run that also returns every intermediate; layer inputs may be given."""

    def mark(self) -> Mark: ...

    def truncate(self, position: int) -> None: ...

    def truncate_to_mark(self, arg: Mark, /) -> None: ...

    def cancel(self) -> None:
        """From any thread: stops the run in progress (and the next one)."""

    def clear_cancel(self) -> None: ...

    def close(self) -> None: ...

    @property
    def closed(self) -> bool: ...

    @property
    def position(self) -> int: ...

    @property
    def lowest(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def chunk(self) -> int: ...

    @property
    def tokens(self) -> NDArray[numpy.int32]:
        """int32 [position]"""

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def scratch_bytes(self) -> int: ...

    def live_bytes(self) -> bytes:
        """The live state: equal bytes mean equal futures."""
