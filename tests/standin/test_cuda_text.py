"""The kernels translated to CUDA: NVIDIA's compiler takes every one. Running them needs an NVIDIA GPU (both.py)."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAMILIES = sorted((ROOT / "metal").glob("*.metal"))
OPTIONS = [
    "-std=c++17",
    "-default-device",
    "--fmad=false",
    "--ftz=true",
    "--prec-div=true",
    "--prec-sqrt=true",
    "-DDS4_ALL",
]


def compiler() -> ctypes.CDLL | None:
    """libnvrtc, from the package nvidia-cuda-nvrtc or a CUDA toolkit."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    found = [str(p) for folder in folders for p in sorted(Path(folder).glob("**/libnvrtc.so.*"))]
    for name in [*found, "libnvrtc.so.13", "libnvrtc.so.12"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cuda")
    subprocess.run([sys.executable, ROOT / "metal" / "generate_cuda.py", out, *FAMILIES], check=True)
    return out


def compile_text(nvrtc: ctypes.CDLL, source: str, *options: str) -> str:
    """The compiler's complaints, empty when it made machine code."""
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 0, None, None) == 0
    all_options = [o.encode() for o in (*OPTIONS, *options)]
    result = nvrtc.nvrtcCompileProgram(program, len(all_options), (ctypes.c_char_p * len(all_options))(*all_options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    nvrtc.nvrtcGetProgramLog(program, log)
    cubin = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(cubin))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return "" if result == 0 and cubin.value > 0 else log.value.decode(errors="replace") or "no machine code"


@pytest.mark.parametrize("family", [p.stem for p in FAMILIES])
def test_nvidias_compiler_takes_every_kernel(texts: Path, family: str) -> None:
    nvrtc = compiler()
    if nvrtc is None:
        pytest.skip("no libnvrtc: pip install nvidia-cuda-nvrtc")
    source = (texts / f"{family}.cu").read_text()
    assert compile_text(nvrtc, source, "--gpu-architecture=sm_90") == ""


def nvcc() -> str | None:
    """NVIDIA's offline compiler, of a CUDA toolkit."""
    found = shutil.which("nvcc")
    toolkits = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))
    return found or (str(toolkits[-1]) if toolkits else None)


# nvcc has no -default-device: member functions, which alone carry no annotation, get theirs here.
MEMBER = re.compile(r"^( +(?:template <[^>]*> )?)(?=[\w:][^;{}()=]* \w+\([^;{}]*\) (?:const )?\{)", re.MULTILINE)


@pytest.mark.parametrize("family", [p.stem for p in FAMILIES])
def test_nvcc_takes_every_kernel(texts: Path, tmp_path: Path, family: str) -> None:
    """The text on which NVRTC is tested above, once more with the compiler of the toolkit: about a second a family."""
    program = nvcc()
    if program is None:
        pytest.skip("no nvcc")
    assert offline(program, (texts / f"{family}.cu").read_text(), tmp_path) == ""
    if family == FAMILIES[0].stem:
        assert "nothing" in offline(program, "__global__ void wrong() { metal::nothing(); }\n", tmp_path)


def offline(program: str, source: str, folder: Path) -> str:
    """nvcc's complaints, empty when it made machine code."""
    text, image = folder / "k.cu", folder / "k.cubin"
    text.write_text(MEMBER.sub(r"\1__device__ ", source))
    options = [o for o in OPTIONS if o != "-default-device"]
    done = subprocess.run([program, "-w", *options, "-arch=sm_90", "-cubin", "-o", image, text],
                          capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    return "" if done.returncode == 0 and image.stat().st_size > 0 else done.stdout + done.stderr + "no machine code"


def test_the_compile_test_can_fail(texts: Path) -> None:
    nvrtc = compiler()
    if nvrtc is None:
        pytest.skip("no libnvrtc: pip install nvidia-cuda-nvrtc")
    source = (
        texts / f"{FAMILIES[0].stem}.cu"
    ).read_text() + '\nextern "C" __global__ void wrong() { metal::nothing(); }\n'
    assert "nothing" in compile_text(nvrtc, source, "--gpu-architecture=sm_90")


def test_every_exported_kernel_has_an_entry(texts: Path) -> None:
    table = (texts / "kernels.cpp").read_text()
    for path in FAMILIES:
        text = path.read_text()
        for line in text.split("\n"):
            if line.startswith("EXPORT_KERNEL("):
                name = line.split('"')[1]
                declared = f"void __launch_bounds__(DS4_THREADS, DS4_BLOCKS) ds4_{name}("
                assert f'{{"{name}", ' in table and declared in table


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("file", ["driver", "device", "queue", "times"])
def test_the_host_side_compiles(file: str) -> None:
    include = [f"-I{ROOT / d}" for d in ("csrc", "metal", "csrc/metal_standin/include")]
    subprocess.run(
        ["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *include, ROOT / f"csrc/cuda/{file}.cpp"],
        check=True,
    )
