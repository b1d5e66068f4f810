"""Size is a budget: a file or function that outgrows it wants to be two."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_SOURCE_LINES = 600
MAX_TEST_LINES = 700
MAX_FUNCTION_LINES = 70
TEXT = (".py", ".cpp", ".h", ".metal")


def files(*folders: str) -> list[Path]:
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*")) if p.suffix in TEXT]
    assert found
    return found


def n_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def too_long(paths: list[Path], limit: int) -> list[str]:
    return [f"{p.relative_to(ROOT)}: {n} lines, at most {limit}" for p in paths if (n := n_lines(p)) > limit]


def test_no_source_file_is_too_long() -> None:
    assert not too_long(files("src", "csrc", "metal", "docs", "benchmarks"), MAX_SOURCE_LINES)


def test_no_test_file_is_too_long() -> None:
    assert not too_long(files("tests"), MAX_TEST_LINES)


def test_no_python_function_is_too_long() -> None:
    long = []
    for path in files("src", "tests", "docs"):
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                n = node.end_lineno - node.lineno + 1
                if n > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}: {node.name}: {n} lines, at most {MAX_FUNCTION_LINES}")
    assert not long, "\n".join(long)
