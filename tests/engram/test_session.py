"""Sessions whose rows come from anywhere: the same bits; and what waiting for them costs."""

from __future__ import annotations

import errno
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import ds4v41
from ds4v41.checkpoint import open_checkpoint
from ds4v41.engram import EngramOptions, open_engram
from ds4v41.errors import Cancelled, CheckpointError, EngramError, MemoryPlanError, OptionError
from ds4v41.model import NANO
from ds4v41.session import Session
from ds4v41.synth_gguf import write_gguf
from ds4v41.weights import build, default_activations

CHECKPOINT = open_checkpoint(NANO)
TOKENS = np.random.default_rng(5).integers(10, 3000, 160).astype(np.int32)
TOKENS[80:120] = TOKENS[:40]  # something to hit


def nano(faults: dict[str, Any] | None = None, **options: Any) -> ds4v41.Model:
    """The nano model whose disk misbehaves."""
    rows = open_engram(CHECKPOINT, EngramOptions(**options), faults=faults)
    mode = default_activations(CHECKPOINT.config, CHECKPOINT.dialect)
    return ds4v41.Model(CHECKPOINT, build(CHECKPOINT, mode, "auto", 2, rows), mode, 0, rows)


@pytest.fixture(scope="module")
def plain() -> Iterator[np.ndarray]:
    """Logits after every token, from tables in memory: no threads, no cache, no disk."""
    with nano(mode="ram") as model, model.session(256) as session:
        yield session.prefill(TOKENS, logits="all")


def wait_of(session: Session) -> float:
    return float(session._ext.engram_counters()["wait_seconds"])


@settings(max_examples=12)
@given(
    threads=st.sampled_from([1, 3, 32]),
    cache=st.sampled_from([0, 2000, 1 << 20]),
    chunk=st.sampled_from([1, 7, 64]),
    faults=st.fixed_dictionaries(
        {
            "delay": st.sampled_from([0.0, 2e-4]),
            "jitter": st.sampled_from([0.0, 1e-3]),
            "short_reads": st.booleans(),
            "interrupt_every": st.sampled_from([0, 3]),
            "seed": st.integers(0, 9),
        }
    ),
)
def test_the_same_bits_from_any_disk(
    plain: np.ndarray, threads: int, cache: int, chunk: int, faults: dict[str, Any]
) -> None:
    n = 24 if chunk == 1 else 100
    with nano(faults, cache=cache, threads=threads) as model, model.session(256, chunk=chunk) as session:
        assert_array_equal(session.prefill(TOKENS[:n], logits="all"), plain[:n])
        session.truncate(n - 10)  # what was read ahead is for other tokens
        assert_array_equal(session.prefill(TOKENS[n - 10 : n + 3], logits="all"), plain[n - 10 : n + 3])
        assert_array_equal(session.prefill(TOKENS[n + 3 : n + 9], logits="all"), plain[n + 3 : n + 9])


def test_a_chunk_longer_than_what_operations_take_at_a_time() -> None:
    tokens = np.random.default_rng(8).integers(10, 3000, 450).astype(np.int32)
    with nano(cache=0) as model, model.session(512, chunk=450) as whole, model.session(512, chunk=61) as parts:
        assert_array_equal(whole.prefill(tokens, logits="all"), parts.prefill(tokens, logits="all"))


def test_sessions_at_the_same_time(plain: np.ndarray) -> None:
    with nano({"jitter": 1e-3}, cache=20_000, threads=3) as model:
        got: dict[int, np.ndarray] = {}

        def run(i: int) -> None:
            with model.session(256, chunk=11 + i) as session:
                got[i] = session.prefill(TOKENS[:80], logits="all")

        threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rows in got.values():
            assert_array_equal(rows, plain[:80])
        assert len(got) == 3


def test_a_wrong_expectation_costs_nothing_but_time(plain: np.ndarray) -> None:
    with nano({"delay": 1e-3}, cache=0) as model, model.session(256) as session:
        session._ext.expect(TOKENS[100:150])
        session._ext.run(TOKENS[:20], "none")
        assert_array_equal(session._ext.run(TOKENS[20:40], "all"), plain[20:40])
        assert session._ext.engram_counters()["expected"] == 0
        session._ext.expect(TOKENS[50:60])
        session._ext.run(TOKENS[40:50], "none")
        assert_array_equal(session._ext.run(TOKENS[50:60], "all"), plain[50:60])
        assert session._ext.engram_counters()["expected"] == 2  # both tables


def test_a_step_waits_for_one_read_not_for_all() -> None:
    """12 rows a token, codes and scales apart, at 10 ms a read: one after the other would be 240 ms."""
    delay = 0.01
    with nano({"delay": delay}, cache=0, threads=24) as model, model.session(256) as session:
        session.prefill(TOKENS[:10])
        waits = []
        for token in TOKENS[10:40]:
            before = wait_of(session)
            session.step([token])
            waits.append(wait_of(session) - before)
        assert 0 < statistics.median(waits) < 1.5 * delay
        stats = model.engram
        assert stats is not None
        assert stats.read_seconds > 30 * 10 * delay  # the rest was behind the computation, or at the same time
        assert session.stats.engram_wait >= waits[-1]


