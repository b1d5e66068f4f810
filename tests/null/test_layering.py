"""The arrows of docs/map.md: which folder and which module may know which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC, METAL, PACKAGE = ROOT / "csrc", ROOT / "metal", ROOT / "src" / "ds4v41"

# ---- C++ ------------------------------------------------------------------------------------------------------------

CONTRACT = frozenset({"engine/backend.h", "engine/shape.h", "engine/weights.h"})
"""What the engine asks of a back end; the only headers of the engine that are for everybody."""
FACTORIES = frozenset({"cpu/cpu.h", "metal_host/metal.h"})
"""The only header of each back end that others see."""
BACK_ENDS = frozenset({"cpu", "metal_host"})

# Folder -> folders that it may include beside itself; "contract" and "factory" are the headers above. metal is
# metal/, whose headers are the arithmetic that all back ends share.
MAY_INCLUDE: dict[str, frozenset[str]] = {
    "base": frozenset(),
    "convert": frozenset({"base", "metal"}),
    "engram": frozenset({"base"}),
    "sampling": frozenset({"base", "metal"}),
    "kv": frozenset({"base", "contract"}),
    "cpu": frozenset({"base", "contract", "metal"}),
    "engine": frozenset({"base", "kv", "engram", "factory"}),
    "metal_host": frozenset({"base", "contract", "metal"}),
    "metal_standin": frozenset({"base", "metal"}),
    "cuda": frozenset({"base", "metal"}),
    "decode": frozenset({"base", "sampling", "engine"}),
    "bindings": frozenset(
        {"base", "convert", "decode", "engram", "sampling", "kv", "engine", "factory", "metal_standin"}
    ),
    "metal": frozenset(),
}

QUOTED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
SYSTEM = re.compile(r"^\s*#\s*include\s*<([^>]+)>", re.MULTILINE)


def sources() -> list[Path]:
    found = [p for folder in (CSRC, METAL) for p in sorted(folder.rglob("*")) if p.suffix in (".h", ".cpp", ".metal")]
    assert len(found) > 40
    return found


def home(path: Path) -> str:
    """The folder that a source file belongs to."""
    return "metal" if path.is_relative_to(METAL) else path.relative_to(CSRC).parts[0]


def resolve(path: Path, name: str) -> Path:
    """The file that a quoted include finds: beside the file, or in one of the two include folders of the build."""
    for folder in (path.parent, CSRC, METAL, CSRC / "metal_standin" / "include"):
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise AssertionError(f"{path.relative_to(ROOT)} includes {name}, which is nowhere")


def is_allowed(path: Path, target: Path) -> bool:
    here, there = home(path), home(target)
    if here == there:
        return True
    allowed = MAY_INCLUDE[here]
    name = target.relative_to(METAL if there == "metal" else CSRC).as_posix()
    if here == "cuda" and name == "metal_host/sources.h":  # the embedded texts, by which it knows a family
        return True
    if here == "bindings" and name == "cuda/times.h":  # the device's own times, which the shared host knows nothing of
        return True
    if there in BACK_ENDS:
        return name in FACTORIES and "factory" in allowed and path.suffix == ".cpp"  # no header passes it on
    return there in allowed or ("contract" in allowed and name in CONTRACT)


def test_every_folder_of_the_sources_has_its_arrows() -> None:
    assert {home(path) for path in sources()} == set(MAY_INCLUDE), "say in docs/map.md and here what it may include"


def test_includes_follow_the_arrows() -> None:
    wrong = []
    for path in sources():
        for name in QUOTED.findall(path.read_text(encoding="utf-8")):
            target = resolve(path, name)
            if not is_allowed(path, target):
                wrong.append(f"{path.relative_to(ROOT)} includes {target.relative_to(ROOT)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("here", "there", "allowed"),
    [
        ("base/threads.h", "engine/shape.h", False),
        ("kv/state.cpp", "engine/backend.h", True),
        ("kv/state.cpp", "engine/session.h", False),
        ("engram/table.cpp", "engine/shape.h", False),
        ("cpu/moe.cpp", "engine/backend.h", True),
        ("cpu/moe.cpp", "kv/state.h", False),
        ("engine/model.cpp", "cpu/cpu.h", True),
        ("engine/model.h", "cpu/cpu.h", False),
        ("engine/model.cpp", "metal_host/metal.h", True),
        ("engine/model.cpp", "metal_host/device.h", False),
        ("metal_host/moe.cpp", "engine/backend.h", True),
        ("metal_host/moe.cpp", "engine/model.h", False),
        ("engine/model.cpp", "cpu/simd.h", False),
        ("engine/session.cpp", "bindings/bindings.h", False),
        ("bindings/bind_model.cpp", "kv/state.h", True),
    ],
)
def test_the_arrows_mean_what_they_say(here: str, there: str, allowed: bool) -> None:
    assert is_allowed(CSRC / here, CSRC / there) is allowed


def test_only_bindings_know_python() -> None:
    knows = re.compile(r"nanobind|Python\.h|PyObject|\bPy_")
    users = {home(path) for path in sources() if knows.search(path.read_text(encoding="utf-8"))}
    assert users == {"bindings"}


# ---- C++ that is compiled once for each instruction set -------------------------------------------------------------

PLAIN_HEADERS = frozenset({"cstddef", "cstdint", "cstring", "sys/mman.h", "immintrin.h", "arm_neon.h"})
"""System headers whose functions are not emitted with the instruction set of the file that includes them."""
STD_TYPES = re.compile(
    r"std::(w?string\w*|vector|deque|list|array|(unordered_)?(map|set)|function|(unique|shared|weak)_ptr|make_\w+|"
    r"optional|variant|tuple|pair|[io]?stream|cout|cerr|sort|thread|mutex|atomic)\b"
)
ONCE = frozenset({"cpu.h", "dispatch.cpp", "half_table.cpp", "memory.cpp", "working.cpp"})
"""The files of csrc/cpu that are compiled once, for the baseline."""
FOR_ONE_SET = frozenset({"pairs.cpp"})
"""Those that are compiled once; the rule for files of an instruction set holds for them."""


def cpu_families() -> list[str]:
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    found = re.search(r"set\(DS4_CPU_FAMILIES ([^)]+)\)", text)
    assert found is not None
    return found[1].split()


def test_cpu_files_are_built_for_every_instruction_set_or_named_as_exceptions() -> None:
    built = {f"{family}.cpp" for family in cpu_families()}
    once = {name for name in ONCE | FOR_ONE_SET if name.endswith(".cpp")}
    assert built | once == {p.name for p in (CSRC / "cpu").glob("*.cpp")}


def test_files_of_an_instruction_set_use_no_standard_containers() -> None:
    wrong = []
    for path in sorted((CSRC / "cpu").iterdir()):
        if path.name in ONCE:
            continue
        text = path.read_text(encoding="utf-8")
        wrong += [f"{path.name} includes <{name}>" for name in SYSTEM.findall(text) if name not in PLAIN_HEADERS]
        code = re.sub(r"//[^\n]*", "", text)
        wrong += [f"{path.name} uses {use[0]}" for use in STD_TYPES.finditer(code)]
        if path.suffix == ".cpp":
            own = "namespace ds4::cpu::DS4_ISA" in code or "DS4_CPU_NAMESPACE_BEGIN" in code
            wrong += [] if own else [f"{path.name} is not inside the namespace of its instruction set"]
    assert not wrong, "\n".join(wrong)


# ---- Python ---------------------------------------------------------------------------------------------------------

# From the bottom up; a module may import what stands in a row above its own, and the rest of its own package.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_ext", "errors"),
    ("admission",),
    ("checks", "results", "stops", "tokenizer_spec", "aio", "atomic", "machine", "history"),
    ("tokenizer", "sampling", "checkpoint", "manifest", "download"),
    ("chat", "engram", "prefill", "synth_tokenizer", "weights_id", "masks"),
    ("weights",),
    ("memory", "kvstore", "ledger", "synth", "drafting"),
    ("drafter", "synth_gguf"),
    ("decode", "generation", "reuse", "saved", "synthetic"),
    ("chatting", "advance"),
    ("session",),
    ("model",),
    ("inspect", "pull", "verify", "bench"),
    ("device_check",),
    ("cli",),
    ("__main__",),
)
RANK = {module: i for i, row in enumerate(LAYERS) for module in row}
EXT_USERS = frozenset({"model", "session", "prefill", "memory", "weights", "sampling", "checkpoint", "drafter",
                       "kvstore", "engram", "ledger", "bench", "generation", "decode", "verify", "saved",
                       "device_check", "synthetic"})  # fmt: skip
"""Modules that may talk to the extension. Everything else goes through these."""


def modules() -> dict[str, Path]:
    """Dotted name inside the package -> file; the package itself is ""."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    assert len(found) > 30
    return found


