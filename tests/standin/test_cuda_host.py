"""The host side of csrc/cuda over a driver that is none (tests/cpp/fake_cuda.cpp): memory, order, graphs, re-use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CXX = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(CXX is None or sys.platform != "linux", reason="needs a C++ compiler on Linux")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The classes, one family of kernels and the test; and the fake driver under both names."""
    assert CXX
    out = tmp_path_factory.mktemp("cuda_host")
    generate = ROOT / "metal" / "generate_cuda.py"
    subprocess.run([sys.executable, generate, out, ROOT / "metal" / "measure.metal"], check=True)
    flags = ["-std=c++20", "-O0", "-pthread", "-DDS4_CUDA=1", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'metal'}",
             f"-I{ROOT / 'csrc' / 'metal_standin' / 'include'}"]  # fmt: skip
    standin = ROOT / "csrc" / "metal_standin"
    sources = [*sorted((ROOT / "csrc" / "cuda").glob("*.cpp")), standin / "foundation.cpp", standin / "shared.cpp",
               out / "kernels.cpp", out / "sources.cpp", ROOT / "tests" / "cpp" / "cuda_graphs.cpp"]  # fmt: skip
    subprocess.run([CXX, *flags, *map(str, sources), "-ldl", "-o", str(out / "graphs")], check=True)
    fake = ROOT / "tests" / "cpp" / "fake_cuda.cpp"
    subprocess.run([CXX, "-std=c++20", "-shared", "-fPIC", str(fake), "-o", str(out / "libcuda.so.1")], check=True)
    shutil.copy(out / "libcuda.so.1", out / "libnvrtc.so.13")
    return out / "graphs"


def run(program: Path, **environment: str) -> list[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DS4_")}
    kept |= {"LD_LIBRARY_PATH": str(program.parent)} | environment
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False, env=kept)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("\n")


LAUNCHES = 4 + 4 + 4 + 1 + 2 + sum(range(1, 41)) + 4


def test_without_graphs(program: Path) -> None:
    """Every dispatch is a launch, also of a command buffer that was dropped: it was launched at its barrier."""
    *lines, dropped, driver = run(program)
    assert all(line.endswith(" 0 0 0 0") for line in lines)
    assert dropped == "without commit: copied"
    assert driver == f"driver: {LAUNCHES + 1} launches, 0 graphs, 0 set anew, 0 destroyed"


def test_graphs_are_used_again(program: Path) -> None:
    """Counts are made, launched, kernels, set anew. Of 43 forms 32 are kept."""
    *lines, dropped, driver = run(program, DS4_CUDA_GRAPHS="1")
    assert lines == [
        "first 1 1 4 0",
        "again 1 2 8 0",
        "other arguments 1 3 12 2",
        "other form 2 4 13 2",
        "memory 3 5 15 2",
        f"many forms 42 45 {15 + 820} 3",  # one copy alone is the form of before, with another length and place
        f"dropped form 43 46 {LAUNCHES} 3",
    ]
    assert dropped == "without commit: nothing"
    assert driver == "driver: 0 launches, 46 graphs, 3 set anew, 43 destroyed"


def test_memory_of_the_host(program: Path) -> None:
    """Buffers that the host writes in memory whose pages stay: the same copies."""
    assert run(program, DS4_CUDA_PINNED="1") == run(program)
    assert run(program, DS4_CUDA_PINNED="1", DS4_CUDA_GRAPHS="1") == run(program, DS4_CUDA_GRAPHS="1")