def test_the_ledger_has_waiting_and_hidden_reads() -> None:
    with nano({"delay": 2e-3}, cache=0) as model, model.session(256) as session:
        session.prefill(TOKENS[:10])
        stats, waited = model.engram, wait_of(session)
        assert stats is not None
        session.start_ledger()
        for token in TOKENS[10:15]:
            session.step([token])
        ledger = session.ledger()
        after = model.engram
        assert after is not None
        waited = wait_of(session) - waited
    rows = {(row.op, row.layer): row for row in ledger.rows}
    layers = CHECKPOINT.config.engram_layer_ids
    assert [rows["engram_wait", i].dispatches for i in layers] == [rows["engram_io", i].dispatches for i in layers]
    assert {op for op, layer in rows if layer in layers} > {"engram_wait", "engram_io"}
    assert sum(rows["engram_wait", i].seconds for i in layers) == pytest.approx(waited)
    assert sum(rows["engram_io", i].bytes for i in layers) == after.bytes_read - stats.bytes_read > 0
    assert rows["engram_io", layers[1]].seconds > 5 * 1e-3  # behind the layers before it
    assert sum(r.seconds for r in ledger.rows if r.op.startswith("engram_") and r.layer in layers) > 5 * 2 * 2e-3
    assert ledger.covered <= 1 and "beside" in str(ledger)
    assert ledger.bytes == sum(r.bytes for r in ledger.rows if r.op != "engram_io")
    without = replace(ledger, missing=("engram_wait in layer 1: 5 dispatches expected, 4 seen",))
    assert not without.complete


def test_a_prefill_reads_the_next_chunk_while_it_computes() -> None:
    """A disk that needs a good part of the computation's time is hardly seen: prefill at 0.95 of its rate in memory."""
    tokens = np.random.default_rng(6).integers(10, 3000, 8 * 48).astype(np.int32)

    def seconds(model: ds4v41.Model, ahead: bool) -> tuple[float, float]:
        with model.session(512, chunk=48) as session:
            session._ext.expect(tokens[48:96] if ahead else tokens[:0])
            session._ext.run(tokens[:48], "none")
            begin, waited = time.perf_counter(), wait_of(session)
            for i in range(48, len(tokens), 48):
                if ahead:
                    session._ext.expect(tokens[i + 48 : i + 96])
                session._ext.run(tokens[i : i + 48], "none")
            return time.perf_counter() - begin, wait_of(session) - waited

    with nano(mode="ram") as model:
        compute = min(seconds(model, True)[0] for _ in range(2))
    with nano(cache=0) as model:
        seconds(model, False)
        assert model.engram is not None
        n_bytes = model.engram.bytes_read
    with nano({"bytes_per_second": n_bytes / (0.2 * compute)}, cache=0) as model:
        ahead = [seconds(model, True) for _ in range(3)]
    assert min(waited / total for total, waited in ahead) < 0.05
    # A disk that is seen without reading ahead: it needs most of the time that a chunk takes.
    with nano({"bytes_per_second": n_bytes / (0.8 * compute)}, cache=0) as model:
        ahead = [seconds(model, True) for _ in range(3)]
        without = [seconds(model, False) for _ in range(3)]
    assert min(waited for _, waited in ahead) < 0.5 * max(waited for _, waited in without)


def test_a_disk_error_leaves_the_session_as_it_was(plain: np.ndarray) -> None:
    with nano({"fail_after": 400, "fail_errno": errno.EIO}, cache=0) as model, model.session(256) as session:
        session.prefill(TOKENS[:8])
        with pytest.raises(EngramError, match=r"model\.safetensors, offset \d+, row \d+: read failed: Input/output"):
            session.prefill(TOKENS[8:60])
        assert session.position == 8
        with pytest.raises(EngramError):
            session.step(TOKENS[8:9])
        assert session.position == 8
        with model.session(64) as other, pytest.raises(EngramError):
            other.step(TOKENS[:1])


def test_a_session_goes_on_after_an_error_that_passes(plain: np.ndarray, tmp_path: Path) -> None:
    tables = tmp_path / "tables.safetensors"  # not the checkpoint itself, whose weights are mapped
    shutil.copy(NANO / "model.safetensors", tables)
    tensor = CHECKPOINT.tensors["layers.1.engram.embed.weight"]
    with ds4v41.Model.open(engram_path=tables, engram_cache=0) as model, model.session(256) as session:
        session.prefill(TOKENS[:8])
        tail = tables.read_bytes()[tensor.offset :]
        with open(tables, "r+b") as file:
            file.truncate(tensor.offset)
            with pytest.raises(EngramError, match="the file ends inside this row"):
                session.step(TOKENS[8:9])
            file.seek(tensor.offset)
            file.write(tail)
        assert session.position == 8
        assert_array_equal(session.step(TOKENS[8:12]), plain[8:12])


