"""Fidelity manifests: what a model gave once, so that it can be compared bit by bit later and elsewhere.

A manifest is a JSON file, `{"ds4v41_manifest": 1, "fixtures": [...]}`. A fixture says what to run:

    name          of the fixture, unique in its manifest
    checkpoint    "nano", or a path relative to the manifest
    activations   "bf16", "fp8" or "fp32"
    prompt        {"text": ...} (begin-of-sentence goes in front), {"tokens": [...]}, or {"messages": [...]} with
                  optional "thinking" and "reasoning_effort"
    n_tokens      how many tokens to draw after the prompt (an end-of-sentence token does not stop it)
    sampling      options of SamplingParams; a seed is needed unless temperature is 0

and under `expected` what came out (absent until the first update):

    numerics_id, checkpoint_sha256
    prompt_sha256    of the prompt's ids as little-endian int32
    tokens           the drawn ids; tokens_sha256 of them as little-endian int32
    logits_sha256    of all logits as little-endian float32 [rows, vocab]: every prompt row, then a row a step
    rows             the first 8 hex digits of the SHA-256 of each of these rows
    trace            operation -> 12 hex digits a layer (null where a layer has no such operation)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .atomic import write_atomically
from .checks import path_of
from .errors import CheckpointError, ManifestError

KEY, VERSION = "ds4v41_manifest", 1
_MOST_BYTES = 256 << 20
PACKAGED = Path(__file__).parent / "data" / "manifests"
NANO = "nano"
_ACTIVATIONS = ("bf16", "fp8", "fp32")
_FIXTURE_KEYS = frozenset({"name", "checkpoint", "activations", "prompt", "n_tokens", "sampling", "expected"})
_PROMPTS = {"text": str, "tokens": list, "messages": list}
_PROMPT_OPTIONS = frozenset({"thinking", "reasoning_effort"})
_EXPECTED: dict[str, type] = {
    "numerics_id": str, "checkpoint_sha256": str, "prompt_sha256": str, "tokens": list, "tokens_sha256": str,
    "logits_sha256": str, "rows": list, "trace": dict,
}  # fmt: skip
_READ_BYTES = 4 << 20

HashProgress = Callable[[int, int], object]
"""Called with (bytes hashed, bytes in all)."""


@dataclass(slots=True)
class Fixture:
    """One run to compare. `expected` is None until it was recorded."""

    name: str
    checkpoint: str
    activations: str
    prompt: dict[str, Any]
    n_tokens: int
    sampling: dict[str, Any]
    expected: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data in the order of the file."""
        out: dict[str, Any] = {
            "name": self.name,
            "checkpoint": self.checkpoint,
            "activations": self.activations,
            "prompt": self.prompt,
            "n_tokens": self.n_tokens,
            "sampling": self.sampling,
        }
        return out if self.expected is None else {**out, "expected": self.expected}


@dataclass(slots=True)
class Manifest:
    """A manifest file."""

    path: Path
    fixtures: list[Fixture] = field(default_factory=list)

    def checkpoint_path(self, fixture: Fixture) -> Path:
        """Where the checkpoint of a fixture lies."""
        if fixture.checkpoint == NANO:
            return Path(__file__).parent / "data" / "nano"
        return (self.path.parent / fixture.checkpoint).resolve()

    def write(self) -> None:
        """Write it to its path, all or nothing."""
        write_atomically(self.path, _dump({KEY: VERSION, "fixtures": [f.to_json() for f in self.fixtures]}) + "\n")


