"""What only a real device can show, in one run and one report: `ds4v41 verify --mac-day REPORT.json [--backend cuda]`.

Bits first: recorded fixtures with the trace of every operation, logits of the nano model against the CPU, drafted text.
Then, with a model, time: steps and the ledger at several depths, six rows, prompts, the device beside the CPU in turns.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import _ext
from .atomic import may_be_replaced, write_atomically
from .bench.common import environment, interval, median
from .bench.model import fill
from .checks import path_of, positive_int
from .drafter import Drafter
from .errors import OptionError
from .ledger import Ledger
from .manifest import find_manifests, read_manifest
from .model import Model
from .verify import Verifier

CONTEXTS = (8192, 62_000, 131_072, 300_000, 1_000_000)
_MODES = ("bf16", "fp8", "fp32")
_PROMPT = "def fibonacci(n):"
_PREFILLED, _STEPPED, _DRAWN = 200, 20, 60
"""Rows of a prompt in one piece, steps behind it, tokens of a drafted text."""

Say = Callable[[str], None]


def run(
    report: str | os.PathLike[str],
    *,
    backend: str = "metal",
    model: str | os.PathLike[str] | None = None,
    contexts: Sequence[int] = CONTEXTS,
    steps: int = 20,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Check and measure `backend`; write everything to the file `report` and return it. `ok` says whether every bit was
    the CPU's. Raises BackendError when there is no such back end here."""
    where = path_of("report", report)  # what is wrong is said before minutes pass
    if not os.path.isdir(where.parent):
        raise OptionError(f"report: {where.parent} is no folder; name a file in one that exists")
    measured = None if model is None else path_of("model", model)
    if not where.name or not may_be_replaced(where) or not os.access(where.parent, os.W_OK):
        raise OptionError(f"report: {where}: this file cannot be written; name one in a folder that can be")
    if measured is not None and not os.path.exists(measured):
        raise OptionError(f"model: {model}: no such file or folder")
    contexts = [positive_int("contexts", n, 2) for n in contexts]
    with Model.open(backend=backend) as nano:
        result: dict[str, Any] = environment(nano.threads, backend) | {"system": platform.platform(), "ok": False}
    result["bits"] = _bits(backend, say)
    result["ok"] = not any(result["bits"].values())
    if measured is not None:
        result["model"] = str(model)
        result |= _times(measured, backend, contexts, steps, say)
        result["ok"] = result["ok"] and result["same_logits_on_model"]
    write_atomically(where, json.dumps(result, indent=1) + "\n")
    return result


# ---- bits ----------------------------------------------------------------------------------------------------------


def _bits(backend: str, say: Say) -> dict[str, list[str]]:
    """Problems by check; empty lists are good."""
    found: dict[str, list[str]] = {"fixtures": [], "logits": [], "drafts": []}
    with Verifier(backend=backend) as verifier:
        for path in find_manifests([]):
            manifest = read_manifest(path)
            for fixture in manifest.fixtures:
                outcome = verifier.verify(manifest, fixture, trace=True)
                say(
                    f"{'ok' if outcome.ok else 'DIFFERS':<8} fixture {fixture.name}, every operation "
                    f"({outcome.seconds:.1f} s)"
                )
                found["fixtures"] += [f"{fixture.name}: {problem}" for problem in outcome.problems]
    for mode in _MODES:
        with Model.open(activations=mode) as cpu, Model.open(backend=backend, activations=mode) as device:  # type: ignore[arg-type]
            problem = _different_rows(cpu, device)
        say(f"{'DIFFERS' if problem else 'ok':<8} logits of the nano model, {mode}")
        found["logits"] += [f"{mode}: {problem}"] if problem else []
    texts = []
    for name in ("cpu", backend):
        with Model.open(backend=name) as one, one.session(512, drafter=Drafter.open(None, one)) as session:
            texts.append(session.generate(_PROMPT, max_tokens=_DRAWN, temperature=0.7, seed=1).finish().tokens)
    if texts[0] != texts[1]:
        at = next(i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b)
        found["drafts"].append(f"drafted text differs from token {at} on")
    say(f"{'DIFFERS' if found['drafts'] else 'ok':<8} drafted text")
    return found