def test_cancel_does_not_wait_for_the_disk() -> None:
    with nano({"delay": 2.0}, cache=0, threads=1) as model, model.session(64) as session:
        threading.Timer(0.1, session.cancel).start()
        begin = time.perf_counter()
        with pytest.raises(Cancelled):
            session.prefill(TOKENS[:20])
        assert time.perf_counter() - begin < 1.8
        assert session.position == 0


def test_counters(plain: np.ndarray) -> None:
    with nano(cache=1 << 20) as model, model.session(256) as session:
        session.prefill(TOKENS[:40])
        stats = model.engram
        assert stats is not None
        assert (stats.mode, stats.rows) == ("disk", 40 * 12)
        session.truncate(0)
        session.prefill(TOKENS[:40])
        again = model.engram
        assert again is not None
        assert again.reads == stats.reads
        assert again.hits - stats.hits == again.unique - stats.unique > 0
        assert again.hit_rate is not None
        assert 0 < again.hit_rate < 1
        assert 0 < again.latency[0] <= again.latency[2] < 1


# ---- options -------------------------------------------------------------------------------------------------------


def test_tables_in_memory(plain: np.ndarray) -> None:
    with ds4v41.Model.open(engram="ram") as model, model.session(256) as session:
        assert_array_equal(session.prefill(TOKENS[:30], logits="all"), plain[:30])
        assert model.engram is not None
        assert (model.engram.mode, model.engram.reads, model.engram.cache_bytes) == ("ram", 0, 0)
        assert model.plan()[0].engram_memory == model.engram.table_bytes


def test_memory_that_does_not_suffice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4v41.engram.available_memory", lambda: 1 << 20)
    with pytest.raises(MemoryPlanError, match=r'engram="ram": the tables take 3\.0 MiB .* 1\.0 MiB are available'):
        ds4v41.Model.open(engram="ram")


@pytest.mark.parametrize("as_file", [False, True])
def test_tables_elsewhere(plain: np.ndarray, tmp_path: Path, as_file: bool) -> None:
    elsewhere = tmp_path / "fast disk"
    elsewhere.mkdir()
    shutil.copy(NANO / "model.safetensors", elsewhere / "tables.safetensors")
    path = elsewhere / "tables.safetensors" if as_file else elsewhere
    with ds4v41.Model.open(engram_path=path, engram_cache="64 KiB") as model, model.session(256) as session:
        assert_array_equal(session.prefill(TOKENS[:30], logits="all"), plain[:30])
        assert model.engram is not None
        assert 60_000 < model.engram.cache_bytes <= 65_536


def test_tables_in_a_gguf_elsewhere(tmp_path: Path) -> None:
    """The rows come from the other file: those of the checkpoint itself are overwritten."""
    main = write_gguf(tmp_path / "main.gguf", "tiny", engram_rows=2000).path
    tokens = list(range(20, 60))
    with ds4v41.Model.open(main) as model, model.session(128) as session:
        whole = session.prefill(tokens, logits="all")
    elsewhere = tmp_path / "elsewhere.gguf"
    shutil.copy(main, elsewhere)
    with open(main, "r+b") as file:
        for tensor in open_checkpoint(main, parts=("main", "engram")).tensors.values():
            if ".engram.embed." in tensor.name:
                file.seek(tensor.offset)
                file.write(b"\xff" * tensor.nbytes)
    with (
        ds4v41.Model.open(main) as model,
        model.session(128) as session,
        pytest.raises(EngramError, match=r"main\.gguf, offset \d+, row \d+: a code is not a number"),
    ):
        session.prefill(tokens)
    for mode in ("disk", "ram"):
        with ds4v41.Model.open(main, engram_path=elsewhere, engram=mode) as model, model.session(128) as session:
            assert_array_equal(session.prefill(tokens, logits="all"), whole)
    other = write_gguf(tmp_path / "other.gguf", "tiny", engram_rows=4000).path
    with pytest.raises(CheckpointError, match=r"other\.gguf"):
        ds4v41.Model.open(main, engram_path=other)


def test_tables_elsewhere_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        ds4v41.Model.open(engram_path=tmp_path)
    other = Path(__file__).parents[1] / "golden" / "tiny" / "bf16"
    with pytest.raises(CheckpointError, match=r"engram\.embed\.weight: expected"):
        ds4v41.Model.open(engram_path=other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engram": "tape"}, "engram: expected one of disk, ram"),
        ({"engram_cache": "lots"}, 'engram_cache: expected bytes as a number or as text such as "512 MiB"'),
        ({"engram_cache": -1}, "engram_cache"),
        ({"engram_threads": 0}, "engram_threads: expected 1 to 256"),
        ({"engram_path": 5}, "engram_path"),
        ({"engram_direct": "yes"}, "engram_direct"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ds4v41.Model.open(**options)
