"""
The compiled part of ds4v41. Use the classes of the ds4v41 package; this module may change at any time.
"""

from collections.abc import Sequence
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray

from ds4v41._ext import (
    bench as bench,
    convert as convert,
    ops as ops,
    sampling as sampling,
    standin as standin,
    synth as synth
)


class EngramHash:
    """Row numbers of token ids."""

    def __init__(self, max_ngram: int, n_heads: int, token_map: Sequence[int], pad: int, multipliers: Sequence[Sequence[int]], primes: Sequence[Sequence[int]], offsets: Sequence[Sequence[int]]) -> None: ...

    @property
    def columns(self) -> int: ...

    def rows(self, table: int, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], history: int = 0, dead: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> NDArray[numpy.int64]:
        """
        Row numbers that each position after the first `history` reads: int64 [n - history, columns].
        """

class EngramRequest:
    """Rows on their way."""

    def wait(self) -> tuple:
        """Returns (uint8 [n, row bytes], seconds waited); raises EngramError."""

    def abandon(self) -> None: ...

    @property
    def done(self) -> bool: ...

class Engram:
    """
    Tables, hot rows and reading threads; shared by the sessions of a model.
    """

    def __init__(self, tables: Sequence[tuple[int, int, str, int, int, str, int, int]], ram: bool = False, direct: bool = False, threads: int = 64, cache_bytes: int = 0, faults: dict | None = None) -> None:
        """
        tables: (rows, codes a row, path, offset, row bytes, scale path, scale offset, scale row bytes). faults: what reads do wrong on purpose, for tests (csrc/engram/faults.h).
        """

    def request(self, table: int, rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], urgency: str = 'step') -> EngramRequest: ...

    def counters(self) -> dict: ...

    @property
    def in_memory(self) -> bool: ...

    @property
    def made(self) -> bool:
        """No file: rows are made up when they are asked for."""

    @property
    def direct(self) -> bool: ...

    @property
    def cache_bytes(self) -> int: ...

    @property
    def cache_budget(self) -> int: ...

    @property
    def cache_rows(self) -> int: ...

    @property
    def cached(self) -> int: ...

    @property
    def most_threads(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def n_rows(self) -> list[int]: ...

    @property
    def bytes(self) -> int: ...

def engram_cache_replay(n_rows: int, keys: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> NDArray[numpy.uint8]:
    """
    Which of the keys (int64, not 0) a cache of n_rows rows would have had: uint8 [n].
    """

class ModelBuilder:
    """Puts a model together from named tensors."""

    def __init__(self, shape: dict, activations: str) -> None: ...

    def matrix(self, name: str, type: str, rows: int, cols: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], scale: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None: ...

    def vector(self, arg0: str, arg1: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], /) -> None: ...

    @overload
    def hash(self, arg: EngramHash, /) -> None: ...

    @overload
    def hash(self, max_ngram: int, n_heads: int, token_map: Sequence[int], pad: int, multipliers: Sequence[Sequence[int]], primes: Sequence[Sequence[int]], offsets: Sequence[Sequence[int]]) -> None: ...

    def engram(self, arg: Engram, /) -> None: ...

    def keep(self, arg: object, /) -> None:
        """Keeps an object (a memory map) alive as long as the model."""

    def build(self, isa: str, threads: int) -> Model: ...

class DrafterBuilder:
    """Puts a drafter together from named tensors."""

    def __init__(self, target: object, *, block: int, noise: int, markov_rank: int, target_layers: Sequence[int], n_stages: int, n_experts: int, top_k: int) -> None: ...

    def matrix(self, name: str, type: str, rows: int, cols: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], scale: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None: ...

    def vector(self, arg0: str, arg1: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], /) -> None: ...

    def keep(self, arg: object, /) -> None: ...

    def build(self) -> Drafter: ...

class Drafter:
    """A drafter's weights, shared by the sessions of its target."""

    @property
    def session_bytes(self) -> int:
        """
        Bytes that a session takes for it, beside its rings and what operations take.
        """

    @property
    def working_bytes(self) -> int:
        """
        Bytes that the operations of a session's drafter take beside them, at most.
        """

    @property
    def block(self) -> int: ...

    @property
    def n_stages(self) -> int: ...

class Model:
    """Weights and worker threads, shared by sessions."""

    @property
    def isa(self) -> str: ...

    @property
    def threads(self) -> int: ...

    def engram_rows(self, table: int, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], dead: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> NDArray[numpy.int64]:
        """EngramHash.rows of a new line of tokens."""

    @property
    def hash(self) -> EngramHash:
        """The n-gram hash: EngramHash."""

    @property
    def engram(self) -> Engram:
        """Engram, or None."""

