"""Translates the kernels of this folder to CUDA C++ and embeds the text. Run by CMake.

    generate_cuda.py OUTPUT_FOLDER FILE.metal...

Writes one text a family (family.cu) and kernels.cpp with the table of all kernels. The run-time compiler gets the text
of a family with -DDS4_ONLY_<kernel>, function constants as -DDS4_CONSTANT_<i>, and -DDS4_THREADS=<threads>.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import generate
from generate import CONSTANT, EXPORT, HERE, KEPT, SCALARS, Kernel, Param, Refused, Text

BUILT_INS = {
    "index": "ds4_index()", "lane": "(ds4_index() & 31u)", "simd": "(ds4_index() >> 5)", "n_simd": "ds4_simdgroups()",
    "in_grid": "ds4_in_grid()", "in_group": "ds4_triple(threadIdx)", "group": "ds4_triple(blockIdx)",
    "group_size": "ds4_triple(blockDim)", "groups": "ds4_triple(gridDim)", "grid": "ds4_grid()",
}  # fmt: skip
PRELUDE = (HERE.parent / "csrc/cuda/msl.h", HERE / "compat.h")


def by_value(p: Param) -> bool:
    """A struct that the launch carries: `constant T& args`."""
    return p.attribute == "buffer" and p.type.endswith("&") and re.search(r"\bconstant\b", p.type) is not None


def struct_name(p: Param) -> str:
    return re.sub(r"\b(constant|const)\b|&", " ", p.type).strip()


def any_kind(p: Param) -> str:
    return "ds4_reference" if p.type.endswith("&") else "ds4_pointer"


def built_in(p: Param) -> str:
    if p.attribute in SCALARS:
        return f"{p.type}({BUILT_INS[SCALARS[p.attribute]]})"
    triple = BUILT_INS[generate.VECTORS[p.attribute]]
    parts = "xyz"[: int(p.type[-1]) if p.type[-1].isdigit() else 1]
    return f"{p.type}({', '.join(f'{triple}.{c}' for c in parts)})"


def entry(k: Kernel) -> str:
    """The __global__ function of an exported kernel, on one line."""
    takes, gives = [], []
    for p in k.params:
        if by_value(p):
            takes.append(f"const __grid_constant__ {struct_name(p)} p{p.index}")
            gives.append(f"p{p.index}")
        elif p.attribute == "buffer":
            takes.append(f"void* p{p.index}")
            gives.append(f"{any_kind(p)}{{p{p.index}}}")
        elif p.attribute == "threadgroup":
            takes.append(f"unsigned t{p.index}")
            gives.append(f"{any_kind(p)}{{ds4_threadgroup + t{p.index}}}")
        else:
            gives.append(built_in(p))
    shared = (
        "extern __shared__ __align__(16) char ds4_threadgroup[]; "
        if any(p.attribute == "threadgroup" for p in k.params)
        else ""
    )
    call = f"{k.function}<{k.arguments}>" if k.arguments else k.function
    only = f"ds4_{k.host}"
    return (f'extern "C" __global__ void __launch_bounds__(DS4_THREADS, DS4_BLOCKS) {only}({", ".join(takes)}) '
            f"{{ {shared}{call}({', '.join(gives)}); }}")  # fmt: skip


def translate(code: str) -> str:
    code = re.sub(r"\b(?:device|threadgroup|thread)\b", lambda m: " " * len(m[0]), code)
    code = re.sub(r"\bconstant\b", "const   ", code)
    code = generate.ATTRIBUTE.sub(generate.blank, code)
    code = re.sub(r"\bconst\s+const\b", "const", code)
    return re.sub(r"\bkernel\b", "DS4_KERNEL", code)


def family(text: Text) -> tuple[str, list[Kernel]]:
    code = generate.without_comments(text.body)
    kernels = generate.parse_kernels(text, code)
    for m in reversed(list(EXPORT.finditer(code))):
        code = code[: m.start()] + "\n" * code.count("\n", m.start(), m.end()) + code[m.end() :]
    out, expected = [], ("", 0)
    for line, origin in zip(translate(code).split("\n"), text.origins, strict=True):
        if origin != expected:
            out.append(f'#line {origin[1]} "{origin[0]}"')
        out.append(line)
        expected = (origin[0], origin[1] + 1)
    for k in kernels:
        out += [f"#if defined(DS4_ALL) || defined(DS4_ONLY_{k.host})", entry(k), "#endif"]
    unset = [f"#ifndef DS4_CONSTANT_{m[3]}\n#define DS4_CONSTANT_{m[3]} 0\n#endif" for m in CONSTANT.finditer(code)]
    prelude = "\n".join(path.read_text(encoding="utf-8") for path in PRELUDE)
    return "\n".join(
        ["// Generated from metal/. Do not edit.", *unset, prelude, "namespace metal {", *out, "}", ""]
    ), kernels


def table(families: list[tuple[str, str, list[Kernel]]]) -> str:
    rows = []
    for i, (_, _, kernels) in enumerate(families):
        for k in kernels:
            params = [(("value" if by_value(p) else p.attribute), p.index) for p in k.params if p.index >= 0]
            text = ", ".join(f"{{Param::{kind}, {index}}}" for kind, index in params)
            rows.append(f'    {{"{k.host}", {i}, {{{text}}}}},\n')
    texts = ",\n".join(f'{{"{name}",\n{generate.literal(text)}}}' for name, text, _ in families)
    return (
        '// Generated from metal/. Do not edit.\n#include "cuda/kernels.h"\nnamespace ds4::cuda {\n'
        "const std::vector<Text>& texts() {\n  static const std::vector<Text> all = {\n"
        f"{texts}}};\n  return all;\n}}\n"
        "const std::vector<Kernel>& kernels() {\n  static const std::vector<Kernel> all = {\n"
        f"{''.join(rows)}  }};\n  return all;\n}}\n}}\n"
    )


def main(arguments: list[str]) -> int:
    out, paths = Path(arguments[0]), [Path(p) for p in arguments[1:]]
    try:
        out.mkdir(parents=True, exist_ok=True)
        families = []
        for path in paths:
            text, kernels = family(generate.load(path, KEPT))
            generate.write(out / f"{path.stem}.cu", text)
            families.append((path.stem, text, kernels))
        generate.write(out / "kernels.cpp", table(families))
        generate.write(out / "sources.cpp", generate.sources_file(paths))
    except Refused as refusal:
        print(f"metal/generate_cuda.py: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
