"""The classes of Metal in a program of their own (tests/cpp/metal_objects.cpp)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CXX = shutil.which("c++") or shutil.which("g++")


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
def test_objects(tmp_path: Path) -> None:
    done = build_and_run(tmp_path)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.skipif(not os.environ.get("DS4_SANITIZERS"), reason="heavy: DS4_SANITIZERS=1 when the stand-in changes")
@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
def test_objects_under_sanitizers(tmp_path: Path) -> None:
    done = build_and_run(tmp_path, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def build_and_run(tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    assert CXX
    kernels = sorted((ROOT / "tests" / "standin" / "kernels").glob("*.metal"))
    generate = ROOT / "metal" / "generate.py"
    subprocess.run([sys.executable, str(generate), str(tmp_path), *map(str, kernels)], check=True)
    flags = ["-std=c++20", "-O0", "-pthread", "-DDS4_STANDIN_HAS_CHECKED=0",
             f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'metal'}",
             f"-I{ROOT / 'csrc' / 'metal_standin' / 'include'}", *more]  # fmt: skip
    objects = []
    for kernel in kernels:
        objects.append(tmp_path / f"{kernel.stem}.o")
        family = f"-DDS4_FAMILY=k_{kernel.stem}_fast"
        source = tmp_path / f"{kernel.stem}.cpp"
        subprocess.run([CXX, *flags, family, "-c", str(source), "-o", str(objects[-1])], check=True)
    sources = [*sorted((ROOT / "csrc" / "metal_standin").glob("*.cpp")),
               ROOT / "csrc" / "base" / "threads.cpp", tmp_path / "registry.cpp", tmp_path / "sources.cpp",
               ROOT / "tests" / "cpp" / "metal_objects.cpp"]  # fmt: skip
    program = tmp_path / "objects"
    subprocess.run([CXX, *flags, *map(str, sources), *map(str, objects), "-o", str(program)], check=True)
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=300, check=False)
