"""docs/tour.ipynb runs from top to bottom, and its stored outputs are what it gives."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


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


@pytest.fixture(scope="module")
def tour() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tour", DOCS / "run_tour.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebook_is_well_formed(tour: ModuleType) -> None:
    notebook = tour.load()
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    identities = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identities)) == len(identities)
    numbers = [cell["execution_count"] for cell in tour.code_cells(notebook)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 15


def test_every_cell_runs_and_gives_the_stored_output(tour: ModuleType) -> None:
    """The model's text too: the same bits on every machine. `python docs/run_tour.py` renews the outputs."""
    assert not tour.differences(tour.load())


def test_a_wrong_output_is_noticed(tour: ModuleType) -> None:
    cell = {"cell_type": "code", "source": ["1 + 1"], "outputs": []}
    (outputs,) = tour.run_cells([cell])
    assert tour.comparable(outputs) == [("text/plain", "2")]
    assert tour.differences({"cells": [cell | {"outputs": outputs}]}) == []
    outputs[0]["data"]["text/plain"] = ["3"]
    assert len(tour.differences({"cells": [cell | {"outputs": outputs}]})) == 1


def test_what_the_runner_can_do(tour: ModuleType) -> None:
    sources = ["x = 2", "import asyncio\nawait asyncio.sleep(0, x + 1)", "print(x)", "x;", "raise KeyError('gone')"]
    cells = [{"cell_type": "code", "source": [s]} for s in sources]
    runs = tour.run_cells(cells)
    found = [tour.comparable(next(runs)) for _ in sources[:-1]]
    assert found == [[], [("text/plain", "3")], [("stdout", "2\n")], []]
    with pytest.raises(KeyError, match="gone") as error:
        next(runs)
    assert error.value.__notes__ == ["in code cell 5 of tour.ipynb"]


def test_the_script_says_how_it_is_used() -> None:
    done = subprocess.run([sys.executable, DOCS / "run_tour.py", "--help"], capture_output=True, text=True, check=True)
    assert "--check" in done.stdout
