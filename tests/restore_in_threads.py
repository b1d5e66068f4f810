"""Restores on several threads, and sessions in threads over one store: run under the thread sanitizer by
tests/sanitize_restore.sh. Prints "ok"; an exception of any thread ends it with 1."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

import ds4v41
from ds4v41.synth import tiny_config, write_official

LONG = 30_000  # tokens: enough bytes for four reading threads
ROUNDS = 1


def ids(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 300, n).astype(np.int32)


def long_restores(model: ds4v41.Model, folder: Path) -> None:
    """Rows that nobody computed, of a real size, read again and again."""
    with ds4v41.KVStore(folder / "long", budget="1 GiB") as store:
        with model.session(LONG + 64, store=store) as s:
            s._ext.fill_for_benchmark(LONG, 1)
            tokens = np.array(s.tokens, np.int32)
            s._ext.truncate(LONG - 2)
            s.advance_to(tokens)
        for n in (LONG, LONG - 5000, LONG):
            with model.session(LONG + 64, store=store) as s:
                s.advance_to(tokens[:n])
                assert s.stats.restored > 0, s.stats.why


def sessions(model: ds4v41.Model, folder: Path) -> None:
    """Two sessions that share prefixes, each in its thread, with a budget that makes them delete for each other."""
    faults: list[BaseException] = []
    with ds4v41.KVStore(folder / "shared", budget="2 MiB", memory="1 MiB") as store:

        def work(own: int) -> None:
            try:
                for i in range(ROUNDS):
                    with model.session(4096, store=store, chunk=128) as s:
                        shared = ids(300, i % 2)
                        s.advance_to(shared)
                        s.advance_to(np.concatenate([shared[:250], ids(60, own * 100 + i)]))
                        s.rewind(120)
                        twin = s.fork()
                        twin.advance_to(shared[:280])
                        twin.close()
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.verify().clean
    if faults:
        raise faults[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shape = tiny_config(max_position_embeddings=1 << 17, head_dim=512, index_head_dim=128, qk_rope_head_dim=64)
        write_official(Path(folder) / "big", shape, seed=1)
        write_official(Path(folder) / "tiny", tiny_config(max_position_embeddings=1 << 17), seed=1)
        with ds4v41.Model.open(Path(folder) / "big", threads=2) as model:
            long_restores(model, Path(folder))
        with ds4v41.Model.open(Path(folder) / "tiny", threads=2) as model:
            sessions(model, Path(folder))
    print("ok")


if __name__ == "__main__":
    sys.exit(main())
