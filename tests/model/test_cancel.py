"""Stopping at any moment: cancel() from another thread, closed iterators, cancelled tasks, Ctrl-C. The session stays
valid, with the bits of one that was never stopped."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from ds4v41 import Cancelled, Progress, Session, StateError

from .support import Stepped, environment, live, nano, tokens_of

N = 160
CHUNK = 24
PROMPT = "def add(a, b):"


@cache
def oracle() -> Stepped:
    """Nano, stepped through 160 tokens."""
    return Stepped(nano(), tokens_of(4, N, 4000), context=512)


@pytest.fixture(scope="module", autouse=True)
def _forget() -> object:
    yield
    oracle.cache_clear()


def assert_valid(session: Session) -> None:
    """A prefix of the oracle's tokens, with its bits."""
    assert session.tokens == oracle().ids[: session.position].tolist()
    session.mark()  # stopped inside a long prefill, it has not computed the decoder's rows yet
    assert live(session) == oracle().states[session.position]


def stopped_after(seconds: float, stop: Callable[[], object], work: Callable[[], object]) -> bool:
    """Run `work`, with `stop` called from another thread after a while. Was it cancelled?"""
    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        work()
    except Cancelled:
        return True
    finally:
        timer.cancel()
        timer.join()
    return False


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes undisturbed: cancelling within that time hits about every second call, on any machine."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Hits:
    """Counts hits, and gives n turns, and more, up to ten times as many, until there are enough of them: how busy the
    machine is changes when things happen."""

    def __init__(self, n: int, enough: int) -> None:
        self.n, self.enough, self.found = n, enough, 0

    def __iter__(self) -> Iterator[int]:
        for i in range(10 * self.n):
            if i >= self.n and self.found >= self.enough:
                return
            yield i
        assert self.found >= self.enough


# ---- threads -------------------------------------------------------------------------------------------------------


def test_prefill_cancelled_at_random_moments() -> None:
    """200 times: whole chunks stay, the one in progress leaves no trace."""
    rng = random.Random(1)
    ids, hits = oracle().ids, Hits(200, 40)
    with nano().session(context=512, chunk=CHUNK, retain=0) as session:
        took = seconds_of(lambda: session.prefill(ids[:N], logits=None))
        session.rewind(0)
        for _ in hits:
            if session.position > 100:
                session.rewind(rng.choice([0, 1, 17]))
            start = session.position
            end = rng.randint(start + 1, N)
            hits.found += stopped_after(
                rng.uniform(0, took / 2), session.cancel, lambda a=start, b=end: session.prefill(ids[a:b], logits=None)
            )
            assert session.position == end or (session.position - start) % CHUNK == 0
            assert_valid(session)
        at = session.position // 2
        session.rewind(at)
        assert session.step([int(ids[at])]).tobytes() == oracle().rows[at].tobytes()


def test_steps_cancelled_at_random_moments() -> None:
    rng = random.Random(2)
    ids, hits = oracle().ids, Hits(60, 5)
    with nano().session(context=512, retain=0) as session:
        took = seconds_of(lambda: session.step(ids[:8]))
        session.truncate(0)
        for _ in hits:
            at = session.position
            if at + 8 > N:
                session.truncate(0)
                continue
            n = rng.randint(1, 8)
            hit = stopped_after(rng.uniform(0, took), session.cancel, lambda a=at, n=n: session.step(ids[a : a + n]))
            hits.found += hit
            assert session.position == (at if hit else at + n)
            assert_valid(session)


def test_generation_cancelled_at_random_moments() -> None:
    rng, hits = random.Random(3), Hits(40, 10)
    with nano().session(context=512, chunk=CHUNK) as session:
        started = time.perf_counter()
        want = session.generate(PROMPT, max_tokens=12, temperature=1, seed=5).finish()
        took = time.perf_counter() - started
        for _ in hits:
            session.rewind(min(session.position, rng.choice([0, 1, 3])))
            running = session.generate(PROMPT, max_tokens=12, temperature=1, seed=5)
            hit = stopped_after(rng.uniform(0, took), rng.choice([session.cancel, running.close]), running.finish)
            result = running.result
            assert want.tokens[: len(result.tokens)] == result.tokens
            assert want.text.startswith(result.text)
            assert (result.finish_reason == "cancelled") >= hit
            hits.found += result.finish_reason == "cancelled"
        again = session.generate(PROMPT, max_tokens=12, temperature=1, seed=5).finish()
    assert (again.text, again.tokens) == (want.text, want.tokens)


