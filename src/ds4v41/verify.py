"""Running the fixtures of a manifest again and comparing, down to the first token, row and operation that differ."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from .chat import render
from .errors import ManifestError
from .manifest import Fixture, HashProgress, Manifest, checkpoint_digest
from .sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from .model import Model

TRACE_ROWS = 64
"""Rows of one traced run: part of the format, because a tap's shape depends on it."""
_ROW_DIGITS, _TRACE_DIGITS = 8, 12
# Only the first n entries of a row of these mean something; the tap that follows says how many.
_COUNTED = {"selected": "n_selected", "candidate_blocks": "n_candidate_blocks"}


@dataclass(slots=True)
class FixtureResult:
    """How a fixture came out. `difference` names where it first differs: token, row, operation, layer."""

    name: str
    problems: list[str] = field(default_factory=list)
    difference: dict[str, Any] = field(default_factory=dict)
    changed: bool = False
    """Update only: what was recorded is not what was there before."""
    n_tokens: int = 0
    n_rows: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing differs."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "ok": self.ok,
            "problems": self.problems,
            "difference": self.difference,
            "changed": self.changed,
            "tokens": self.n_tokens,
            "rows": self.n_rows,
            "seconds": self.seconds,
        }


class Verifier:
    """Runs fixtures; keeps the models it opened and the digests it took. A context manager."""

    def __init__(
        self, *, backend: str = "auto", threads: int | None = None, progress: HashProgress | None = None
    ) -> None:
        self.backend, self.threads, self.progress = backend, threads, progress
        self._models: dict[tuple[Path, str], Model] = {}
        self._digests: dict[Path, str] = {}

    def verify(self, manifest: Manifest, fixture: Fixture, trace: bool = False) -> FixtureResult:
        """Run a fixture and compare; `trace` also compares every operation of every layer."""
        result = FixtureResult(fixture.name)
        started = time.perf_counter()
        expected = fixture.expected
        if expected is None:
            result.problems.append("nothing is recorded for this fixture yet: run verify with --update")
            return result
        path = manifest.checkpoint_path(fixture)
        digest = self._digest(path)
        if digest != expected["checkpoint_sha256"]:
            result.problems.append(
                f"checkpoint {path}: its bytes are not those of the recorded run (SHA-256 {digest}, recorded "
                f"{expected['checkpoint_sha256']}); nothing else was compared"
            )
            return result
        model = self._model(path, fixture.activations)
        if model.numerics_id != expected["numerics_id"]:
            result.problems.append(f"numerics id: recorded {expected['numerics_id']}, this is {model.numerics_id}")
        run = Run(model, fixture)
        result.n_tokens, result.n_rows = len(run.tokens), len(run.rows)
        _compare_run(run, expected, result)
        if trace:
            taken = trace_digests(model, [*run.prompt, *expected["tokens"][:-1]])
            _compare_trace(taken, expected["trace"], result)
        elif not result.ok:
            result.problems.append("--trace names the operation and layer that differ first")
        result.seconds = time.perf_counter() - started
        return result

    def update(self, manifest: Manifest, fixture: Fixture) -> FixtureResult:
        """Run a fixture and record what comes out in it (the manifest is not written)."""
        started = time.perf_counter()
        path = manifest.checkpoint_path(fixture)
        digest = self._digest(path)
        model = self._model(path, fixture.activations)
        run = Run(model, fixture)
        trace = trace_digests(model, [*run.prompt, *run.tokens[:-1]])
        before = fixture.expected
        fixture.expected = {
            "numerics_id": model.numerics_id,
            "checkpoint_sha256": digest,
            "prompt_sha256": _ids_digest(run.prompt),
            "tokens": run.tokens,
            "tokens_sha256": _ids_digest(run.tokens),
            "logits_sha256": run.logits_sha256,
            "rows": run.rows,
            "trace": _by_operation(trace, model.config.num_hidden_layers),
        }
        result = FixtureResult(fixture.name, changed=before != fixture.expected)
        result.n_tokens, result.n_rows = len(run.tokens), len(run.rows)
        result.seconds = time.perf_counter() - started
        return result

    def _digest(self, path: Path) -> str:
        if path not in self._digests:
            self._digests[path] = checkpoint_digest(path, self.progress)
        return self._digests[path]

    def _model(self, path: Path, activations: str) -> Model:
        from .model import Model

        key = (path, activations)
        if key not in self._models:
            mode = cast(Any, activations)
            self._models[key] = Model.open(path, backend=self.backend, activations=mode, threads=self.threads)
        return self._models[key]

    def close(self) -> None:
        """Close the models."""
        for model in self._models.values():
            model.close()
        self._models.clear()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Run:
    """A fixture's run: ids of prompt and answer, SHA-256 of the logits and of each of their rows."""

    def __init__(self, model: Model, fixture: Fixture) -> None:
        self.model = model
        self.prompt = prompt_ids(model, fixture)
        self.tokens: list[int] = []
        self.rows: list[str] = []
        self._logits = hashlib.sha256()
        size = len(self.prompt) + fixture.n_tokens
        if size > model.config.max_position_embeddings:
            raise ManifestError(
                f"fixture {fixture.name}: {len(self.prompt)} prompt tokens and {fixture.n_tokens} drawn ones exceed "
                f"the model's context of {model.config.max_position_embeddings}"
            )
        sampler = Sampler(SamplingParams.from_options(fixture.sampling), model.config.vocab_size)
        history = sampler.new_history(self.prompt) if sampler.params.needs_history else None
        with model.session(size) as session:
            rows = session.prefill(self.prompt, logits="all")
            assert rows is not None
            self._add(rows)
            while True:
                draw = sampler.draw(rows[-1], session.position, history=history)
                self.tokens.append(draw.token)
                if len(self.tokens) == fixture.n_tokens:
                    break
                if history is not None:
                    history.add(np.array([draw.token], np.int32))
                rows = session.step([draw.token])
                self._add(rows)

    @property
    def logits_sha256(self) -> str:
        """Of all rows."""
        return self._logits.hexdigest()

    def _add(self, rows: NDArray[np.float32]) -> None:
        for row in rows:
            data = row.astype("<f4").tobytes()
            self._logits.update(data)
            self.rows.append(hashlib.sha256(data).hexdigest()[:_ROW_DIGITS])


