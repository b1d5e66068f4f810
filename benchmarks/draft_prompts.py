"""Prompts for measuring the drafter: four sets, each twice, with nothing in common.

`tuning` is what the numbers of the controller (src/ds4v41/admission.py) were chosen on, so a gain on it proves little;
`fresh` was written down before any of them was measured. The margin and the prior were chosen after a first look at the
two sets of chats of `fresh`, so it is not blind for these.
"""

from __future__ import annotations

import ast
import inspect
import random
import sys
from types import ModuleType

import ds4v41
from ds4v41.chat import render

REQUESTS = {
    "tuning": (
        "Write a function that checks whether a number is prime.",
        "Write a Python function `word_count(text)` that counts the words in a string.",
        "Write a function that reverses a string.",
        "Write a function that returns the largest number of a list.",
        "Write a function that computes the factorial of a number.",
        "Write a function that checks whether a text is a palindrome.",
        "Write a Python function `fibonacci(n)` that returns the first n Fibonacci numbers.",
        "Write a function that removes duplicates from a list.",
    ),
    "fresh": (
        "Write a function that returns the sum of a list of numbers.",
        "Write a function that counts the vowels in a string.",
        "Write a Python function `gcd(a, b)` that returns the greatest common divisor of two numbers.",
        "Write a function that computes the average of a list.",
        "Write a function that checks whether a year is a leap year.",
        "Write a function that converts Celsius to Fahrenheit.",
        "Write a function that checks whether a number is even.",
        "Write a Python function `flatten(items)` that flattens a list of lists.",
        "Write a function that returns the smallest number of a list.",
        "Write a function that counts how often each word occurs in a text.",
        "Write a function that sorts a list of numbers.",
        "Write a Python function `clamp(x, low, high)` that limits a number to a range.",
        "Write a function that returns the sum of the digits of a number.",
        "Write a function that merges two dictionaries.",
        "Write a function that finds the longest word in a list.",
        "Write a function that checks whether two strings are anagrams.",
    ),
}
_SEEDS = {"tuning": 1, "fresh": 2}
_FIRST = {"tuning": 600, "fresh": 1050}  # tokens into a file; prompts of 256 lie 900 apart
NAMES = ("library code", "docstring chats", "template chats", "random tokens")


def library_code(model: ds4v41.Model, n: int, part: str) -> list[list[int]]:
    """Beginnings of methods in the middle of a source file that the model was not trained on."""
    import sortedcontainers.sorteddict
    import sortedcontainers.sortedlist
    import sortedcontainers.sortedset

    modules = (sortedcontainers.sortedlist, sortedcontainers.sorteddict, sortedcontainers.sortedset)
    prompts = []
    for i in range(n):
        ids = model.tokenizer.encode(inspect.getsource(modules[i % len(modules)]), add_bos=True)
        start = _FIRST[part] + 900 * (i // len(modules))
        if len(ids) < start + 256:
            raise ValueError(f"library code: expected at most {i} prompts, found {n}; the files are not longer")
        prompts.append([ids[0], *ids[start : start + 256]])
    return prompts


def docstring_chats(model: ds4v41.Model, n: int, part: str) -> list[list[int]]:
    """Requests made of functions that the model has not seen."""
    import sortedcontainers.sorteddict
    import sortedcontainers.sortedlist
    import sortedcontainers.sortedset

    if part == "tuning":
        functions = _documented(sortedcontainers.sortedlist)
    else:
        functions = _documented(sortedcontainers.sorteddict) + _documented(sortedcontainers.sortedset)
    prompts = []
    for f in functions[:: max(1, len(functions) // n)][:n]:
        names = ", ".join(a.arg for a in f.args.args if a.arg != "self")
        summary = str(ast.get_docstring(f)).split("\n")[0]
        prompts.append(chat(model, f"Write `{f.name}({names})`: {summary}"))
    return prompts


def _documented(module: ModuleType) -> list[ast.FunctionDef]:
    tree = ast.parse(inspect.getsource(module))
    return [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and ast.get_docstring(f)]


def chat(model: ds4v41.Model, text: str) -> list[int]:
    prompt = render([{"role": "user", "content": text}], thinking=False)
    return [int(t) for t in prompt.encode(model.tokenizer)]


def prompt_sets(model: ds4v41.Model, n: int, part: str) -> dict[str, list[list[int]]]:
    """At most n prompts a set; part: "tuning" or "fresh"."""
    rng = random.Random(_SEEDS[part])
    sets = {
        "template chats": [chat(model, text) for text in REQUESTS[part][:n]],
        "random tokens": [[0, *(rng.randrange(8, 4079) for _ in range(64))] for _ in range(n)],
    }
    try:
        return {"library code": library_code(model, n, part), "docstring chats": docstring_chats(model, n, part)} | sets
    except ImportError:
        print("sortedcontainers is not installed: its two sets are left out", file=sys.stderr)
        return sets
