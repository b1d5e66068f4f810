"""Translates the kernels of this folder for the stand-in, and embeds their text for Metal. Run by CMake.

    generate.py OUTPUT_FOLDER FILE.metal...          one C++ file a family for the stand-in; registry.cpp, sources.cpp
    generate.py --embed OUTPUT_FOLDER FILE.metal...  only sources.cpp
    generate.py --lint OUTPUT_FOLDER FILE.metal...   one C++ file a family for clang with address spaces

Newlines are never removed and every piece of text says where it came from, so compilers and reports name lines of the
.metal files.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect
from dataclasses import dataclass, field
from pathlib import Path

import rules

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[ \t]*$', re.MULTILINE)
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
ATTRIBUTE = re.compile(r"\[\[[^\]]*\]\]")
KERNEL = re.compile(r"(template\s*<[^>]*>\s*)?\bkernel\s+void\s+(\w+)\s*\(")
EXPORT = re.compile(r'\bEXPORT_KERNEL\s*\(\s*"(\w+)"\s*,\s*(\w+)\s*(?:,\s*(.*?))?\)\s*;')
CONSTANT = re.compile(r"\bFUNCTION_CONSTANT\s*\(\s*(\w+)\s*,\s*(\w+)\s*,\s*(\d+)\s*\)")
PARAM = re.compile(
    r"^(?P<type>.*?)(?P<name>\w+)\s*\[\[\s*(?P<attribute>\w+)\s*(?:\(\s*(?P<index>\d+)\s*\))?\s*\]\]$", re.DOTALL
)
BLOCK = re.compile(r"\b(\w+)\s*(?:\([^;{}]*\)\s*(?:const\s*)?|(?::[^;{}()]*)?)\{")
DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)((?:\\\n|[^\n])*)", re.MULTILINE)
WORD = re.compile(r"[A-Za-z_]\w*")
SYNC = re.compile(
    r"^(threadgroup_barrier|simdgroup_barrier|simd_(shuffle|broadcast|ballot|all|any|sum|min|max|or|and|prefix)\w*)$"
)
SCALARS = {
    "thread_index_in_threadgroup": "index",
    "thread_index_in_simdgroup": "lane",
    "simdgroup_index_in_threadgroup": "simd",
    "simdgroups_per_threadgroup": "n_simd",
}
VECTORS = {
    "thread_position_in_grid": "in_grid",
    "thread_position_in_threadgroup": "in_group",
    "threadgroup_position_in_grid": "group",
    "threads_per_threadgroup": "group_size",
    "threadgroups_per_grid": "groups",
    "threads_per_grid": "grid",
}
CONSTANT_TYPES = {"bool": "boolean", "int": "i32", "uint": "u32", "float": "f32"}
HERE = Path(__file__).resolve().parent
KEPT = ("compat.h",)  # has a branch for each compiler


class Refused(Exception):
    """A kernel file breaks a rule."""


@dataclass
class Param:
    name: str
    type: str
    attribute: str
    index: int


@dataclass
class Kernel:
    host: str
    function: str
    arguments: str  # of the template
    params: list[Param]
    offset: int  # where its glue goes, -1: the end
    synchronises: bool = True
    constants: int = 0  # bit i: it can reach the function constant of index i


@dataclass
class Text:
    """A .metal file with its includes in place, and the file and line of each of its own lines."""

    path: Path
    body: str = ""
    origins: list[tuple[str, int]] = field(default_factory=list)


def blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def without_comments(text: str) -> str:
    return COMMENT_OR_STRING.sub(lambda m: m[0] if m[0].startswith('"') else blank(m), text)


def label(path: Path) -> str:
    """How reports name a file: with its folder."""
    return f"{path.resolve().parent.name}/{path.name}"


def flatten(path: Path, seen: set[Path], origins: list[tuple[str, int]], keep: tuple[str, ...]) -> list[str]:
    """Lines with every quoted include replaced by its file, each file once."""
    seen.add(path)
    lines: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        found = INCLUDE.match(line)
        if not found:
            lines.append("" if re.match(r"\s*#\s*pragma\s+once", line) else line)
            origins.append((label(path), number))
            continue
        target = next((p for p in (path.parent / found[1], HERE / found[1]) if p.is_file()), None)
        if target is None:
            raise Refused(f"{label(path)}:{number}: includes {found[1]}, which is not in this folder")
        if target.name not in keep and target not in seen:
            lines += flatten(target, seen, origins, keep)
    return lines


def load(path: Path, keep: tuple[str, ...] = ()) -> Text:
    text = Text(path)
    lines = flatten(path, set(), text.origins, keep)
    text.body = "\n".join(lines)
    return text


def where(text: Text, offset: int) -> str:
    name, line = text.origins[text.body.count("\n", 0, offset)]
    return f"{name}:{line}"


def closing(text: str, start: int, pair: str) -> int:
    """Offset of the bracket that closes the one at start."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    raise Refused(f"unbalanced {pair}")


