"""What the model tests share: opened models, sessions as bits, stepping as the oracle, subprocesses."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ds4v41 import Model, Session, synth

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/golden/tiny"
MODES = ("bf16", "fp8", "fp32")
Tokens = NDArray[np.int32]
Rows = NDArray[np.float32]


@cache
def tiny(mode: str = "bf16", threads: int = 1, backend: str = "auto") -> Model:
    """The golden tiny model in a mode of `MODES`: fp8 is the fp8fp4 checkpoint, fp32 the bf16 one."""
    folder = TINY / ("fp8fp4" if mode == "fp8" else "bf16")
    return Model.open(folder, activations=mode, threads=threads, backend=backend)  # type: ignore[arg-type]


@cache
def nano(threads: int = 1, backend: str = "auto") -> Model:
    """The trained model that ships with the library."""
    return Model.open(threads=threads, backend=backend)


@cache
def small() -> Model:
    """Five layers with both ratios, Engram and candidates, wide enough for nothing else: fast, for long state tests."""
    return synthetic(
        num_hidden_layers=5,
        compress_ratios=(0, 2, 2, 1, 1),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 4),
        candidate_source_layer_id=3,
        engram_layer_ids=(1,),
        engram_vocab_size=100,
        vocab_size=320,
        hidden_size=64,
        dspark_target_layer_ids=(3, 4),
    )


def synthetic(seed: int = 1, storage: str = "bf16", threads: int = 1, **overrides: Any) -> Model:
    """A random model of any shape (fields of ModelConfig by name). Its files are gone when this returns."""
    config = synth.tiny_config(**overrides)
    with tempfile.TemporaryDirectory() as folder:
        synth.write_official(folder, config, seed, storage, parts=("main", "engram"))
        return Model.open(folder, threads=threads)  # maps and open files outlive their names


def tokens_of(seed: int, n: int, n_vocab: int = 512) -> Tokens:
    """n token ids that repeat themselves a little, so that n-grams and index entries meet again."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, n_vocab, n)
    for _ in range(n // 24):
        size = int(rng.integers(2, 12))
        a, b = rng.integers(0, max(1, n - size), 2)
        ids[b : b + size] = ids[a : a + size]
    return ids.astype(np.int32)


# ---- bits ---------------------------------------------------------------------------------------------------------


def live(session: Session) -> str:
    """A hash of the session's whole live state: equal hashes mean equal futures."""
    return hashlib.sha256(session._ext.live_bytes()).hexdigest()


def same_bits(a: Any, b: Any) -> bool:
    """Equal as bits: NaN equals itself, -0 differs from 0."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def prefill_in(session: Session, ids: Tokens, cuts: Iterable[int]) -> Rows:
    """All logits [n, vocab], with a prefill call for each part between the cuts."""
    edges = [0, *sorted({c for c in cuts if 0 < c < len(ids)}), len(ids)]
    parts = [session.prefill(ids[a:b], logits="all") for a, b in itertools.pairwise(edges)]
    return np.concatenate([part for part in parts if part is not None])


class Stepped:
    """The oracle: a session that takes its tokens one by one. `rows[i]` are the logits after token i, `states[i]` the
    hash of the state that holds i tokens."""

    def __init__(self, model: Model, ids: Tokens, context: int | None = None) -> None:
        self.ids = ids
        with model.session(context=context) as session:
            rows, self.states = [], [live(session)]
            for token in ids:
                rows.append(session.step([int(token)])[0])
                self.states.append(live(session))
        self.rows: Rows = np.stack(rows)


@cache
def stepped(mode: str, seed: int, n: int) -> Stepped:
    """The tiny model, stepped through tokens_of(seed, n)."""
    return Stepped(tiny(mode), tokens_of(seed, n))


@cache
def fresh(model: Model, ids: tuple[int, ...]) -> tuple[str, bytes]:
    """State hash, and bytes of the logits of one more token (id 7), of a session that never held anything else."""
    with model.session() as session:
        if ids:
            session.prefill(ids, logits=None)
        return live(session), session.step([7]).tobytes()


def assert_as_fresh(session: Session, ids: Sequence[int]) -> None:
    """The session holds `ids` with the bits of one that never went further, and goes on with them."""
    want_state, want_row = fresh(session.model, tuple(int(i) for i in ids))
    assert session.tokens == [int(i) for i in ids]
    assert session.position == len(ids)
    assert live(session) == want_state
    if session.position < session.context:
        assert session.step([7]).tobytes() == want_row
        session.truncate(len(ids))


def forget() -> None:
    """Let go of every model that is kept open."""
    for kept in (tiny, nano, small, stepped, fresh):
        kept.cache_clear()


# ---- hypothesis ----------------------------------------------------------------------------------------------------


@st.composite
def chunkings(draw: st.DrawFn, longest: int) -> tuple[int, list[int]]:
    """(n, cuts): a prompt length and where calls end, with single tokens, pairs and whole windows among the parts."""
    n = draw(st.integers(1, longest))
    sizes = st.one_of(st.integers(1, 3), st.integers(4, 40), st.sampled_from([15, 16, 17, 63, 64, 65, 128, 200]))
    cuts, at = [], 0
    while at < n and len(cuts) < 60:
        at += draw(sizes)
        cuts.append(at)
    return n, cuts


# ---- subprocesses --------------------------------------------------------------------------------------------------


def python(code: str, *args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter that sees this library."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
        check=False,
    )


def environment() -> dict[str, str]:
    """The environment of a subprocess: the library that this process uses comes first."""
    import ds4v41

    package = str(Path(ds4v41.__file__).parents[1])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
