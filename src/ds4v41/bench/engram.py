"""`ds4v41 bench engram PATH`: is this disk fast enough for the Engram tables, and what does it cost?

Reads random rows at several queue depths, replays decode steps and prefill chunks without computing them, and counts
how often the rows of a text would have been found in caches of several sizes. No weights are loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _ext
from ..checkpoint import Checkpoint, ModelConfig, open_checkpoint
from ..checks import path_of, positive_int
from ..engram import hash_of, percentile, tables_of, tensors_at
from ..errors import OptionError, shown
from ..machine import human
from ..tokenizer import Tokenizer

DEPTHS = (1, 2, 4, 8, 16, 32, 64)
CACHES = (16 << 20, 64 << 20, 256 << 20, 1 << 30, 4 << 30)
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Depth:
    """Random rows with so many reads at the same time. Latencies in seconds."""

    depth: int
    rows_per_second: float
    median: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class EngramBench:
    """Everything that was measured. Seconds unless the name says otherwise."""

    path: str
    tables: int
    """Bytes."""
    direct: bool
    depths: list[Depth]
    step_seconds: float
    """The assumed time of a decode step, over which reads can hide."""
    step_wait: float
    """Mean time a step waited for rows, without a cache."""
    step_wait_p99: float
    chunk: int
    chunk_seconds: float
    """To read all rows of a prefill chunk: hidden if computing a chunk takes longer."""
    text_tokens: int
    hit_rates: dict[int, float]
    """Share of rows found, by bytes of cache; empty without a text."""

    @property
    def prefill_limit(self) -> float:
        """Tokens per second above which prefill would wait for this disk."""
        return self.chunk / self.chunk_seconds

    @property
    def decode_cost(self) -> float:
        """Share by which decode is slower than with tables in memory."""
        return self.step_wait / self.step_seconds

    def verdict(self) -> str:
        """One sentence."""
        step, wait = self.step_seconds * 1e3, self.step_wait * 1e3
        slow = f"a step of {step:.0f} ms waits {wait:.2f} ms ({self.decode_cost:.1%})"
        limit = f"prefill is not held up below {self.prefill_limit:,.0f} tokens/s"
        word = "fast enough" if self.decode_cost < 0.02 else "usable" if self.decode_cost < 0.1 else "too slow"
        return f"This disk is {word}: {slow}; {limit}."

    def __str__(self) -> str:
        lines = [f"{self.path}: Engram tables of {human(self.tables)}{', direct reads' if self.direct else ''}", ""]
        lines.append("reads at once      rows/s    median       p90       p99")
        for d in self.depths:
            times = "".join(f"{t * 1e6:7.0f} us" for t in (d.median, d.p90, d.p99))
            lines.append(f"{d.depth:13d} {d.rows_per_second:11,.0f}{times}")
        lines += ["", f"decode step: waits {self.step_wait * 1e3:.2f} ms (p99 {self.step_wait_p99 * 1e3:.2f} ms)"]
        lines.append(f"prefill chunk of {self.chunk:,} tokens: all rows in {self.chunk_seconds:.2f} s")
        for size, rate in self.hit_rates.items():
            lines.append(f"cache of {human(size):>10}: {rate:6.1%} of the rows of {self.text_tokens:,} tokens of text")
        return "\n".join([*lines, "", self.verdict()])


def run(
    path: str | os.PathLike[str],
    *,
    engram_path: str | os.PathLike[str] | None = None,
    text: str | os.PathLike[str] | None = None,
    direct: bool = False,
    seconds: float = 1.0,
    step_seconds: float = 0.04,
    chunk: int = 8192,
) -> EngramBench:
    """Measure. `seconds` are spent on each queue depth; `step_seconds` is the decode time to hide reads behind.

    What the system's page cache already has is read from there: `direct=True` shows the disk itself. `text` is a UTF-8
    file whose tokens are replayed; without it tokens are random, which repeat no n-gram: the worst case.
    Raises EngramError, CheckpointError, OptionError for a model without Engram.
    """
    seconds, step_seconds = _span("seconds", seconds), _span("step_seconds", step_seconds)
    chunk = positive_int("chunk", chunk, 1, 1 << 20)
    checkpoint = open_checkpoint(path, parts=("main", "engram") if engram_path is None else ("main",))
    config = checkpoint.config
    if not config.engram_layer_ids:
        raise OptionError(f"{checkpoint.path}: this model has no Engram tables")
    tensors = checkpoint.tensors if engram_path is None else tensors_at(path_of("engram_path", engram_path), config)
    tables = tables_of(tensors, config)
    rows_of = hash_of(checkpoint)
    tokens = _random(config, 2 * chunk) if text is None else _tokens(checkpoint, path_of("text", text))
    waits = _steps(_ext.Engram(tables, direct=direct), config, rows_of, tokens[:200], step_seconds)
    return EngramBench(
        path=str(checkpoint.path),
        tables=_ext.Engram(tables).bytes,
        direct=direct,
        depths=[_depth(_ext.Engram(tables, direct=direct, threads=depth), depth, seconds) for depth in DEPTHS],
        step_seconds=step_seconds,
        step_wait=float(waits.mean()),
        step_wait_p99=float(np.quantile(waits, 0.99)),
        chunk=min(chunk, len(tokens)),
        chunk_seconds=_chunk(_ext.Engram(tables, direct=direct), rows_of, tokens[:chunk]),
        text_tokens=0 if text is None else len(tokens),
        hit_rates={} if text is None else hit_rates(rows_of, len(tables), tokens, config, CACHES),
    )


def _span(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-6 <= value <= 3600:
        raise OptionError(f"{name}: expected 0.000001 to 3600 seconds, found {shown(value)}")
    return float(value)


def _depth(engram: _ext.Engram, depth: int, seconds: float) -> Depth:
    """Keeps `depth` reads under way: one request follows another, each many rows long, two at a time."""
    rng = np.random.default_rng(depth)
    n_rows = engram.n_rows

    def ask() -> _ext.EngramRequest:
        table = int(rng.integers(len(n_rows)))
        return engram.request(table, rng.integers(0, n_rows[table], 8 * depth), "chunk")

    begin, done = time.perf_counter(), 0
    waiting = [ask(), ask()]
    while time.perf_counter() - begin < seconds:
        waiting.append(ask())
        waiting.pop(0).wait()
        done += 8 * depth
    passed = time.perf_counter() - begin
    latency = engram.counters()["latency"]
    return Depth(depth, done / passed, *(percentile(latency, share) for share in (0.5, 0.9, 0.99)))


def _steps(
    engram: _ext.Engram, config: ModelConfig, rows_of: _ext.EngramHash, tokens: I32, step_seconds: float
) -> NDArray[np.float64]:
    """Seconds that each decode step waited; between the Engram layers time passes as if layers computed."""
    back = config.engram_max_ngram_size - 1
    layer_seconds = step_seconds / config.num_hidden_layers
    waits = []
    for i in range(1, len(tokens)):
        line, history = tokens[max(0, i - back) : i + 1], min(back, i)
        requests = [engram.request(t, rows_of.rows(t, line, history).ravel()) for t in range(len(engram.n_rows))]
        begin, waited = time.perf_counter(), 0.0
        for layer, request in zip(config.engram_layer_ids, requests, strict=True):
            time.sleep(max(0.0, begin + layer * layer_seconds + waited - time.perf_counter()))
            waited += request.wait()[1]
        waits.append(waited)
    return np.array(waits)


def _chunk(engram: _ext.Engram, rows_of: _ext.EngramHash, tokens: I32) -> float:
    begin = time.perf_counter()
    requests = [engram.request(t, rows_of.rows(t, tokens).ravel(), "chunk") for t in range(len(engram.n_rows))]
    for request in requests:
        request.wait()
    return time.perf_counter() - begin


def hit_rates(
    rows_of: _ext.EngramHash, n_tables: int, tokens: I32, config: ModelConfig, sizes: Sequence[int]
) -> dict[int, float]:
    """Share of the rows of a text, read token by token from an empty cache, that caches of these bytes would have."""
    keys = [rows_of.rows(table, tokens) + (table + 1 << 40) for table in range(n_tables)]
    line = np.ascontiguousarray(np.concatenate(keys, axis=1).ravel())
    row_bytes = config.engram_head_dim + config.engram_head_dim // 32 + 12  # and the cache's own
    return {size: float(_ext.engram_cache_replay(size // row_bytes, line).mean()) for size in sizes}


def _random(config: ModelConfig, n: int) -> I32:
    return np.random.default_rng(0).integers(0, config.vocab_size, n).astype(np.int32)


def _tokens(checkpoint: Checkpoint, text: Path) -> I32:
    config = checkpoint.config
    ids: dict[str, Any] = {"bos_id": config.bos_token_id, "eos_id": config.eos_token_id, "pad_id": config.pad_token_id}
    if checkpoint.tokenizer_metadata is not None:
        m = checkpoint.tokenizer_metadata
        names = ("tokens", "token_types", "merges", "bos_token_id", "eos_token_id")
        tokenizer = Tokenizer.from_gguf_metadata(*(m[name] for name in names), pad_id=ids["pad_id"], pre=m["pre"])
    elif checkpoint.tokenizer is not None:
        tokenizer = Tokenizer.from_file(checkpoint.tokenizer, **ids)
    else:
        raise OptionError(f"{checkpoint.path}: there is no tokenizer, so a text cannot be replayed")
    try:
        found = np.asarray(tokenizer.encode(text.read_text(encoding="utf-8"), add_bos=True), np.int32)
    except OSError as error:
        raise OptionError(f"{text}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{text}: expected UTF-8 text, found a byte that is none at offset {error.start}") from error
    if len(found) < 2:
        raise OptionError(f"{text}: expected at least two tokens of text")
    return found
