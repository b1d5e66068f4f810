"""What the state costs at the sizes of the released model: bytes a token on disk, restore, fork, rewind.

The caches have the released shape (40 layers, 4 sources, 528 / 288 / 68 bytes a row); the weights around them are
small, since nothing here depends on them, and the rows are random. Restores are measured against a plain read of the
same files into fresh memory, in turns.

    python benchmarks/bench_kv.py [--tokens 23000 300000] [--folder DIR] [--out benchmarks/results/kv-MACHINE.csv]
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ds4v41
from ds4v41.synth import tiny_config, write_official

HIDDEN = 256
RELEASED_LAST_ROW = 4 * (5120 + 1) * 4
SHAPE = dict(  # noqa: C408
    vocab_size=512, hidden_size=HIDDEN, moe_intermediate_size=32, num_hidden_layers=40, num_attention_heads=2,
    head_dim=512, qk_rope_head_dim=64, q_lora_rank=32, o_lora_rank=32, o_groups=2, max_position_embeddings=1 << 20,
    sliding_window=128, n_routed_experts=4, num_experts_per_tok=2, compress_ratios=(0, 0) + (2,) * 18 + (1,) * 20,
    kv_source_layer_ids=(2, 8, 14, 20), index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36), index_n_heads=2,
    index_head_dim=128, index_topk=512, candidate_source_layer_id=20, candidate_topk_blocks=2048,
    candidate_block_size=8, engram_layer_ids=(1, 14), engram_vocab_size=500, num_nextn_predict_layers=0,
    dspark_target_layer_ids=(),
)  # fmt: skip
ROUNDS = 7


def timed(f: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    f()
    return clock() - start


def resident() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024


def plain_read(files: list[Path]) -> None:
    memory = np.empty(sum(f.stat().st_size for f in files), np.uint8)
    at = 0
    for path in files:
        with open(path, "rb", buffering=0) as file:
            at += file.readinto(memory[at : at + path.stat().st_size])  # type: ignore[arg-type]
    assert at == len(memory)


def forget(files: list[Path]) -> None:
    """Put files out of the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_official(folder / "model", tiny_config(**SHAPE), seed=1)
        self.model = ds4v41.Model.open(folder / "model")
        self.rows: list[tuple[str, float, str, str]] = []

    def note(self, name: str, value: float, unit: str, comment: str = "") -> None:
        self.rows.append((name, value, unit, comment))
        print(f"{name:44} {value:14,.3f} {unit:10} {comment}", flush=True)

    def measure(self, n: int) -> None:
        name = f"{n:,}"
        store = ds4v41.KVStore(self.folder / f"store{n}", budget="8 GiB")
        s = self.model.session(n + 64, store=store)
        s._ext.fill_for_benchmark(n, 1)
        ids = np.array(s.tokens, np.int32)
        s._ext.truncate(n - 2)
        seconds = timed(lambda: s.advance_to(ids))  # two tokens are run, then everything is put
        stats = store.stats()
        files = sorted((self.folder / f"store{n}" / "objects").iterdir())
        rows = sum(f.stat().st_size for f in files if f.suffix == ".page")
        frontier = sum(f.stat().st_size for f in files if f.suffix == ".frontier")
        self.note(f"put {name}", seconds, "s", "two steps and all writes with fsync")
        self.note(f"pages {name}", rows / n, "B/token", "file bytes")
        self.note(f"pages {name} on disk", stats.page_bytes / n, "B/token", "in blocks of 4 KiB")
        self.note(
            f"frontier {name}", frontier + RELEASED_LAST_ROW - 4 * (HIDDEN + 1) * 4, "B", "with a last row of 5,120"
        )
        self.restore(n, ids, store, files)
        self.forks(n, s)
        self.rewinds(n, s)
        store.close()
        s.close()

    def restore(self, n: int, ids: np.ndarray, store: ds4v41.KVStore, files: list[Path]) -> None:
        warm: list[float] = []
        plain: list[float] = []
        busy: list[float] = []
        plain_busy: list[float] = []
        for _ in range(ROUNDS):
            with self.model.session(n + 64, store=store) as fresh:
                cpu = time.process_time()
                warm.append(timed(lambda fresh=fresh: fresh.advance_to(ids)))
                busy.append(time.process_time() - cpu)
                assert fresh.stats.restored == n and fresh.stats.prefilled == 0 and fresh.stats.replayed == 0
            cpu = time.process_time()
            plain.append(timed(lambda: plain_read(files)))
            plain_busy.append(time.process_time() - cpu)
        forget(files)
        with self.model.session(n + 64, store=store) as fresh:
            cold = timed(lambda: fresh.advance_to(ids))
        forget(files)
        cold_plain = timed(lambda: plain_read(files))
        name = f"{n:,}"
        self.note(f"restore {name}, warm", 1000 * statistics.median(warm), "ms", f"best {1000 * min(warm):.1f}")
        self.note(f"plain read {name}, warm", 1000 * statistics.median(plain), "ms", f"best {1000 * min(plain):.1f}")
        self.note(f"restore {name}, processor time", 1000 * statistics.median(busy), "ms",
                  f"plain read {1000 * statistics.median(plain_busy):.1f}")
        ratio = statistics.median(p / w for p, w in zip(plain, warm, strict=True))
        self.note(f"restore {name}, share of plain read", ratio, "ratio", "plain / restore, median of turns")
        self.note(f"restore {name}, cold", 1000 * cold, "ms", f"plain read {1000 * cold_plain:.1f}")

    def forks(self, n: int, s: ds4v41.Session) -> None:
        name = f"{n:,}"
        before = resident()
        seconds, forks = [], []
        for _ in range(10):
            seconds.append(timed(lambda: forks.append(s.fork())))
        grown = resident() - before
        self.note(f"fork {name}", 1000 * statistics.median(seconds), "ms", f"worst {1000 * max(seconds):.2f}")
        self.note(f"fork {name}, memory each", grown / 10 / 1e6, "MB", "resident, 10 forks, before they diverge")
        own = [f._ext.own_bytes for f in forks]
        self.note(f"fork {name}, own segments", max(own) / 1e6, "MB", "before it diverges")
        step = [timed(lambda f=f: f.step([7])) for f in forks]
        plain = [timed(lambda f=f: f.step([8])) for f in forks]
        self.note(f"fork {name}, first step", 1000 * statistics.median(step), "ms",
                  f"second step {1000 * statistics.median(plain):.2f}")
        self.note(f"fork {name}, own after a step", max(f._ext.own_bytes for f in forks) / 1e6, "MB", "copied segments")
        for f in forks:
            f.close()

    def rewinds(self, n: int, s: ds4v41.Session) -> None:
        name = f"{n:,}"
        self.note(f"rewind {name} by 8", 1e6 * timed(lambda: s.rewind(n - 8)), "us", f"{s.stats.replayed} replayed")
        self.note(f"rewind {name} by 4,000", 1e6 * timed(lambda: s.rewind(n - 4000)), "us",
                  f"{s.stats.replayed} replayed")
        to = n // 2
        self.note(f"rewind {name} to {to:,}", to - s._ext.rewind_start(to), "tokens", "to replay, at most 5,337")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8_000, 23_000, 100_000, 300_000])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bench = Bench(Path(folder))
        for n in args.tokens:
            bench.measure(n)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with open(args.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["name", "value", "unit", "comment"])
            writer.writerows((name, f"{value:.6g}", unit, comment) for name, value, unit, comment in bench.rows)


if __name__ == "__main__":
    main()
