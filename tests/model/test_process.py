"""The library in a process of its own: start-up times, a clean exit, garbage collection, spawned processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from .support import environment, python

TIMES = """
import json, time
begin = time.perf_counter()
import ds4v41
imported = time.perf_counter() - begin
with ds4v41.Model.open() as model, model.session() as session:
    piece = next(session.generate("def add(a, b):", max_tokens=4, temperature=0))
print(json.dumps([imported, time.perf_counter() - begin, piece.token]))
"""


def test_import_and_first_token_are_quick() -> None:
    """Import below 0.3 s, first token of the nano model below 1.5 s; the best of five, for the machine may be busy."""
    runs = []
    for _ in range(5):
        done = python(TIMES)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
        if runs[-1][0] < 0.3 and runs[-1][1] < 1.5:
            break
    assert min(run[0] for run in runs) < 0.3, runs
    assert min(run[1] for run in runs) < 1.5, runs


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, ds4v41; print([m for m in ('numpy', 'tokenizers', 'gguf', 'rich', 'asyncio') if m in sys.modules])"
    )
    assert python(code).stdout == "[]\n"


EXITS = {
    "everything closed": "with ds4v41.Model.open() as m, m.session() as s: s.prefill([5, 6])",
    "nothing closed": "m = ds4v41.Model.open(); s = m.session(); s.prefill([5, 6]); k = s.mark()",
    "a generation half-way": "s = ds4v41.Model.open().session(); g = s.generate('def', max_tokens=9); next(g)",
    "a chat half-way": (
        "s = ds4v41.Model.open().session()\n"
        "g = s.chat([{'role': 'user', 'content': 'x'}], max_tokens=9, stream=True); next(g)"
    ),
    "a cached model": (
        "import functools\n"
        "@functools.cache\n"
        "def model(): return ds4v41.Model.open()\n"
        "s = model().session(); s.prefill([5, 6])"
    ),
    "a kept exception": (
        "s = ds4v41.Model.open().session()\ntry: s.prefill([99999])\nexcept ds4v41.TokenError as error: kept = error"
    ),
    "a cycle": "s = ds4v41.Model.open().session(); s.me = s; s.hook = lambda: s",
    "a sampler": "from ds4v41.sampling import *; p = Sampler(SamplingParams(), 10); h = p.new_history([1])",
    "a thread that ended": (
        "import threading\n"
        "s = ds4v41.Model.open().session()\n"
        "t = threading.Thread(target=s.prefill, args=([5, 6],)); t.start(); t.join()"
    ),
    "the hook of another module": "import sys; s = ds4v41.Model.open().session(); sys.kept = s; s.prefill([5])",
}


@pytest.mark.parametrize("name", EXITS)
def test_a_clean_exit(name: str) -> None:
    """Nothing on stderr (nanobind tells of leaks there), whatever is alive at the end."""
    done = python(f"import ds4v41\n{EXITS[name]}\nprint('end')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_session_that_a_callback_keeps_alive_is_collected() -> None:
    code = """
import gc, weakref
import ds4v41
model = ds4v41.Model.open()
session = model.session()
session.prefill([5, 6])
session.me = session
gone = weakref.ref(session)
del session
gc.collect()
assert gone() is None
print("gone")
"""
    done = python(code)
    assert (done.stdout, done.stderr) == ("gone\n", "")


def test_models_in_spawned_processes() -> None:
    code = """
import multiprocessing as mp

def work(seed):
    import ds4v41
    with ds4v41.Model.open(threads=1) as model, model.session() as session:
        return session.generate("def add(a, b):", max_tokens=6, temperature=1, seed=seed).finish().tokens

if __name__ == "__main__":
    print(work(3) == mp.get_context("spawn").Pool(1).apply(work, (3,)))
"""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "spawned.py"
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, env=environment(), timeout=120, check=False
        )
    assert done.stdout == "True\n", done.stderr


def report() -> Any:
    """Times of five starts: [import, first token, token]."""
    return [json.loads(python(TIMES).stdout) for _ in range(5)]


if __name__ == "__main__":
    print(report())