def device_missing(backend: str) -> str:
    """
    Why there is no back end of this name (metal, cuda); empty when there is one.
    """

def metal_counters() -> dict:
    """
    What the Metal back ends of this process issued so far: dispatches, levels of them that had to wait for each other, command buffers, waits; and (dispatches, levels that they opened) by kernel.
    """

def matrix_missing(isa: str) -> str:
    """
    Why this instruction set has no fast matrix class here; empty when it has.
    """

def give_back_memory() -> None:
    """
    Returns pages of freed small objects to the system, where the allocator keeps them.
    """

def cpu_isas() -> list[str]:
    """Instruction sets of this build that this machine has, best first."""

def memory_plan(shape: dict, activations: str, context: int, retain: int, chunk: int, extra_windows: int = 0, threads: int = 0, backend: str = 'auto', matrix: bool = False) -> dict:
    """
    Bytes of a session: caches reserved for the whole context, scratch of one chunk, and what operations take beside it: on the CPU with so many worker threads (0: none), or on a device.
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

    def __init__(self, model: object, context: int, retain: int, chunk: int, drafter: object | None = None, every_row: bool = False) -> None: ...

    def run(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], logits: str = 'last', tick: object | None = None, after: int = 0, matrix: bool = False) -> NDArray[numpy.float32] | None:
        """
        Appends tokens; returns float32 [rows, vocab] for the wanted rows, or None. tick(done, total) is called now and then with how much of the work is done; an exception from it stops the run. after: with logits "none", so many tokens of the same prefill follow, and rows that nobody will need are left out. matrix: in that numeric class.
        """

    def trace_run(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], logits: str = 'all', streams: dict = {}, mixes: dict = {}, after_engram: dict = {}) -> dict:
        """A run that also returns every intermediate; layer inputs may be given."""

    def expect(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        What the run after the next one will probably append: its Engram rows are read early. Only a hint.
        """

    def engram_counters(self) -> dict:
        """
        wait_seconds that layers waited for rows; runs; requests that an expectation had begun early, or the device joined.
        """

    def mark(self) -> Mark: ...

    def truncate(self, position: int) -> int:
        """
        Goes back where the window rows are kept; returns how many tokens ran again (0 or 1).
        """

    def rewind(self, position: int, end: int = 0) -> int:
        """
        Goes back to any position; returns how many tokens ran again. end: what is prefilled next ends there, so only what that needs is run; 0: everything.
        """

    def complete(self, end: int = 0) -> int:
        """
        Computes missing window rows; returns how many tokens ran. end: as for rewind.
        """

    def fork(self) -> Session: ...

    def last_logits(self) -> NDArray[numpy.float32] | None:
        """Logits after the last token, or None when they are not known."""

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
    def ready(self) -> bool: ...

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
    def history(self) -> NDArray[numpy.int32]:
        """
        tokens, plus 2^30 where a token was computed in the matrix class: int32 [position]
        """

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def scratch_bytes(self) -> int: ...

    @property
    def working_bytes(self) -> int: ...

    @property
    def draft_working_bytes(self) -> int:
        """What the operations of the drafter's back end keep."""

    def start_ledger(self) -> None:
        """Counts and times every operation from now on."""

    def ledger(self) -> object:
        """
        What start_ledger() saw: rows (op, layer, dispatches, bytes, seconds, dispatches and seconds of the device), runs, tokens, seconds, missing; or None.
        """

    def draft_ledger(self) -> object:
        """The same of the drafter: its runs are draft blocks."""

    def fill_for_benchmark(self, position: int, seed: int) -> None:
        """
        Benchmarks only: random caches and tokens up to an even position, in an empty session.
        """

    def encoder_kept(self, position: int) -> bool:
        """Are the encoder's window rows at this earlier position kept?"""

    @property
    def decoder_cone(self) -> int:
        """
        Tokens that are run again where only the window rows of the decoder are missing, at most.
        """

    def reaches(self, position: int) -> bool:
        """Would truncate(position) work?"""

    def live_bytes(self) -> bytes:
        """The live state: equal bytes mean equal futures."""

    def draft_start(self, anchor: int, n_rows: int, settled: bool = False) -> None:
        """
        Runs the drafter's stages for the tokens after `anchor`, which stands at the present position. settled: its windows stay as full as they are.
        """

    def draft_draw(self, sampler: sampling.Sampler, seed: int, anchor: int, before: Sequence[int], n: int, worth: Sequence[float], history: sampling.TokenHistory | None = None, allowed: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, start: int = 0, settled: bool = False) -> tuple[list[int], list[float]]:
        """
        start: runs the stages first, as draft_start(anchor, start, settled). The next n drafts behind `anchor` and `before`, drawn with the sampler: (tokens, chance of the likeliest token of each row). Stops early when the product of the chances so far is not above `worth` of that many drafts.
        """

    def feed_draw(self, token: int, sampler: sampling.Sampler, seed: int, history: sampling.TokenHistory | None = None, chances: bool = False) -> tuple:
        """
        Appends a token and draws the next: as Sampler.draw. The history holds the token already. chances: a fifth item, how likely the likeliest token was (after bias and penalties, at temperature 1).
        """

    def verify_draw(self, tokens: Sequence[int], sampler: sampling.Sampler, seed: int, history: sampling.TokenHistory | None = None, chances: bool = False) -> list:
        """
        Appends a token and drafts behind it, draws row after row while the drafts hold, and takes the others back: a list of draws, one more than drafts that held.
        """

    @property
    def taking_back(self) -> bool:
        """Did the last verify_draw() fail while it took drafts back?"""

    def draft_row(self, i: int, previous: int) -> tuple:
        """
        Of the i-th draft after `previous`: logits [vocab], the confidence head's logit, the largest probability.
        """

    @property
    def drafter_fault(self) -> str:
        """Why the session dropped its drafter itself; empty while it works."""

    def drop_drafter(self) -> None: ...

    def draft_settle(self) -> None:
        """
        Puts the captured rows that a draft would see into its windows, which draft_start() does otherwise.
        """

    def draft_settle_some(self) -> int:
        """The newest of them, half a window at most; how many they were."""

    @property
    def draft_unsettled(self) -> int:
        """How many rows that would be now."""

    @property
    def draft_context(self) -> int:
        """Rows of the target that a draft would see now."""

    def draft_captured(self) -> NDArray[numpy.float32]: ...

    def inject_fault(self, point: str, after: int = 0, kind: str = 'runtime') -> None:
        """Tests only: the point fails once, after it was passed `after` times."""

    def rows_bytes(self, begin: int, end: int) -> int:
        """Bytes that export_rows(begin, end) returns."""

    def export_rows(self, begin: int, end: int) -> NDArray[numpy.uint8]:
        """
        Compressed and index rows that tokens begin .. end - 1 complete: uint8 array.
        """

    def begin_restore(self, keep: int) -> None:
        """
        Keeps the rows of the first tokens and drops the rest; rows may follow.
        """

    def expect_rows(self, end: int) -> None:
        """Rows of so many tokens are about to come."""

    def import_rows(self, begin: int, end: int, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def read_pages(self, pages: Sequence[tuple[int, int, int, int, int, Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None]], tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, frontier: tuple[int, int, int, int] | None = None) -> tuple[int, str] | None:
        """
        import_rows of pages (begin, end, fd, offset, sum, None) from open files whose rows have that XXH64, or (begin, end, -1, 0, 0, rows) from memory; with tokens also finish_restore, and read_frontier of (fd, offset, bytes, sum). Returns None, or the number of what is damaged (the frontier counts last) and why.
        """

    def finish_restore(self, history: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        All tokens of the restored state, as `history`; window rows are missing until complete().
        """

    def export_frontier(self, encoder: bool = False) -> NDArray[numpy.uint8]:
        """
        Window rows, open pair and last row at the position: uint8 array. encoder: those of the encoder layers only.
        """

    def import_frontier(self, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    @property
    def own_bytes(self) -> int:
        """Bytes of cache segments that only this session uses."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of cache segments that forks use as well."""

    @property
    def shares(self) -> bool:
        """Do forks share memory (else they copy it)?"""

    def rewind_start(self, position: int, end: int = 0) -> int:
        """The first token that rewind(position, end) runs again."""

    def restore_start(self, position: int, end: int = 0, encoder: bool = False) -> int:
        """
        The first token that complete(end) runs again when rows, or an encoder frontier, were restored at position.
        """

def cone(shape: dict, position: int, end: int, logits_from: int, window_from: int, entries_from: int, low: Sequence[int], cut: bool = False) -> tuple:
    """
    The rows to compute (csrc/engine/cone.h): first stream that enters each layer and the head, first window rows.
    """

def xxh64(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], seed: int = 0) -> int:
    """XXH64 of the bytes."""

def select(scores: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], k: int, isa: str = 'auto') -> NDArray[numpy.int32]:
    """
    The positions, ascending, of the k highest of `scores` (float32, one dimension): higher first, then the lower index. -0 equals 0, subnormals are zeros, minus infinity is never chosen, so fewer than k may come back. NaN is refused: OptionError names its index.
    """
