"""The documentation against the tree: links, file names, function names, commands, code that at least parses.

tests/model/test_doc_examples.py runs the Python examples; tests/model/test_tour.py the notebook.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")
TREES = ("src/", "csrc/", "metal/", "tests/", "docs/", "manifests/", "benchmarks/", ".ci/")

page = pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    """(info string, text) of the fenced blocks."""
    for info, text in FENCE.findall(path.read_text(encoding="utf-8")):
        yield info.strip(), text


def prose(path: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """What a link may name in a page: its headings, in the form that GitHub gives them."""
    headings = re.findall(r"^#+ +(.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


# ---- links and names ------------------------------------------------------------------------------------------------


@page
def test_links_resolve(path: Path) -> None:
    broken = []
    for target in LINK.findall(prose(path)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            broken.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(file):
            broken.append(f"{target}: no such heading; there are {sorted(anchors(file))}")
    assert not broken, "\n".join(broken)


@page
def test_files_named_exist(path: Path) -> None:
    """Names in backticks that begin with a folder of the tree. `*`, `<name>`, `{a,b}` stand for something else."""
    missing = []
    for name in INLINE.findall(prose(path)):
        name = name.split("::")[0]
        if name.startswith(TREES) and not re.search(r"[*<{ …]", name) and not (ROOT / name.split("#")[0]).exists():
            missing.append(name)
    assert not missing, f"named, but not there: {missing}"


@page
def test_functions_named_exist(path: Path) -> None:
    """`csrc/engine/session.cpp::layer` in backticks says that this file has something of that name."""
    missing = []
    for name in INLINE.findall(prose(path)):
        file, colons, symbol = name.partition("::")
        if colons and file.startswith(TREES) and (ROOT / file).is_file():
            text = (ROOT / file).read_text(encoding="utf-8")
            if not re.search(rf"\b{re.escape(symbol.split('::')[-1])}\b", text):
                missing.append(name)
    assert not missing, f"named, but not there: {missing}"


@page
def test_pages_stand_alone(path: Path) -> None:
    """No path of somebody's machine."""
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w.])/(?:home|root|Users|work|mnt|tmp|private)/[\w./-]+", text)


def test_every_page_is_in_the_index() -> None:
    index = DOCS / "index.md"
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in LINK.findall(prose(index))}
    pages = {p.resolve() for p in [*DOCS.glob("*.md"), *DOCS.glob("*.ipynb"), *(DOCS / "decisions").glob("*.md")]}
    assert not pages - linked - {index.resolve()}, "say in docs/index.md what these pages are for"


def test_the_glossary_is_in_order_and_without_repetition() -> None:
    words = re.findall(r"^\| \*\*([^*]+)\*\* \|", prose(DOCS / "glossary.md"), re.MULTILINE)
    assert len(words) >= 40
    assert words == sorted(set(words), key=str.lower)


def test_the_decode_step_names_every_operation_of_the_contract() -> None:
    contract = (ROOT / "csrc" / "engine" / "backend.h").read_text(encoding="utf-8")
    operations = re.findall(r"virtual void (\w+)\(const \w+Args&\) = 0;", contract)
    assert len(operations) >= 14
    text = prose(DOCS / "decode-step.md")
    assert not [name for name in operations if f"`{name}`" not in text]


def test_the_map_names_every_folder_and_module() -> None:
    text = (DOCS / "map.md").read_text(encoding="utf-8")
    folders = {p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()}
    modules = {p.stem for p in (ROOT / "src" / "ds4v41").glob("*.py")} - {"__init__"}
    packages = {p.parent.name for p in (ROOT / "src" / "ds4v41").glob("*/__init__.py")}
    missing = [name for name in sorted(folders | modules | packages) if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"docs/map.md does not say what these are: {missing}"


# ---- examples -------------------------------------------------------------------------------------------------------


@page
def test_python_parses(path: Path) -> None:
    """Also that which is marked `no-run`."""
    for info, text in blocks(path):
        if info.split()[:1] == ["python"]:
            assert info in ("python", "python no-run"), f"{path.name}: unknown mark {info!r}"
            compile(text, path.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def commands(path: Path) -> Iterator[list[str]]:
    """The `ds4v41 ...` command lines of shell blocks, of blocks without a mark and of indented lines, as argument lists
    without the program's name."""
    indented = "\n".join(re.findall(r"^    (ds4v41 .*)$", prose(path), re.MULTILINE))
    for info, text in [*blocks(path), ("sh", indented)]:
        if info.split()[:1] not in (["sh"], ["bash"], ["console"], []):
            continue
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|\||[|;]", line.removeprefix("$ ")):
                words = shlex.split(part, comments=True)
                if words and Path(words[0]).name == "ds4v41":
                    yield words[1:]


@page
def test_command_lines_parse(path: Path) -> None:
    lines = list(commands(path))
    if not lines:
        return
    from ds4v41.cli.parser import build_parser

    for words in lines:
        if not set(words) & {"--help", "--version"}:
            build_parser().parse_args([word for word in words if word not in (">", "<")])


def test_commands_are_found() -> None:
    assert ["chat"] in [words[:1] for words in commands(ROOT / "README.md")]
    assert ["store"] in [words[:1] for words in commands(DOCS / "cli.md")]
    assert ["bench"] in [words[:1] for words in commands(DOCS / "bench.md")]