def prompt_ids(model: Model, fixture: Fixture) -> list[int]:
    """The prompt of a fixture as token ids."""
    prompt = fixture.prompt
    if "tokens" in prompt:
        return list(prompt["tokens"])
    if "text" in prompt:
        return list(model.tokenizer.encode(prompt["text"], add_bos=True))
    options = {name: value for name, value in prompt.items() if name != "messages"}
    return list(render(prompt["messages"], **options).encode(model.tokenizer))


def trace_digests(model: Model, tokens: list[int]) -> dict[str, str]:
    """Digest of every tap (`L3.attn_q`, `final_norm_out`) over all `tokens`, in the order of computation."""
    ids = np.asarray(tokens, np.int32)
    digests: dict[str, Any] = {}
    with model.session(len(ids), chunk=TRACE_ROWS) as session:
        for begin in range(0, len(ids), TRACE_ROWS):
            taps: dict[str, Any] = session._ext.trace_run(ids[begin : begin + TRACE_ROWS], "all")
            for name, value in taps.items():
                digests.setdefault(name, hashlib.sha256()).update(_meaning(name, value, taps))
    return {name: digest.hexdigest()[:_TRACE_DIGITS] for name, digest in digests.items()}


def _meaning(name: str, value: Any, taps: dict[str, Any]) -> bytes:
    """The bytes of a tap, without what is left over behind the counted entries of a list."""
    layer, _, operation = name.rpartition(".")
    array = np.ascontiguousarray(value)
    counted = _COUNTED.get(operation)
    counts = taps.get(f"{layer}.{counted}") if counted is not None else None
    if counts is None:
        return array.astype(array.dtype.newbyteorder("<")).tobytes()
    return b"".join(row[:n].astype("<i4").tobytes() for row, n in zip(array, counts, strict=True))


