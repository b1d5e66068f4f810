"""Restores at the row sizes of the release: several threads and large pages take part, and damage is still found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks.bench_kv import SHAPE

import ds4v41
from ds4v41 import _ext
from ds4v41.kvstore import store as store_module
from ds4v41.kvstore.format import FULL, PAGE
from ds4v41.synth import tiny_config, write_official

N = 9_001


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ds4v41.Model]:
    folder = tmp_path_factory.mktemp("sized") / "model"
    write_official(folder, tiny_config(**SHAPE), seed=1)
    with ds4v41.Model.open(folder, threads=1) as opened:
        yield opened


def stored(model: ds4v41.Model, folder: Path) -> tuple[ds4v41.KVStore, np.ndarray, bytes]:
    """(store, tokens, live bytes) of a session that was put there."""
    store = ds4v41.KVStore(folder, budget="256 MiB")
    with model.session(N + 64, store=store) as s:
        s._ext.fill_for_benchmark(N + 1, 1)
        ids = np.array(s.tokens, np.int32)[:N]
        s._ext.truncate(N - 3)
        s.advance_to(ids)
        return store, ids, bytes(s._ext.live_bytes())


@pytest.mark.parametrize("at_once", [2, 64])
def test_every_byte_comes_back(
    model: ds4v41.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(store_module, "FILES_AT_ONCE", at_once)
    store, ids, live = stored(model, tmp_path / "s")
    with store, model.session(N + 64, store=store) as s:
        s.advance_to(ids)
        assert s.stats.restored == N and s.stats.prefilled == s.stats.replayed == 0
        assert bytes(s._ext.live_bytes()) == live
        with s.fork() as other:  # writes into shared segments: a restore over what the parent has
            s.rewind(3000)
            other._ext.begin_restore(5000)  # (advance_to would run a token, and these rows are no model's)
            other.advance_to(ids)
            assert other.stats.restored == N - 5000
            assert bytes(other._ext.live_bytes()) == live and s.position == 3000
        s.advance_to(ids)
        assert bytes(s._ext.live_bytes()) == live


@pytest.mark.parametrize("kind", [PAGE, FULL])
def test_one_flipped_bit_is_found_by_whichever_thread(model: ds4v41.Model, tmp_path: Path, kind: int) -> None:
    store, ids, _ = stored(model, tmp_path / "s")
    with store:
        victim = [item for item in store.ls() if item.kind == kind][-1]
        path = store._files.path(victim.id, kind)  # type: ignore[union-attr]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
        with model.session(N + 64, store=store) as s:
            s.advance_to(ids)
            assert "checksum" in s.stats.why and path.name in store.stats().damaged[0]
            assert store.verify().clean  # what was dropped has been stored again
            assert s.stats.restored < N or kind == FULL
            if kind == FULL:  # the rows are random: what is replayed differs from them
                assert s.stats.replayed > 0
                return
            assert s.stats.prefilled == N - 8192


def xxh64(data: bytes) -> int:
    """The published algorithm, word by word."""
    p1, p2, p3, p4, p5 = (
        0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
    )  # fmt: skip
    most = (1 << 64) - 1

    def turn(x: int, r: int) -> int:
        return ((x << r) | (x >> (64 - r))) & most

    def mix(acc: int, word: int) -> int:
        return turn((acc + word * p2) & most, 31) * p1 & most

    at, h = 0, p5
    if len(data) >= 32:
        v = [(p1 + p2) & most, p2, 0, -p1 & most]
        for at in range(0, len(data) - 31, 32):
            v = [mix(v[i], int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little")) for i in range(4)]
        at += 32
        h = sum(turn(x, r) for x, r in zip(v, (1, 7, 12, 18), strict=True)) & most
        for x in v:
            h = ((h ^ mix(0, x)) * p1 + p4) & most
    h = (h + len(data)) & most
    while at + 8 <= len(data):
        h = (turn(h ^ mix(0, int.from_bytes(data[at : at + 8], "little")), 27) * p1 + p4) & most
        at += 8
    if at + 4 <= len(data):
        h = (turn(h ^ (int.from_bytes(data[at : at + 4], "little") * p1 & most), 23) * p2 + p3) & most
        at += 4
    for byte in data[at:]:
        h = turn(h ^ (byte * p5 & most), 11) * p1 & most
    h = (h ^ (h >> 33)) * p2 & most
    h = (h ^ (h >> 29)) * p3 & most
    return h ^ (h >> 32)


def test_the_checksum_is_the_published_one() -> None:
    assert xxh64(b"") == 0xEF46DB3751D8E999 and xxh64(b"Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1
    data = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    for n in [*range(100), 255, 256, 257, 1000]:
        for start in (0, 1):
            assert _ext.xxh64(data[start:n]) == xxh64(data[start:n].tobytes())