def test_close_in_another_thread_stops_a_prefill() -> None:
    """Closing the iterator is enough, also while the prompt is being read."""
    with nano().session(context=4000, chunk=32) as session:
        begun = threading.Event()
        running = session.generate(tokens_of(3, 3500, 4000), max_tokens=5, progress=lambda _: begun.set())
        errors: list[BaseException] = []

        def work() -> None:
            try:
                next(running)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(60)
        with pytest.raises(StateError, match="computed already"):
            next(running)
        started = time.perf_counter()
        running.close()
        assert time.perf_counter() - started < 1
        thread.join(10)
        assert [type(error) for error in errors] == [Cancelled]
        assert running.result.finish_reason == "cancelled"
        assert session.position < 3500


def test_close_from_its_own_callback_is_refused() -> None:
    with nano().session(context=512) as session:
        running = session.generate(PROMPT, max_tokens=5, mask=lambda _: running.close())
        with pytest.raises(StateError, match="callback"):
            running.finish()
        assert session.generate(PROMPT, max_tokens=2).finish().usage.completion_tokens == 2


@pytest.mark.parametrize("move", ["truncate", "rewind", "step", "generate", "same length"])
def test_a_session_moved_by_its_progress_callback_is_noticed(move: str) -> None:
    """What would follow is not the prompt that was given; forks and saves are fine."""
    ids = list(range(5, 45))
    with nano().session(context=200, chunk=8) as session:
        session.prefill([70, 71, 72])

        def on_progress(p: Progress) -> None:
            if p.processed != 16 or session.position != 19:
                return
            if move == "truncate":
                session.truncate(10)
            elif move == "rewind":
                session.rewind(2)
            elif move == "step":
                session.step([9])
            elif move == "generate":
                session.generate([80, 81], max_tokens=1).finish()
            else:
                session.truncate(18)
                session.step([99])

        with pytest.raises(StateError, match="progress callback changed"):
            session.prefill(ids, progress=on_progress)
    with nano().session(context=200, chunk=8) as session:
        want = session.prefill(ids)
    with nano().session(context=200, chunk=8) as session:
        got = session.prefill(ids, progress=lambda p: session.fork().close() if p.processed in (16, 40) else None)
        assert got is not None and want is not None and got.tobytes() == want.tobytes()


def test_an_exception_from_progress_stops_the_prefill() -> None:
    class Enough(Exception):
        pass

    def enough(progress: object) -> None:
        raise Enough

    with nano().session(context=512, chunk=CHUNK) as session:
        with pytest.raises(Enough):
            session.prefill(oracle().ids, logits=None, progress=enough)
        assert session.position in (0, CHUNK)
        assert_valid(session)
        session.prefill(oracle().ids[session.position :], logits=None)
        assert_valid(session)


def test_a_late_cancel_does_not_touch_the_next_call() -> None:
    with nano().session(context=512) as session:
        session.prefill(oracle().ids[:20], logits=None)
        session.cancel()
        session.prefill(oracle().ids[20:30], logits=None)
        session.cancel()
        session.rewind(10)
        assert_valid(session)


# ---- asyncio -------------------------------------------------------------------------------------------------------


