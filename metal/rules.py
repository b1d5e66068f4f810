"""The rules of docs/metal.md that a compiler does not check, or that only Apple's would."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Problem = tuple[int, str]  # offset in the text, what is wrong

FORBIDDEN = {
    "double": "there is no double on the GPU",
    "goto": "goto is not in the kernel language",
    "union": "use as_type",
    "std": "the standard library is not in the kernel language",
    "asm": "no assembler", "new": "no allocation", "delete": "no allocation", "virtual": "no virtual functions",
    "try": "no exceptions", "catch": "no exceptions", "throw": "no exceptions", "dynamic_cast": "no casts at run time",
    "printf": "no output", "volatile": "use atomics", "thread_local": "no such storage",
    "host_name": "export with EXPORT_KERNEL",
}  # fmt: skip
VECTOR = r"(?:float|half|int|uint|short|ushort|char|uchar)[234]"
LITERAL = "a float literal needs the suffix f"
SPACES = r"\b(?:device|constant|threadgroup|thread)\b"
TYPES = (r"(?:(?:float|half|int|uint|short|ushort|char|uchar)[234]?|u?int(?:8|16|32|64)_t|u?long|bool|void|auto|size_t|"
         r"packed_float3|atomic_u?int)")  # fmt: skip
OFF_GRAMMAR = [
    (re.compile(r"\blong\s+long\b"), "use long, which has 64 bits"),
    (re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE][-+]?\d))(?:[eE][-+]?\d+)?(?![\w.])"), LITERAL),
    (re.compile(rf"\(\s*{VECTOR}\s*\)\s*[\w(]"), "convert vectors as float4(v)"),
    (re.compile(r"\[\s*[=&]?\s*\]\s*\("), "no lambdas"),
    (re.compile(r"\bthreadgroup\s+(?:const\s+)?\w+\s+\w+\s*\["), "threadgroup memory comes through parameters"),
    (re.compile(r"\[\s*\w+\s*\.\.\."), "no ranges in initialisers"),
    (re.compile(r"\(\s*\*\s*\w+\s*\)\s*\("), "no function pointers"),
    (re.compile(r"\bkernel\b(?!\s+void\s+\w+\s*\()"), "kernels are written 'kernel void name('"),
]  # fmt: skip
FUNCTION = re.compile(r"\b(\w+)\s*\(")
BODY = re.compile(r"\s*(?:const\s*)?\{")
CALL = re.compile(r"(?<![.>])\b(\w+)\s*(?:<[\w\s,:]*>)?\s*\(")
NOT_FUNCTIONS = {"if", "for", "while", "switch", "return", "sizeof"}


def check(code: str, own: Callable[[int], bool], closing: Callable[[str, int, str], int]) -> list[Problem]:
    """Problems in code without comments; `own` says which offsets are to be checked."""
    found = [*_words(code), *_patterns(code), *_spaces(code), *_functions(code, closing)]
    return sorted(p for p in found if own(p[0]))


def _words(code: str) -> Iterator[Problem]:
    for match in re.finditer(r"(?<!\")\b(" + "|".join(FORBIDDEN) + r")\b", code):
        yield match.start(), f"'{match[1]}': {FORBIDDEN[match[1]]}"


def _patterns(code: str) -> Iterator[Problem]:
    for pattern, why in OFF_GRAMMAR:
        for match in pattern.finditer(code):
            yield match.start(), f"'{' '.join(match[0].split())}': {why}"


def _spaces(code: str) -> Iterator[Problem]:
    """Pointers and references without an address space, which Apple's compiler refuses."""
    own = "|".join(set(re.findall(r"\b(?:struct|typename|class)\s+(\w+)", code)) | {"float"})
    for match in re.finditer(rf"\b(?:{TYPES}|{own})\b(?:\s*<[\w\s,]*>)?(?:\s+const)?\s*[*&](?![&=])", code):
        start = max(code.rfind(c, 0, match.start()) for c in "(,;{}<>:\n")
        if not re.search(SPACES, code[start + 1 : match.end()]):
            yield (
                match.start(),
                f"'{' '.join(match[0].split())}': every pointer and reference names its address space, thread too",
            )


def _functions(code: str, closing: Callable[[str, int, str], int]) -> Iterator[Problem]:
    """Recursion and static locals."""
    calls: dict[str, set[str]] = {}
    starts: dict[str, int] = {}
    for match in FUNCTION.finditer(code):
        opened = BODY.match(code, closing(code, match.end() - 1, "()") + 1)
        if match[1] in NOT_FUNCTIONS or not opened:
            continue
        body = code[opened.end() : closing(code, opened.end() - 1, "{}")]
        for static in re.finditer(r"\bstatic\b", body):
            yield opened.end() + static.start(), "no static variables inside functions"
        starts.setdefault(match[1], match.start())
        calls.setdefault(match[1], set()).update(CALL.findall(body))
    for name in calls:
        todo, reached = list(calls[name]), set()
        while todo:
            word = todo.pop()
            if word in calls and word not in reached:
                reached.add(word)
                todo += calls[word]
        if name in reached:
            yield starts[name], f"'{name}' calls itself: no recursion (give overloads names of their own)"