def _split(name: str) -> tuple[int, str]:
    """Layer (-1: outside of the layers) and operation of a tap."""
    layer, _, operation = name.rpartition(".")
    return (int(layer[1:]) if layer else -1), operation


def _by_operation(trace: dict[str, str], n_layers: int) -> dict[str, list[str | None]]:
    """The form of the file: operation -> a digest a layer, or one for what is outside of the layers."""
    table: dict[str, list[str | None]] = {}
    for name, digest in trace.items():
        layer, operation = _split(name)
        row = table.setdefault(operation, [None] * (1 if layer < 0 else n_layers))
        row[max(layer, 0)] = digest
    return table


def _ids_digest(ids: Iterable[int]) -> str:
    return hashlib.sha256(np.asarray(list(ids), "<i4").tobytes()).hexdigest()


# ---- comparing ------------------------------------------------------------------------------------------------------


def _compare_run(run: Run, expected: dict[str, Any], result: FixtureResult) -> None:
    if _ids_digest(run.prompt) != expected["prompt_sha256"]:
        result.problems.append("prompt: its token ids differ: the tokenizer or the chat format changed")
    if _ids_digest(run.tokens) != expected["tokens_sha256"] or run.tokens != expected["tokens"]:
        result.problems.append(_token_problem(run, expected["tokens"], result))
    if run.logits_sha256 != expected["logits_sha256"]:
        at = _first(run.rows, expected["rows"])
        where = "" if at is None else f", first in row {at} ({_row_name(at, len(run.prompt))})"
        result.problems.append(f"logits: they differ{where}")
        result.difference["row"] = at


def _token_problem(run: Run, expected: list[int], result: FixtureResult) -> str:
    at = _first(run.tokens, expected)
    if at is None:
        return "tokens: their recorded SHA-256 does not belong to the recorded ids"
    want = expected[at] if at < len(expected) else None
    have = run.tokens[at] if at < len(run.tokens) else None
    position = len(run.prompt) + at
    result.difference |= {"token": at, "position": position, "expected": want, "found": have}
    return f"tokens: the first that differs is number {at} (position {position}): recorded {want}, found {have}"


def _row_name(at: int, n_prompt: int) -> str:
    return f"prompt position {at}" if at < n_prompt else f"after drawn token {at - n_prompt}"


def _first(found: list[Any], expected: list[Any]) -> int | None:
    """Index of the first difference, the end of the shorter list included; None for equal lists."""
    for i, (a, b) in enumerate(zip(found, expected, strict=False)):
        if a != b:
            return i
    return None if len(found) == len(expected) else min(len(found), len(expected))


def _compare_trace(taken: dict[str, str], recorded: dict[str, list[Any]], result: FixtureResult) -> None:
    """Taps come in the order of computation, so the first that differs is where the cause is."""
    for name, digest in taken.items():
        layer, operation = _split(name)
        row = recorded.get(operation, [])
        index = max(layer, 0)
        if index >= len(row) or row[index] != digest:
            place = "after the layers" if layer < 0 else f"layer {layer}"
            result.problems.append(f"trace: the first operation that differs is {operation}, {place}")
            result.difference |= {"operation": operation, "layer": layer}
            return
    seen = {_split(tap)[1] for tap in taken}
    for operation in recorded.keys() - seen:
        result.problems.append(f"trace: the operation {operation} was recorded but does not run any more")


Report = Callable[[Manifest, FixtureResult], object]


def run_manifests(
    manifests: Iterable[Manifest], verifier: Verifier, *, update: bool, trace: bool, report: Report
) -> list[tuple[Manifest, list[FixtureResult]]]:
    """Run every fixture of every manifest; with `update` each manifest is written when all its fixtures ran."""
    every: list[tuple[Manifest, list[FixtureResult]]] = []
    for manifest in manifests:
        results: list[FixtureResult] = []
        for fixture in manifest.fixtures:
            result = verifier.update(manifest, fixture) if update else verifier.verify(manifest, fixture, trace)
            results.append(result)
            report(manifest, result)
        if update and any(result.changed for result in results):
            manifest.write()
        every.append((manifest, results))
    return every
