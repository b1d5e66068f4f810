# ruff: noqa: E501  (kernel text in tables)
"""The kernels under clang with real address spaces, and the rules that no compiler here checks.

Apple's compiler refuses what mixes device, constant, threadgroup and thread memory. On other machines these words mean
nothing, so clang gets them as numbered address spaces, which it keeps apart.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
METAL = ROOT / "metal"
FAMILIES = sorted(METAL.glob("*.metal"))
KERNELS = [*FAMILIES, *sorted((ROOT / "tests" / "standin" / "kernels").glob("*.metal"))]
FLAGS = ["--target=aarch64-linux-gnu", "-std=c++14", "-fsyntax-only", "-ffreestanding", "-nostdinc", "-nostdinc++", "-fsigned-char",
         "-Wall", "-Wextra", "-Wdouble-promotion", "-Wvla", "-Werror", "-Wno-unused-function", "-Wno-unused-parameter",
         "-Wno-unused-const-variable", "-Wno-undefined-internal", f"-I{METAL}", f"-I{ROOT / 'tests' / 'standin' / 'lint'}"]  # fmt: skip


def find_clang() -> str | None:
    names = ["clang++", *(f"clang++-{n}" for n in range(30, 13, -1))]
    return next((path for name in names if (path := shutil.which(name))), None)


CLANG = find_clang()
needs_clang = pytest.mark.skipif(
    CLANG is None and not os.environ.get("DS4_REQUIRE_CLANG"), reason="no clang++ on this machine"
)


def generate(out: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(METAL / "generate.py"), "--lint", str(out), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def compile_one(file: Path, *more: str) -> subprocess.CompletedProcess[str]:
    assert CLANG, "DS4_REQUIRE_CLANG is set, but there is no clang++"
    return subprocess.run([CLANG, *FLAGS, *more, str(file)], capture_output=True, text=True, check=False)


def changed_spaces(file: Path) -> list[str]:
    """Casts from one space into another, which clang lets pass."""
    dump = compile_one(file, "-Xclang", "-ast-dump", "-fno-color-diagnostics").stdout
    return [line.strip() for line in dump.splitlines() if "AddressSpaceConversion" in line]


@pytest.fixture(scope="module")
def lint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lint")
    done = generate(out, *KERNELS)
    assert done.returncode == 0, done.stderr
    return out


@needs_clang
@pytest.mark.parametrize("family", [k.stem for k in KERNELS])
def test_address_spaces_and_types(lint: Path, family: str) -> None:
    done = compile_one(lint / f"{family}.cpp")
    assert done.returncode == 0, done.stderr
    assert not changed_spaces(lint / f"{family}.cpp")


HEAD = '#include "compat.h"\n#include "numerics.h"\nstruct Pair { float a; float b; };\n'
WRONG_SPACES = {
    "device pointer into thread": "KERNEL_INLINE float f(device float* p) { thread float* q = p; return q[0]; }",
    "threadgroup argument for device": "KERNEL_INLINE void f(device float* p) { p[0] = 1.0f; }\n"
    "KERNEL_INLINE void g(threadgroup float* p) { f(p); }",
    "reference across spaces": "KERNEL_INLINE float f(thread float& x) { return x; }\n"
    "KERNEL_INLINE float g(device float* p) { return f(p[0]); }",
    "write to constant": "KERNEL_INLINE void f(constant Pair& p) { p.a = 1.0f; }",
    "write through const": "KERNEL_INLINE void f(device const float* p) { p[0] = 1.0f; }",
    "cast between spaces": "KERNEL_INLINE float f(device float* p) { return ((threadgroup float*)p)[0]; }",
    "reinterpreted space": "KERNEL_INLINE float f(device float* p) { return reinterpret_cast<threadgroup float*>(p)[0]; }",
    "float maximum": "KERNEL_INLINE float f(float a) { return max(a, 1.0f); }",
    "float sum of lanes": "KERNEL_INLINE float f(float a) { return simd_sum(a); }",
    "function constant as a size": "FUNCTION_CONSTANT(int, kN, 0);\nKERNEL_INLINE float f() { float a[kN]; return a[0]; }",
    "half4 for float4": "KERNEL_INLINE float4 f(half4 h) { float4 v = h; return v; }",
    "later C++": "KERNEL_INLINE int f() { if constexpr (true) return 1; return 0; }",
    "atomic as a number": "KERNEL_INLINE uint f(device atomic_uint* p) { return *p + 1u; }",
}


@needs_clang
@pytest.mark.parametrize("what", WRONG_SPACES)
def test_clang_refuses(tmp_path: Path, what: str) -> None:
    file = tmp_path / "wrong.metal"
    file.write_text(HEAD + WRONG_SPACES[what] + "\n")
    done = generate(tmp_path, file)
    assert done.returncode == 0, done.stderr
    compiled = compile_one(tmp_path / "wrong.cpp")
    assert (compiled.returncode != 0 and "wrong.metal:" in compiled.stderr) or changed_spaces(tmp_path / "wrong.cpp")


@needs_clang
def test_clang_takes_what_is_right(tmp_path: Path) -> None:
    file = tmp_path / "right.metal"
    file.write_text(
        HEAD
        + "template <class T> KERNEL_INLINE T first(device const T* p) { return p[0]; }\n"
        + "KERNEL_INLINE void both(thread float& a, threadgroup float* p) { a = p[1]; p[0] = a; }\n"
        + "KERNEL_INLINE float4 wide(half4 h) { return float4(h) * 2.0f; }\n"
        + "kernel void k(device const float* in [[buffer(0)]], threadgroup float* s [[threadgroup(0)]],\n"
        + "              device float* out [[buffer(1)]], uint i [[thread_position_in_grid]]) {\n"
        + "  float a = first<float>(in); both(a, s); out[i] = ds4_exp(a); }\n"
    )
    assert generate(tmp_path, file).returncode == 0
    compiled = compile_one(tmp_path / "right.cpp")
    assert compiled.returncode == 0, compiled.stderr
    assert not changed_spaces(tmp_path / "right.cpp")


K = "kernel void k(device float* y [[buffer(0)]]) { y[0] = 0.0f; }\n"
REFUSED = {
    "double": ("KERNEL_INLINE double f() { return 1.0f; }", "there is no double"),
    "literal without suffix": ("KERNEL_INLINE float f() { return 1.5; }", "needs the suffix f"),
    "exponent without suffix": ("KERNEL_INLINE float f() { return 1e-3; }", "needs the suffix f"),
    "goto": ("KERNEL_INLINE void f() { goto end; end: return; }", "goto"),
    "long long": ("KERNEL_INLINE long f() { long long x = 1; return x; }", "64 bits"),
    "std": ("KERNEL_INLINE int f() { return std::min(1, 2); }", "standard library"),
    "union": ("union U { float f; uint u; };", "as_type"),
    "lambda": ("KERNEL_INLINE int f() { return [](int x) { return x; }(1); }", "no lambdas"),
    "recursion": ("KERNEL_INLINE int f(int n) { return n == 0 ? 0 : f(n - 1); }", "calls itself"),
    "recursion through another": ("KERNEL_INLINE int g(int n);\nKERNEL_INLINE int f(int n) { return g(n); }\n"
                                  "KERNEL_INLINE int g(int n) { return f(n); }", "calls itself"),
    "static local": ("KERNEL_INLINE int f() { static int n = 0; return n; }", "no static"),
    "function pointer": ("KERNEL_INLINE int f(int (*g)(int)) { return g(1); }", "no function pointers"),
    "pointer without space": ("KERNEL_INLINE float f(float* p) { return p[0]; }", "names its address space"),
    "reference without space": ("KERNEL_INLINE void f(uint4& v) { v.x = 1u; }", "names its address space"),
    "reference to a struct": ("struct S { int n; };\nKERNEL_INLINE int f(const S& s) { return s.n; }", "names its address space"),
    "template reference": ("template <class T> KERNEL_INLINE T f(T& x) { return x; }", "names its address space"),
    "vector cast": ("KERNEL_INLINE float4 f(half4 h) { return (float4)h; }", "convert vectors"),
    "threadgroup array": (K[:-2] + "}\nKERNEL_INLINE void f() { threadgroup float s[4]; s[0] = 1.0f; }", "through parameters"),
    "missing attribute": ("kernel void k(device float* y) { y[0] = 0.0f; }", "needs one name and one"),
    "index over 30": ("kernel void k(device float* y [[buffer(31)]]) { y[0] = 0.0f; }", "literal n of 0 to 30"),
    "index twice": ("kernel void k(device float* y [[buffer(1)]], device float* x [[buffer(1)]]) { y[0] = x[0]; }", "share an index"),
    "wrong space": ("kernel void k(threadgroup float* y [[buffer(1)]]) { y[0] = 0.0f; }", "does not fit"),
    "signed built-in": ("kernel void k(device float* y [[buffer(1)]], int i [[thread_position_in_grid]]) { y[i] = 0.0f; }", "use uint"),
    "unknown built-in": ("kernel void k(device float* y [[buffer(1)]], uint i [[thread_number]]) { y[i] = 0.0f; }", "unknown attribute"),
    "overloaded kernel": (K + "kernel void k(device uint* y [[buffer(0)]]) { y[0] = 0u; }", "cannot be overloaded"),
    "exported twice": ("template <class T> kernel void g(device T* y [[buffer(0)]]) { y[0] = T(0); }\n"
                       'EXPORT_KERNEL("a", g, float);\nEXPORT_KERNEL("a", g, uint);', "two kernels are exported as a"),
    "exported nothing": ('EXPORT_KERNEL("a", g, float);', "no kernel of this file"),
    "host_name": ('template [[host_name("a")]] kernel void f<float>(device float* y [[buffer(0)]]);', "EXPORT_KERNEL"),
    "unknown include": ('#include "nothing.h"', "includes nothing.h"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_the_rules_refuse(tmp_path: Path, what: str) -> None:
    text, why = REFUSED[what]
    (tmp_path / "wrong.metal").write_text(HEAD + text + "\n")
    done = generate(tmp_path, tmp_path / "wrong.metal")
    assert done.returncode == 1
    assert why in done.stderr and re.search(r"wrong\.metal(:\d+)?[:,]", done.stderr), done.stderr


def test_comments_and_strings_are_no_code(tmp_path: Path) -> None:
    (tmp_path / "fine.metal").write_text(HEAD + "// a double goto 1.5\n/* std::union */\n" + K)
    assert generate(tmp_path, tmp_path / "fine.metal").returncode == 0


def exported(path: Path) -> set[str]:
    text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    templates = set(re.findall(r"template\s*<[^>]*>\s*kernel\s+void\s+(\w+)", text))
    return set(re.findall(r'EXPORT_KERNEL\("(\w+)"', text)) | (
        set(re.findall(r"kernel\s+void\s+(\w+)", text)) - templates
    )


def test_host_and_kernels_use_the_same_names() -> None:
    host = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "csrc" / "metal_host").glob("*.*")))
    asked = set(re.findall(r'\b(?:encode|kernel)(?:<[^>]*>)?\(\s*"(\w+)"', host))
    names = set().union(*map(exported, FAMILIES)) if FAMILIES else set()
    assert asked <= names, f"the host asks for kernels that do not exist: {sorted(asked - names)}"
    unused = {name for name in names if f'"{name}"' not in host}
    assert not unused, f"kernels that the host never asks for: {sorted(unused)}"