MODULES = modules()


def run_time_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports, also those inside functions, but not those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        else:
            yield from run_time_imports(node)


def imported(name: str, path: Path) -> set[str]:
    """Modules of this package that a module imports, by dotted name."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    found: set[str] = set()
    for node in run_time_imports(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join((["ds4v41", *base] if node.level else []) + ([node.module] if node.module else []))
            full = [f"{start}.{alias.name}" for alias in node.names]
        found |= {_module_of(item.removeprefix("ds4v41.")) for item in full if item.startswith("ds4v41.")}
    return found - {""}


def _module_of(dotted: str) -> str:
    """`checkpoint.gguf.open_gguf` -> `checkpoint.gguf`."""
    parts = dotted.split(".")
    while parts and ".".join(parts) not in MODULES and parts[0] != "_ext":
        parts.pop()
    return "_ext" if parts[:1] == ["_ext"] else ".".join(parts)


def test_every_module_has_its_layer() -> None:
    tops = {name.split(".")[0] for name in MODULES} - {""}
    assert tops <= set(RANK), f"say in docs/map.md and here where they belong: {sorted(tops - set(RANK))}"


def test_no_module_imports_upwards() -> None:
    wrong = []
    for name, path in MODULES.items():
        top = name.split(".")[0]
        for other in imported(name, path) if top else ():
            other_top = other.split(".")[0]
            if other_top != top and RANK.get(other_top, 0) >= RANK.get(top, len(LAYERS)):
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_import_goes_round_in_circles() -> None:
    graph = {name: imported(name, path) - {name} for name, path in MODULES.items() if name}
    assert any(graph.values())
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"import cycle: {' -> '.join(error.args[1])}") from None


def test_few_modules_talk_to_the_extension() -> None:
    users = set()
    for name, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        if "_ext" in imported(name, path) or re.search(r'import_module\("ds4v41\._ext', text):
            users.add(name.split(".")[0])
    assert users <= EXT_USERS
    assert {"model", "session"} <= users


def test_the_package_alone_imports_next_to_nothing() -> None:
    """`import ds4v41` stays fast: the errors, everything else when it is first used."""
    assert imported("", MODULES[""]) == {"errors"}
    text = MODULES["errors"].read_text(encoding="utf-8")
    assert not re.search(r"^(import|from) (?!__future__|collections)", text, re.MULTILINE)