def split_params(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([<") - (c in ")]>")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [p for p in (*parts, text[start:]) if p.strip()]


def parse_param(part: str, at: str) -> Param:
    found = PARAM.match(part.strip())
    if not found:
        raise Refused(f"{at}: kernel parameter '{' '.join(part.split())}' needs one name and one [[attribute]]")
    kind, attribute = " ".join(found["type"].split()), found["attribute"]
    index = -1 if found["index"] is None else int(found["index"])
    if attribute in ("buffer", "threadgroup"):
        if index < 0 or index > 30:
            raise Refused(f"{at}: parameter '{found['name']}': [[{attribute}(n)]] needs a literal n of 0 to 30")
        space = re.search(r"\b(device|constant|threadgroup)\b", kind)
        if not space or (attribute == "threadgroup") != (space[1] == "threadgroup") or kind[-1] not in "*&":
            raise Refused(f"{at}: parameter '{found['name']}' of type '{kind}' does not fit [[{attribute}]]")
    elif attribute not in SCALARS and attribute not in VECTORS:
        raise Refused(f"{at}: parameter '{found['name']}': unknown attribute [[{attribute}]]")
    elif kind not in ("uint", "ushort") and (attribute in SCALARS or kind not in ("uint2", "uint3")):
        raise Refused(f"{at}: built-in '{found['name']}' is a '{kind}'; use uint, ushort, uint2 or uint3")
    return Param(found["name"], kind, attribute, index)


def parse_kernels(text: Text, code: str) -> list[Kernel]:
    functions: dict[str, tuple[bool, list[Param]]] = {}
    for found in KERNEL.finditer(code):
        at = f"{where(text, found.start(2))}, kernel {found[2]}"
        end = closing(code, found.end() - 1, "()")
        params = [parse_param(p, at) for p in split_params(code[found.end() : end])]
        indices = [(p.attribute, p.index) for p in params if p.index >= 0]
        if len(set(indices)) != len(indices):
            raise Refused(f"{at}: two parameters share an index")
        if found[2] in functions:
            raise Refused(f"{at}: kernels cannot be overloaded")
        functions[found[2]] = (found[1] is not None, params)
    kernels = [Kernel(name, name, "", params, -1) for name, (template, params) in functions.items() if not template]
    for found in EXPORT.finditer(code):
        if found[2] not in functions:
            raise Refused(f"{where(text, found.start())}: EXPORT_KERNEL of {found[2]}, which is no kernel of this file")
        kernels.append(Kernel(found[1], found[2], found[3] or "", functions[found[2]][1], found.start()))
    names = [k.host for k in kernels]
    for name in names:
        if names.count(name) > 1:
            raise Refused(f"{label(text.path)}: two kernels are exported as {name}")
    return kernels


def mark_what_is_reached(code: str, kernels: list[Kernel]) -> None:
    """Does a function or type that a kernel can reach name a barrier, a simdgroup operation, a function constant?"""
    # An attribute or a macro in front of a function may have arguments in parentheses, as the function has.
    bodies = DEFINE.sub(blank, ATTRIBUTE.sub(blank, code))
    mentions: dict[str, set[str]] = {}
    for found in BLOCK.finditer(bodies):
        end = closing(bodies, found.end() - 1, "{}")
        mentions.setdefault(found[1], set()).update(WORD.findall(bodies[found.start() : end]))
    for macro in DEFINE.finditer(code):
        mentions.setdefault(macro[1], set()).update(WORD.findall(macro[2]))
    for kernel in kernels:
        todo, reached = [kernel.function, *WORD.findall(kernel.arguments)], set()
        while todo:
            word = todo.pop()
            if word not in reached:
                reached.add(word)
                todo += mentions.get(word, ())
        kernel.synchronises = any(SYNC.match(word) for word in reached)
        kernel.constants = sum(1 << int(m[3]) for m in CONSTANT.finditer(code) if m[2] in reached)


def argument(p: Param) -> str:
    if p.attribute == "buffer":
        kind = "Reference" if p.type.endswith("&") else "Pointer"
        return f"::ds4::standin::Any{kind}{{p.buffer[{p.index}]}}"
    if p.attribute == "threadgroup":
        kind = "Reference" if p.type.endswith("&") else "Pointer"
        return f"::ds4::standin::Any{kind}{{p.threadgroup[{p.index}]}}"
    if p.attribute in SCALARS:
        return f"static_cast<{p.type}>(t.{SCALARS[p.attribute]})"
    return f"::ds4::standin::Built{{t.{VECTORS[p.attribute]}}}"


def param_kind(p: Param) -> str:
    if p.attribute == "threadgroup":
        return "threadgroup"
    if re.search(r"\bconstant\b", p.type):
        return "constant"
    return "device_read" if re.search(r"\bconst\b", p.type.split("*")[0]) else "device_write"


def glue(k: Kernel) -> str:
    """One line: the call with arguments from the launch, and the layout of what the parameters point to."""
    call = f"{k.function}<{k.arguments}>" if k.arguments else k.function
    rows = []
    for i, p in enumerate(k.params):
        if p.index >= 0:
            layout = f"::ds4::standin::param_layout({call}, {i})"
            reference = "true" if p.type.endswith("&") else "false"
            rows.append(
                f'{{"{p.name}", ::ds4::standin::ParamKind::{param_kind(p)}, {p.index}, {reference}, '
                f"{layout}.size, {layout}.alignment}}"
            )
    table = ", ".join(rows) or "{}"
    arguments = ", ".join(argument(p) for p in k.params)
    return (f"DS4_THUNK void ds4_thunk_{k.host}(const ::ds4::standin::Pointers& p, const ::ds4::standin::Place& t) "
            f"{{ (void)p, (void)t; {call}({arguments}); }} "
            f"static const ::ds4::standin::Param ds4_params_{k.host}[] = {{{table}}};")  # fmt: skip


def translate(code: str) -> str:
    """Address spaces away, attributes away; the same columns."""

    def word(match: re.Match[str]) -> str:
        return {"device": "      ", "threadgroup": "           ", "thread": "      ", "constant": "const   "}[match[0]]

    pieces, last = [], 0
    for string in re.finditer(r'"(?:\\.|[^"\\\n])*"', code):
        pieces += [re.sub(r"\b(device|threadgroup|thread|constant)\b", word, code[last : string.start()]), string[0]]
        last = string.end()
    pieces.append(re.sub(r"\b(device|threadgroup|thread|constant)\b", word, code[last:]))
    code = ATTRIBUTE.sub(blank, "".join(pieces))
    return re.sub(r"\bkernel\b", "DS4_KERNEL", code)


def check_rules(text: Text, code: str) -> None:
    shared = {f"metal/{name}" for name in (*KEPT, "numerics.h")}  # for every compiler: types that are no kernel's
    n_before = [0]
    for i, c in enumerate(code):
        if c == "\n":
            n_before.append(i + 1)

    def own(offset: int) -> bool:
        return text.origins[bisect(n_before, offset) - 1][0] not in shared

    problems = [f"{where(text, offset)}: {why}" for offset, why in rules.check(code, own, closing)]
    if problems:
        raise Refused("\n".join(problems))


def lint_source(text: Text) -> str:
    """The text as it stands, for clang: attributes blanked, compat.h has the rest."""
    code = without_comments(text.body)
    check_rules(text, code)
    parse_kernels(text, code)
    code = re.sub(r"\bkernel\b", "      ", ATTRIBUTE.sub(blank, code))
    return "\n".join(['#include "msl_lint.h"', *with_lines(code.split("\n"), text.origins)]) + "\n"


def with_lines(lines: list[str], origins: list[tuple[str, int]]) -> list[str]:
    """The lines, with #line wherever the next one is not the next one of the same file."""
    out, expected = [], ("", 0)
    for line, origin in zip(lines, origins, strict=True):
        if origin != expected:
            out.append(f'#line {origin[1]} "{origin[0]}"')
        out.append(line)
        expected = (origin[0], origin[1] + 1)
    return out


def family_source(text: Text) -> str:
    """The C++ file of one family; the macro DS4_FAMILY names what it defines (one name a build of it)."""
    family = text.path.stem
    code = without_comments(text.body)
    check_rules(text, code)
    kernels = parse_kernels(text, code)
    mark_what_is_reached(code, kernels)
    spans = [(m.start(), m.end(), m[1]) for m in EXPORT.finditer(code)]
    by_host = {k.host: k for k in kernels}
    for start, end, host in reversed(spans):
        code = code[:start] + f"@{host}@" + "\n" * code.count("\n", start, end) + code[end:]
    lines = [re.sub(r"@(\w+)@", lambda m: glue(by_host[m[1]]), line) for line in translate(code).split("\n")]
    out = with_lines(lines, text.origins)
    out += [glue(k) for k in kernels if k.offset < 0]
    constants = []
    for found in CONSTANT.finditer(code):
        if int(found[3]) > 31:
            raise Refused(f"{label(text.path)}: function constant {found[2]}: indices are 0 to 31 here")
        if found[1] not in CONSTANT_TYPES:
            raise Refused(
                f"{label(text.path)}: function constant {found[2]} is a {found[1]}; use bool, int, uint, float"
            )
        constants.append(
            f'{{"{found[2]}", {found[3]}, ::ds4::standin::ConstantType::{CONSTANT_TYPES[found[1]]}, &{found[2]}}}'
        )
    rows = [f'{{"{k.host}", ds4_params_{k.host}, {sum(p.index >= 0 for p in k.params)}, '
            f"{'true' if k.synchronises else 'false'}, {k.constants}u, ds4_thunk_{k.host}}}"
            for k in kernels]  # fmt: skip
    return "\n".join([
        "// Generated from metal/. Do not edit.",
        '#include "metal_standin/kernel/msl.h"',
        f"namespace ds4_msl_{family} {{ namespace {{", "using namespace metal;", *out,
        f"const ::ds4::standin::Kernel ds4_kernels[] = {{{', '.join(rows) or '{}'}}};",
        f"const ::ds4::standin::FunctionConstant ds4_constants[] = {{{', '.join(constants) or '{}'}}};",
        "} }", "namespace ds4::standin {", "extern const Family DS4_FAMILY;",
        f'const Family DS4_FAMILY = {{"{family}", ds4_msl_{family}::ds4_kernels, {len(rows)}, '
        f"ds4_msl_{family}::ds4_constants, {len(constants)}}};", "}", ""])  # fmt: skip


def literal(text: str) -> str:
    """A C++ string, in pieces that every compiler takes."""
    pieces = [text[i : i + 8000] for i in range(0, len(text), 8000)]
    return "\n".join(f'R"~DS4~({piece})~DS4~"' for piece in pieces)


def embedded(path: Path) -> str:
    """The text that Metal compiles: all includes in place, lines named."""
    text = load(path)
    return "\n".join(with_lines(text.body.split("\n"), text.origins)) + "\n"


def sources_file(paths: list[Path]) -> str:
    items = ",\n".join(f'{{"{p.stem}",\n{literal(embedded(p))}}}' for p in paths)
    return ('// Generated from metal/. Do not edit.\n#include "metal_host/sources.h"\nnamespace ds4::metal {\n'
            f"const Source kSources[] = {{\n{items or '{}'}}};\n"
            f"const int kSourceCount = {len(paths)};\n}}\n")  # fmt: skip


def registry_file(paths: list[Path]) -> str:
    declared = "".join(
        f"extern const Family k_{p.stem}_fast;\nextern const Family k_{p.stem}_checked;\n" for p in paths
    )
    rows = "".join(f"    {{&k_{p.stem}_fast, DS4_CHECKED(k_{p.stem}_checked), metal::kSources[{i}].text}},\n"
                   for i, p in enumerate(paths))  # fmt: skip
    return ("// Generated from metal/. Do not edit.\n"
            '#include "metal_host/sources.h"\n#include "metal_standin/registry.h"\n'
            "#if DS4_STANDIN_HAS_CHECKED\n#define DS4_CHECKED(x) &x\n#else\n#define DS4_CHECKED(x) nullptr\n#endif\n"
            f"namespace ds4::standin {{\n{declared}const std::vector<Compiled>& compiled() {{\n"
            f"  static const std::vector<Compiled> all = {{\n{rows}  }};\n  return all;\n}}\n}}\n")  # fmt: skip


def write(path: Path, text: str) -> None:
    """Only when it differs, so that nothing is compiled again without need."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    mode = arguments.pop(0) if arguments[0].startswith("--") else ""
    out, paths = Path(arguments[0]), [Path(p) for p in arguments[1:]]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if mode != "--embed":
            translate_one = lint_source if mode == "--lint" else family_source
            for path in paths:
                write(out / f"{path.stem}.cpp", translate_one(load(path, KEPT)))
        if mode != "--lint":
            write(out / "sources.cpp", sources_file(paths))
        if not mode:
            write(out / "registry.cpp", registry_file(paths))
    except Refused as refusal:
        print(f"metal/generate.py: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