def test_tasks_cancelled_by_timeouts() -> None:
    """200 times, whole and streamed: when the timeout is raised, nothing runs on the session any more."""
    rng = random.Random(4)

    async def streamed(session: Session) -> None:
        async for _ in session.agenerate(PROMPT, max_tokens=12, temperature=1, seed=5):
            pass

    async def whole(session: Session) -> None:
        await session.agenerate(PROMPT, max_tokens=12, temperature=1, seed=5)

    async def work() -> None:
        hits = Hits(200, 50)
        with nano().session(context=512, chunk=CHUNK) as session:
            started = time.perf_counter()
            want = await session.agenerate(PROMPT, max_tokens=12, temperature=1, seed=5)
            took = time.perf_counter() - started
            for _ in hits:
                session.rewind(min(session.position, rng.choice([0, 1, 3])))
                try:
                    await asyncio.wait_for(rng.choice([streamed, whole])(session), rng.uniform(0, took))
                except TimeoutError:
                    hits.found += 1
                _ = session.position  # not busy
            again = await session.agenerate(PROMPT, max_tokens=12, temperature=1, seed=5)
            assert (again.text, again.tokens) == (want.text, want.tokens)

    asyncio.run(work())


def test_a_long_prefill_ends_with_its_task() -> None:
    async def work() -> float:
        with nano().session(context=4000, chunk=512) as session:
            started = time.perf_counter()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.agenerate(tokens_of(3, 3500, 4000), max_tokens=5), 0.3)
            took = time.perf_counter() - started
            assert session.position < 3500
            assert (await session.agenerate(PROMPT, max_tokens=3)).usage.completion_tokens == 3
        return took

    assert asyncio.run(work()) < 1.3


def test_the_event_loop_stays_free() -> None:
    async def work() -> int:
        ticks = 0
        with nano().session(context=2000) as session:
            running = asyncio.ensure_future(_finish(session))
            while not running.done():
                await asyncio.sleep(0.005)
                ticks += 1
            await running
        return ticks

    async def _finish(session: Session) -> None:
        await session.agenerate(tokens_of(3, 600, 4000), max_tokens=2)

    assert asyncio.run(work()) >= 5


def test_aclose_ends_a_stream() -> None:
    async def work() -> None:
        with nano().session(context=512) as session:
            stream = session.agenerate(PROMPT, max_tokens=50, temperature=0)
            pieces = [await anext(stream), await anext(stream)]
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert all(piece.token is not None for piece in pieces)
            assert (await session.agenerate(PROMPT, max_tokens=2, temperature=0)).tokens == [p.token for p in pieces]

    asyncio.run(work())


# ---- the interpreter -----------------------------------------------------------------------------------------------


def test_another_thread_runs_during_a_prefill() -> None:
    """The extension gives the GIL back: a thread that counts goes on counting."""
    counted, done = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    with nano().session(context=2000) as session:
        thread.start()
        started = time.perf_counter()
        session.prefill(tokens_of(3, 800, 4000), logits=None)
        seconds = time.perf_counter() - started
        done.set()
        thread.join()
    assert counted >= 20 * seconds


INTERRUPTED = """
import sys, time
import numpy as np
import ds4v41

ids = np.random.default_rng(3).integers(5, 4000, 3500)
with ds4v41.Model.open() as model, model.session(context=4000, chunk=CHUNK) as session:
    session.prefill(ids[:11], logits=None)
    print("ready", flush=True)
    try:
        for _ in range(1000):
            session.prefill(ids[11:], logits=None)
            session.truncate(11)
        print("not interrupted")
    except KeyboardInterrupt:
        print(f"interrupted at {time.time()}", flush=True)
    held = session.position
    assert session.tokens == ids[:held].tolist()
    session.rewind(11)
    row = session.step([7])
    with model.session() as other:
        other.prefill(ids[:11], logits=None)
        assert other.step([7]).tobytes() == row.tobytes()
        assert other._ext.live_bytes() == session._ext.live_bytes()
print("same bits")
"""


@pytest.mark.parametrize("chunk", [64, 3500])
def test_ctrl_c_within_a_second(chunk: int) -> None:
    """SIGINT in the middle of a long prefill; a chunk of 3,500 rows takes far longer than a second."""
    code = INTERRUPTED.replace("CHUNK", str(chunk))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.4)
        sent = time.time()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert err == ""
    words = out.split()
    assert words[:2] == ["interrupted", "at"], out
    assert float(words[2]) - sent < 1
    assert out.endswith("same bits\n")
    assert process.returncode == 0
