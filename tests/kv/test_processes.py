"""Several processes and threads on one store at once."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from ds4v41 import KVStore

from .fake import chain, check_content, put
from .test_store import used

SECONDS = float(os.environ.get("DS4V41_STORE_SECONDS", "4"))


def busy(folder: Path, seed: int, budget: int, seconds: float, shared: KVStore | None = None) -> int:
    """Put, find, read back and prune for a while; everything found must be right."""
    dice = random.Random(seed)
    store = shared or KVStore(folder, budget=budget)
    end, n_done = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        which, n = dice.randrange(60), dice.randrange(1, 6000)
        ids = chain(which, n)
        result = put(store, ids)
        assert result.kept, result
        for _attempt in (1, 2):
            try:
                check_content(store, chain(dice.randrange(60), 6000))
                break
            except FileNotFoundError:  # deleted by the other between looking and reading: a miss
                continue
        if dice.random() < 0.05:
            store.prune(budget=budget * 3 // 4)
        n_done += 1
    return n_done


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_processes_on_one_store(tmp_path: Path) -> None:
    folder, budget = tmp_path / "s", 6 << 20
    children = []
    for seed in (1, 2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if busy(folder, seed, budget, SECONDS) > 5 else 2
            except BaseException as error:
                (tmp_path / f"error{seed}").write_text(repr(error))
            finally:
                os._exit(code)
        children.append(child)
    worst = 0
    waiting = set(children)
    while waiting:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            waiting.discard(done)
            assert status == 0, [p.read_text() for p in tmp_path.glob("error*")]
        try:
            worst = max(worst, used(folder))
        except FileNotFoundError:
            continue
        time.sleep(0.01)
    assert worst <= budget
    with KVStore(folder, budget=budget) as store:
        result = store.verify()
        assert result.clean, result
        for which in range(60):
            check_content(store, chain(which, 6000))


def test_threads_share_one_store(tmp_path: Path) -> None:
    with KVStore(tmp_path / "s", budget=6 << 20) as store:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                busy(tmp_path / "s", seed, 6 << 20, SECONDS / 2, store)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not errors
        assert store.verify().clean and used(tmp_path / "s") <= 6 << 20
