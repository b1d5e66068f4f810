"""fork() and the end of the interpreter, with reads in flight: nothing hangs, nothing crashes."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import os, sys, threading, time
import numpy as np
import ds4v41
from tests.engram.test_session import TOKENS, nano
"""


def run(program: str) -> str:
    """Run a program in a new interpreter; it has 60 seconds."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("threads", [1, 12])
def test_the_interpreter_ends_with_reads_in_flight(threads: int) -> None:
    program = f"""
model = nano({{"delay": 0.2}}, cache=0, threads={threads})
session = model.session(256, chunk=16)
session._ext.expect(TOKENS[20:36])
threading.Timer(0.1, session.cancel).start()
try:
    session.prefill(TOKENS)
except ds4v41.Cancelled:
    print("cancelled")
request = model._handle().engram.request(0, np.arange(0, 2000, 50))
time.sleep(0.01)
print("bye")
"""
    assert run(program) == "cancelled\nbye\n"


def test_the_interpreter_ends_while_a_daemon_thread_waits_for_rows() -> None:
    program = """
model = nano({"delay": 0.2}, cache=0, threads=2)
session = model.session(256)
threading.Thread(target=lambda: session.prefill(TOKENS), daemon=True).start()
time.sleep(0.1)
print("bye", flush=True)

"""
    assert run(program) == "bye\n"


def test_a_forked_child_reads_by_itself() -> None:
    """The child has no reading threads; requests, and what was read ahead, are the parent's."""
    program = """
model = nano({"delay": 1e-3}, cache=1 << 20, threads=4)
session = model.session(256, chunk=16)
session.prefill(TOKENS[:16])
want = nano(mode="ram").session(256).prefill(TOKENS[:48], logits="all")
session._ext.expect(TOKENS[32:48])
session._ext.run(TOKENS[16:32], "none")
child = os.fork()
rows = session.prefill(TOKENS[32:48], logits="all")
assert np.array_equal(rows, want[32:48])
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("both")
session.close(); model.close()
"""
    assert run(program) == "both\n"


def test_forks_while_other_threads_read() -> None:
    """Locks may be held at the moment of the fork; a child that opens nothing new still comes to its end."""
    program = """
model = nano({"jitter": 2e-3}, cache=1 << 20, threads=4)
stop = False
def work(i):
    with model.session(256, chunk=9 + i) as session:
        while not stop:
            session.prefill(TOKENS[:40]); session.truncate(0)
workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
for worker in workers: worker.start()
mine = model.session(64)
want = mine.prefill(TOKENS[:20], logits="all")
bad = 0
for _ in range(15):
    time.sleep(0.007)
    child = os.fork()
    if child == 0:
        mine.truncate(0)
        same = np.array_equal(mine.prefill(TOKENS[:20], logits="all"), want)
        os._exit(0 if same else 1)
    for _ in range(1000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done: break
        time.sleep(0.01)
    else:
        os.kill(child, 9); os.waitpid(child, 0); status = 99
    bad += status != 0
stop = True
for worker in workers: worker.join()
print("bad", bad)
"""
    assert run(program) == "bad 0\n"
