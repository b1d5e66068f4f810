"""The GGUF header parser against files that lie: clear errors, no crash, no hang, no large allocation."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.null.gguf_sample import Sample

from ds4v41.checkpoint.gguf import open_gguf
from ds4v41.checkpoint.gguf_header import read_header
from ds4v41.errors import CheckpointError


def head(n_tensors: int, n_keys: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + body


def text(raw: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def one_tensor(dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    entry = text(b"t") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return head(1, 0, entry) + bytes(4096)


HOSTILE = {
    "tensor count": head(2**63, 0),
    "key count": head(0, 2**64 - 1),
    "many keys": head(0, 60_000, bytes(100)),
    "key length": head(0, 1, text(b"abc", 2**64 - 1) + bytes(64)),
    "value length": head(0, 1, text(b"a") + struct.pack("<I", 8) + text(b"x", 2**63) + bytes(64)),
    "unknown value type": head(0, 1, text(b"a") + struct.pack("<I", 77) + bytes(64)),
    "nested array": head(0, 1, text(b"a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64)),
    "array length": head(0, 1, text(b"a") + struct.pack("<IIQ", 9, 10, 2**61) + bytes(64)),
    "string array length": head(0, 1, text(b"a") + struct.pack("<IIQ", 9, 8, 2**60) + bytes(64)),
    "string in array": head(0, 1, text(b"a") + struct.pack("<IIQ", 9, 8, 1) + text(b"x", 2**64 - 8) + bytes(64)),
    "alignment 0": head(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 0) + bytes(64)),
    "alignment 3": head(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 3) + bytes(64)),
    "alignment array": head(0, 1, text(b"general.alignment") + struct.pack("<IIQ", 9, 4, 2) + bytes(64)),
    "key not UTF-8": head(0, 1, text(b"\xff\xfe") + bytes(64)),
    "dimension count": head(1, 0, text(b"t") + struct.pack("<I", 2**32 - 1) + bytes(64)),
    "no dimensions": head(1, 0, text(b"t") + struct.pack("<I", 0) + bytes(64)),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "version 2": b"GGUF" + struct.pack("<IQQ", 2, 0, 0),
    "cut in the counts": b"GGUF" + struct.pack("<IQ", 3, 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_structure(tmp_path: Path, name: str) -> None:
    path = tmp_path / "h.gguf"
    path.write_bytes(HOSTILE[name])
    tracemalloc.start()
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"h\.gguf"):
        read_header(path)
    assert time.perf_counter() - began < 1.0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (one_tensor((2**63, 2)), "impossible shape"),
        (one_tensor((2**32, 2**32, 2**32, 2**32)), "impossible shape"),
        (one_tensor((0, 4)), "impossible shape"),
        (one_tensor((4, 2**40)), "past the end"),
        (one_tensor((4,), offset=2**64 - 32), "past the end"),
        (one_tensor((4,), offset=2**63), "past the end"),
        (one_tensor((4,), offset=7), "not aligned"),
        (one_tensor((4,), kind=200), "unknown type id 200"),
        (one_tensor((33,), kind=8), "Q8_0 needs a multiple of 32"),
    ],
)
def test_hostile_tensors(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "h.gguf"
    path.write_bytes(data)
    header = read_header(path)
    assert not header.tensors and len(header.problems) == 1
    assert expected in header.problems[0] and str(path) in header.problems[0]


def test_duplicates_and_overlap(tmp_path: Path) -> None:
    def entry(name: bytes, offset: int) -> bytes:
        return text(name) + struct.pack("<IQIQ", 1, 16, 0, offset)

    key = text(b"k") + struct.pack("<II", 4, 1)
    path = tmp_path / "h.gguf"
    entries = entry(b"a", 0) + entry(b"a", 64) + entry(b"b", 128) + entry(b"c", 160)
    path.write_bytes(head(4, 2, key + key + entries) + bytes(4096))
    found = "\n".join(read_header(path).problems)
    assert "'k' appears twice" in found and "'a' appears twice" in found and "'b' and 'c' overlap" in found


def only_clear_errors(path: Path) -> bool:
    """Opening works (True), or says what is wrong in a CheckpointError that names the file; either way soon."""
    began = time.perf_counter()
    good = True
    try:
        checkpoint = open_gguf(path)
        if checkpoint.tokenizer_metadata is not None:
            dict(checkpoint.tokenizer_metadata)
    except CheckpointError as error:
        assert str(path) in str(error)
        good = False
    assert time.perf_counter() - began < 5.0
    return good


GOOD_BYTES = Sample().file_bytes()


@pytest.fixture(scope="module")
def good_header(scratch: Path) -> bytes:
    header = Sample().header()
    assert spoil(scratch, header), "unspoiled it opens"
    return header.rstrip(b"\0")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "f.gguf"


def spoil(scratch: Path, data: bytes) -> bool:
    with open(scratch, "wb") as file:
        file.write(data)
        file.truncate(GOOD_BYTES)
    return only_clear_errors(scratch)


@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=8))
def test_bit_flips(good_header: bytes, scratch: Path, flips: list[tuple[float, int]]) -> None:
    data = bytearray(good_header)
    for where, bit in flips:
        data[int(where * len(data))] ^= 1 << bit
    spoil(scratch, bytes(data))


@given(where=st.floats(0, 1), sparse=st.booleans())
def test_truncation(good_header: bytes, scratch: Path, where: float, sparse: bool) -> None:
    data = good_header[: int(where * len(good_header))]
    if sparse:
        spoil(scratch, data)
    else:
        scratch.write_bytes(data)
        only_clear_errors(scratch)


@given(
    where=st.floats(0, 1, exclude_max=True),
    value=st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 8, 2**64 - 1]) | st.integers(0, 2**64 - 1),
)
def test_overwritten_words(good_header: bytes, scratch: Path, where: float, value: int) -> None:
    data = bytearray(good_header)
    at = min(int(where * len(data)), len(data) - 8)
    data[at : at + 8] = struct.pack("<Q", value)
    spoil(scratch, bytes(data))


@given(body=st.binary(max_size=300), n_tensors=st.integers(0, 4), n_keys=st.integers(0, 4))
@settings(max_examples=100)
def test_random_bodies(scratch: Path, body: bytes, n_tensors: int, n_keys: int) -> None:
    scratch.write_bytes(head(n_tensors, n_keys, body))
    only_clear_errors(scratch)