def _different_rows(cpu: Model, device: Model) -> str:
    """A prompt in one piece and steps behind it: where the first logits differ, or nothing."""
    n = _PREFILLED + _STEPPED
    ids = np.random.default_rng(5).integers(10, cpu.config.vocab_size, n).astype(np.int32)
    rows = []
    for model in (cpu, device):
        with model.session(256) as session:
            first = session.prefill(ids[:_PREFILLED], logits="all")
            rows.append(np.concatenate([first, *(session.step(ids[i : i + 1]) for i in range(_PREFILLED, n))]))
    wrong = np.flatnonzero((rows[0].view(np.uint32) != rows[1].view(np.uint32)).any(axis=1))
    return f"{len(wrong)} of {n} rows, the first at position {wrong[0]}" if len(wrong) else ""


# ---- time ----------------------------------------------------------------------------------------------------------


def _times(path: Path, backend: str, contexts: Sequence[int], steps: int, say: Say) -> dict[str, Any]:
    out: dict[str, Any] = {"depth": [], "prefill": []}
    with Model.open(path, backend=backend) as device:
        for context in contexts:
            size = min(context, device.config.max_position_embeddings - 8 * steps - 64) & ~1
            row = _at_depth(device, size, steps)
            out["depth"].append(row)
            say(f"{size:>9,} tokens: {row['tok_s']:.2f} tokens/s, six rows {row['six_rows']:.2f} steps")
        for n in (512, 2048):
            out["prefill"].append(_prompt(device, n))
            say(f"prompt of {n:,}: {out['prefill'][-1]['tok_s']:.1f} tokens/s")
        with Model.open(path) as cpu:
            out |= _beside_the_cpu(cpu, device, say)
    return out


def _counts() -> dict[str, int]:
    every = _ext.metal_counters()
    return {name: int(every[name]) for name in ("dispatches", "levels", "command_buffers", "waits")}


def _at_depth(model: Model, context: int, steps: int) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    tokens = rng.integers(10, model.config.vocab_size, steps + 6)
    with model.session(context + 8 * steps + 64, retain=256) as session:
        fill(session, context)
        session.step([int(tokens[0])])
        before, one = _counts(), []
        for token in tokens[:steps]:
            begin = time.perf_counter()
            session.step([int(token)])
            one.append(time.perf_counter() - begin)
        after = _counts()
        session.step(tokens[:6])
        six = []
        for _ in range(max(3, steps // 4)):
            begin = time.perf_counter()
            session.step(tokens[:6])
            six.append(time.perf_counter() - begin)
        session.start_ledger()  # it waits after every operation, so its sum is more than a step
        for token in tokens[:3]:
            session.step([int(token)])
        ledger = session.ledger()
    return {
        "context": context,
        "tok_s": 1.0 / median(one),
        "six_rows": median(six) / median(one),
        "bytes_per_step": ledger.bytes / ledger.runs,
        "gb_s": ledger.bytes / ledger.runs / median(one) / 1e9,
        "per_step": {name: (after[name] - before[name]) / steps for name in after},
        "ledger_ms": _by_op(ledger),
    }


def _by_op(ledger: Ledger) -> dict[str, float]:
    return {row.op: 1e3 * row.time / ledger.runs for row in ledger.by_op()}


def _prompt(model: Model, n: int) -> dict[str, Any]:
    ids = np.random.default_rng(3).integers(10, model.config.vocab_size, n).astype(np.int32)
    with model.session(2 * n, chunk=n) as session:
        session.prefill(ids[:32], logits=None)  # kernels for many rows
        begin = time.perf_counter()
        session.prefill(ids, logits=None)
        seconds = time.perf_counter() - begin
    return {"tokens": n, "tok_s": n / seconds}


def _beside_the_cpu(cpu: Model, device: Model, say: Say, pairs: int = 7) -> dict[str, Any]:
    """The same steps in turns: equal logits, and the ratio of times with its interval."""
    ids = np.random.default_rng(9).integers(10, cpu.config.vocab_size, pairs + 1).astype(np.int32)
    ratios, same = [], True
    with cpu.session(64) as a, device.session(64) as b:
        a.step(ids[:1]), b.step(ids[:1])
        for i in range(1, pairs + 1):
            seconds, rows = [], []
            for session in (a, b):
                begin = time.perf_counter()
                rows.append(session.step(ids[i : i + 1]))
                seconds.append(time.perf_counter() - begin)
            same = same and rows[0].tobytes() == rows[1].tobytes()
            ratios.append(seconds[0] / seconds[1])
    say(f"{'ok' if same else 'DIFFERS':<8} steps beside the CPU: {median(ratios):.2f} times as fast")
    return {"same_logits_on_model": same, "cpu_over_device": median(ratios), "interval": interval(ratios)}