def find_manifests(given: Iterable[str | Path]) -> list[Path]:
    """Manifest files: those given, those in folders given, or the packaged ones. Raises ManifestError for an empty
    or missing folder or file."""
    paths: list[Path] = []
    for item in list(given) or [PACKAGED]:
        where = path_of("manifest", item)
        if os.path.isdir(where):
            found = sorted(where.glob("*.json"))
            if not found:
                raise ManifestError(f"{where}: expected manifests (*.json) in this folder, found none")
            paths += found
        elif os.path.isfile(where):
            paths.append(where)
        else:
            raise ManifestError(f"{where}: no such manifest; give a file or a folder of manifests")
    return paths


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises ManifestError with every problem found."""
    try:
        raw = json.loads(_bytes_of(path))
    except RecursionError as error:
        raise ManifestError(f"{path}: expected JSON, found one that is nested too deeply") from error
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ManifestError(f"{path}: expected JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get(KEY) != VERSION:
        raise ManifestError(f"{path}: expected an object with {KEY}: {VERSION}; is this a manifest?")
    fixtures = raw.get("fixtures")
    if not isinstance(fixtures, list) or not fixtures:
        raise ManifestError(f"{path}: fixtures: expected a list of at least one fixture")
    problems = [f"{key}: unknown key" for key in raw if key not in (KEY, "fixtures")]
    for i, item in enumerate(fixtures):
        problems += _fixture_problems(item, f"fixtures[{i}]")
    names = [item.get("name") for item in fixtures if isinstance(item, dict)]
    problems += [f"name {name!r} is used twice" for name in {str(n) for n in names if names.count(n) > 1}]
    if problems:
        raise ManifestError(f"{path}: " + "; ".join(problems), problems)
    return Manifest(path, [Fixture(**item) for item in fixtures])


def _bytes_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ManifestError(f"{path}: expected at most {_MOST_BYTES:,} bytes; is this a manifest?")
    return data


def checkpoint_digest(path: Path, progress: HashProgress | None = None) -> str:
    """SHA-256 of a checkpoint: of the file, or for a folder of the names and SHA-256s of the files that the library
    reads weights, configuration and tokenizer from."""
    files = _checkpoint_files(path)
    total, done = sum(file.stat().st_size for file in files), 0
    whole = hashlib.sha256()
    for file in files:
        digest = hashlib.sha256()
        with open(file, "rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
        if os.path.isfile(path):
            return digest.hexdigest()
        whole.update(f"{file.name}\0{digest.hexdigest()}\n".encode())
    return whole.hexdigest()


def _checkpoint_files(path: Path) -> list[Path]:
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: no such checkpoint; is this manifest where it belongs?")
    wanted = ("config.json", "tokenizer.json")
    suffixes = (".safetensors", ".safetensors.index.json")
    named = (f for f in path.iterdir() if f.name in wanted or f.name.endswith(suffixes))
    return sorted(f for f in named if os.path.isfile(f))  # a pipe would never end


# ---- checks ---------------------------------------------------------------------------------------------------------


def _fixture_problems(item: Any, where: str) -> list[str]:
    if not isinstance(item, dict):
        return [f"{where}: expected an object, found {type(item).__name__}"]
    problems = [f"{where}: {key}: unknown key" for key in item if key not in _FIXTURE_KEYS]
    missing = sorted(_FIXTURE_KEYS - {"expected"} - item.keys())
    if missing:
        return [*problems, f"{where}: missing: {', '.join(missing)}"]
    for key in ("name", "checkpoint"):
        if not isinstance(item[key], str) or not item[key]:
            problems.append(f"{where}: {key}: expected text, found {item[key]!r}")
    if item["activations"] not in _ACTIVATIONS:
        problems.append(
            f"{where}: activations: expected one of {', '.join(_ACTIVATIONS)}, found {item['activations']!r}"
        )
    if not _is_count(item["n_tokens"]) or item["n_tokens"] < 1:
        problems.append(f"{where}: n_tokens: expected a whole number of at least 1, found {item['n_tokens']!r}")
    problems += _prompt_problems(item["prompt"], where) + _sampling_problems(item["sampling"], where)
    if item.get("expected") is not None:
        problems += _expected_problems(item["expected"], where)
    return problems


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_token(value: Any) -> bool:
    return _is_count(value) and value < 2**31


def _prompt_problems(prompt: Any, where: str) -> list[str]:
    kinds = [key for key in prompt if key in _PROMPTS] if isinstance(prompt, dict) else []
    if len(kinds) != 1:
        return [f"{where}: prompt: expected an object with exactly one of {', '.join(_PROMPTS)}"]
    kind = kinds[0]
    allowed = _PROMPT_OPTIONS if kind == "messages" else frozenset()
    problems = [f"{where}: prompt: {key}: unknown key" for key in prompt if key != kind and key not in allowed]
    if not isinstance(prompt[kind], _PROMPTS[kind]) or not prompt[kind]:
        problems.append(f"{where}: prompt: {kind}: expected a {_PROMPTS[kind].__name__} that is not empty")
    elif kind == "tokens" and not all(map(_is_token, prompt[kind])):
        problems.append(f"{where}: prompt: tokens: expected token ids")
    return problems


def _sampling_problems(sampling: Any, where: str) -> list[str]:
    if not isinstance(sampling, dict):
        return [f"{where}: sampling: expected an object, found {type(sampling).__name__}"]
    if sampling.get("temperature") != 0 and not _is_count(sampling.get("seed")):
        return [f"{where}: sampling: expected temperature 0 or a seed; without one no two runs are the same"]
    return []


def _expected_problems(expected: Any, where: str) -> list[str]:
    if not isinstance(expected, dict):
        return [f"{where}: expected: expected an object, found {type(expected).__name__}"]
    problems = [f"{where}: expected: {key}: unknown key" for key in expected if key not in _EXPECTED]
    for key, kind in _EXPECTED.items():
        if not isinstance(expected.get(key), kind):
            problems.append(f"{where}: expected: {key}: expected a {kind.__name__}, found {expected.get(key)!r}")
    if not problems and not all(map(_is_token, expected["tokens"])):
        problems.append(f"{where}: expected: tokens: expected token ids")
    if not problems and not all(isinstance(layers, list) for layers in expected["trace"].values()):
        problems.append(f"{where}: expected: trace: expected a list a layer for each operation")
    return problems


# ---- writing --------------------------------------------------------------------------------------------------------


def _dump(value: Any, indent: str = "") -> str:
    """JSON with one line for each list of plain values, so that changes are easy to read in a diff."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        rows = [f"{inner}{json.dumps(key)}: {_dump(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return "[\n" + ",\n".join(inner + _dump(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)
