"""Runs the Python examples of README.md and docs/, each page from top to bottom in one namespace, on the nano model.

A block that needs what is not here (the real model, another library) is marked ```` ```python no-run ````.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ds4v41
from ds4v41 import _ext
from ds4v41.checkpoint import ModelConfig
from ds4v41.checkpoint.convert_plan import plan_tensors
from ds4v41.checkpoint.safetensors import read_config
from ds4v41.weights import shape_of

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(path: Path) -> list[tuple[int, str]]:
    """(line, code) of the blocks that run."""
    text = path.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start(1)), m[1]) for m in FENCE.finditer(text)]


PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if examples(p)]


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """One worker thread where the system allows it: threads of many short steps wait long on a busy machine."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_examples_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # what an example writes
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner, contextlib.redirect_stdout(io.StringIO()):
        for line, code in examples(path):
            tree = compile("\n" * line + code, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            value = eval(tree, namespace)
            if inspect.iscoroutine(value):
                runner.run(value)


def test_pages_with_examples_are_found() -> None:
    names = {path.name for path in PAGES}
    assert {"README.md", "formats.md", "from-llama-cpp-and-mlx.md"} <= names


def test_bytes_a_token_of_the_released_shape() -> None:
    """docs/formats.md: 528, 288 and 68 bytes a row, 890 bytes a token, 20.6 KiB of window rows a position."""
    config: ModelConfig = read_config(ROOT / "tests" / "golden" / "released")
    shape = shape_of(config)
    head, index = config.head_dim, config.index_head_dim
    assert _ext.ops.pack("plain", "window", np.zeros((1, head), np.float32)).shape[1] == 528
    assert _ext.ops.pack("plain", "compressed", np.zeros((1, head), np.float32)).shape[1] == 288
    assert _ext.ops.pack("plain", "index", np.zeros((1, index), np.float32)).shape[1] == 68
    long, longer = (_ext.memory_plan(shape, "bf16", 2**k, 8192, 8192) for k in (18, 19))
    assert (longer["compressed"] - long["compressed"]) / 2**18 == pytest.approx(890, abs=0.2)  # whole pages
    assert longer["window"] == long["window"]
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    assert all(f"{n}" in text for n in (528, 288, 68, 890))


def test_nano_answers_of_the_page_are_what_it_answers() -> None:
    """docs/nano.md quotes questions and answers: `> question`, then the block."""
    text = (ROOT / "docs" / "nano.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^> ([^\n]+)\n\n```text\n(.*?)```$", text, re.MULTILINE | re.DOTALL)
    assert len(quoted) >= 4
    with ds4v41.Model.open(threads=1) as model, model.session(context=512) as session:
        for question, answer in quoted:
            messages = [{"role": "user", "content": question}]
            reply = session.chat(messages, thinking=False, temperature=0, max_tokens=100)
            code = str(reply.content).removeprefix("```python\n").removesuffix("\n```")
            assert code == answer.removesuffix("\n"), question


def test_tensor_names_of_the_page_are_those_of_the_table() -> None:
    """docs/formats.md lists every tensor of the released shape, with the type that the q4 recipe writes."""
    config = read_config(ROOT / "tests" / "golden" / "released")
    expected = set()
    for kind in ("model", "drafter"):
        tensors, _ = plan_tensors(config, kind, "q4", None, None)
        expected |= {(_general(t.spec.name), _general(t.name), t.type) for t in tensors}
    # A stage repeats the tensors of a layer, which the page says in words.
    layer = {row for row in expected if row[0].startswith("layers.")}
    repeated = {tuple(part.replace("layers.", "mtp.").replace("blk.", "mtp.") for part in row) for row in layer}
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \| [^|]+ \| (\w+) \|$", text, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == expected - repeated


def _general(name: str) -> str:
    return re.sub(r"\b\d+\b", "N", name)
