"""Runs the code cells of docs/tour.ipynb in order and writes their outputs into it. Needs no Jupyter.

    python docs/run_tour.py            # run, and renew the outputs in the file
    python docs/run_tour.py --check    # run, and fail when an output differs (times and machine names aside)

All cells share one namespace and one event loop; `await` at the top of a cell works as in Jupyter.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import inspect
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOUR = Path(__file__).with_name("tour.ipynb")
Cell = dict[str, Any]
Output = dict[str, Any]

# What may differ from run to run and from machine to machine. Everything else has to be equal, the model's text too.
_VARYING = (
    (re.compile(r"cpu/\w+"), "cpu/*"),
    (re.compile(r"\b\d+ threads?\b"), "* threads"),
    (re.compile(r"\d[\d,]*(\.\d+)? ?(s\b|ms\b|/s\b)"), "*"),
    (re.compile(r"_seconds=[\d.e-]+"), "_seconds=*"),
    (re.compile(r"available [\d.,]+ \w+"), "available *"),
    (re.compile(r"working memory [\d.,]+ \w+"), "working memory *"),  # a part for each thread
)


def load(path: Path = TOUR) -> dict[str, Any]:
    """The notebook as plain data (nbformat 4)."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def code_cells(notebook: dict[str, Any]) -> list[Cell]:
    """The cells with code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cells(cells: list[Cell]) -> Iterator[list[Output]]:
    """The outputs of each cell, in the form that a notebook stores. An exception leaves with the cell's number."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for number, cell in enumerate(cells, start=1):
            try:
                yield _run_cell("".join(cell["source"]), number, namespace, runner)
            except Exception as error:
                error.add_note(f"in code cell {number} of {TOUR.name}")
                raise


def _run_cell(source: str, number: int, namespace: dict[str, Any], runner: asyncio.Runner) -> list[Output]:
    tree = ast.parse(source, f"<cell {number}>")
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        _evaluate(tree, number, namespace, runner)
        if isinstance(shown, ast.Expr) and not source.rstrip().endswith(";"):
            value = _evaluate(ast.Expression(shown.value), number, namespace, runner)
    outputs: list[Output] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        outputs.append({
            "output_type": "execute_result",
            "execution_count": number,
            "metadata": {},
            "data": {kind: _lines(text) for kind, text in _display(value).items()},
        })
    return outputs


def _evaluate(tree: ast.Module | ast.Expression, number: int, namespace: dict[str, Any], runner: asyncio.Runner) -> Any:
    mode = "eval" if isinstance(tree, ast.Expression) else "exec"
    code = compile(tree, f"<cell {number}>", mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    value = eval(code, namespace)
    return runner.run(value) if inspect.iscoroutine(value) else value


def _display(value: Any) -> dict[str, str]:
    shown = {"text/plain": repr(value)}
    if hasattr(value, "_repr_html_"):
        shown["text/html"] = value._repr_html_()
    return shown


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def comparable(outputs: list[Output]) -> list[tuple[str, str]]:
    """Kind and text of each output without what varies."""
    found: list[tuple[str, str]] = []
    for output in outputs:
        texts = output["data"] if output["output_type"] == "execute_result" else {"stdout": output["text"]}
        found += [(kind, _steady("".join(text))) for kind, text in texts.items()]
    return found


def _steady(text: str) -> str:
    for pattern, stands_for in _VARYING:
        text = pattern.sub(stands_for, text)
    return text


def differences(notebook: dict[str, Any]) -> list[str]:
    """Runs the notebook; one line for each cell whose stored outputs are not what it gives."""
    cells = code_cells(notebook)
    problems = []
    for number, (cell, outputs) in enumerate(zip(cells, run_cells(cells), strict=True), start=1):
        stored, found = comparable(cell["outputs"]), comparable(outputs)
        if stored != found:
            problems.append(f"code cell {number}: stored {stored}, found {found}")
    return problems


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Run docs/tour.ipynb and renew its outputs.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail when an output differs")
    notebook = load()
    if parser.parse_args().check:
        problems = differences(notebook)
        print("\n".join(problems), file=sys.stderr)
        return 1 if problems else 0
    cells = code_cells(notebook)
    for number, (cell, outputs) in enumerate(zip(cells, run_cells(cells), strict=True), start=1):
        cell["outputs"], cell["execution_count"] = outputs, number
    TOUR.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
