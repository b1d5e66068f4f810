"""The compressed token map against the golden one, and its rule on hand-made tokens."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ds4v41.checkpoint import open_checkpoint
from ds4v41.checkpoint.tokenmap import compressed_token_map
from ds4v41.errors import CheckpointError, TokenizerError

GOLDEN = Path(__file__).parents[1] / "golden"
NANO = Path(__file__).parents[2] / "src/ds4v41/data/nano"


def test_golden_map() -> None:
    golden = json.loads((GOLDEN / "tiny/token_map.json").read_text())
    token_map, size = compressed_token_map(GOLDEN / "tiny/tokenizer.json", 512)
    assert token_map.tolist() == golden["token_map"]
    assert size == golden["compressed_vocab_size"]
    assert token_map[golden["pad_token_id"]] == golden["pad_compressed_id"]


def test_nano_has_the_size_that_its_configuration_says() -> None:
    checkpoint = open_checkpoint(NANO)
    token_map = checkpoint.token_map
    assert token_map is not None
    assert len(token_map) == 4096
    assert sorted(set(token_map)) == list(range(3075))
    assert checkpoint.token_map is token_map  # made once


def test_nano_is_fast() -> None:
    best = min(_seconds() for _ in range(3))
    assert best < 0.5  # 0.02 s on an idle machine


def _seconds() -> float:
    start = time.perf_counter()
    compressed_token_map(NANO / "tokenizer.json", 4096)
    return time.perf_counter() - start


def tokenizer_of(tokens: list[str], special: tuple[str, ...] = ()) -> bytes:
    """A byte-level tokenizer with these raw tokens (G-dot is a space, C-dot a newline)."""
    added: list[dict[str, Any]] = [
        {
            "id": tokens.index(text),
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text in special
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
    ).encode()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["a", "A", "Ġa", "aĠ", "ĊĊA"], [0, 0, 0, 0, 0]),
        (["Ġ", "ĠĠ", "Ċ", "č", "ĉĊ"], [0, 0, 0, 0, 0]),  # every run of white space is one space, which is protected
        (["e", "Ã©", "Ã", "©", "Ã"[:1] + "ī"], [0, 0, 1, 2, 0]),  # e acute, its two bytes, E acute
        (["x", "aĠb", "aĊĠb", "ab"], [0, 1, 1, 2]),
        (["<s>", "<S>", "s"], [0, 0, 1]),
        (["ï¬ģ", "fi"], [0, 0]),  # the ligature is NFKC-equal
        (["Ì", "Ìģ", "a"], [0, 1, 2]),  # half a character; a lone accent, which normalises to nothing
    ],
)
def test_rule(tokens: list[str], expected: list[int]) -> None:
    special = ("<s>",) if "<s>" in tokens else ()
    token_map, size = compressed_token_map(tokenizer_of(tokens, special), len(tokens))
    assert token_map.tolist() == expected
    assert size == max(expected) + 1


def test_too_small_a_tokenizer() -> None:
    with pytest.raises(TokenizerError, match="3 tokens, but the model has 4"):
        compressed_token_map(tokenizer_of(["a", "b", "c"]), 4)


def test_a_hole_in_the_ids_is_an_error() -> None:
    data = json.loads(tokenizer_of(["a", "b", "c"]))
    data["model"]["vocab"] = {"a": 0, "b": 1, "c": 7}
    with pytest.raises(TokenizerError, match="no token has id 2"):
        compressed_token_map(json.dumps(data).encode(), 3)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(TokenizerError, match="not a usable"):
        compressed_token_map(path, 3)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        compressed_token_map(tmp_path / "tokenizer.json", 3)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "tiny/bf16", tmp_path / "m", ignore=shutil.ignore_patterns("runs*", "inter*", "tok*"))
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.token_map is None
    shutil.copy(NANO / "tokenizer.json", tmp_path / "m")
    with pytest.raises(TokenizerError, match="engram_compressed_vocab_size 387"):
        _ = open_checkpoint(tmp_path / "m").token_map


def test_a_tokenizer_beside_the_folder_serves_it(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "tiny/bf16", tmp_path / "m", ignore=shutil.ignore_patterns("runs*", "inter*", "tok*"))
    shutil.copy(GOLDEN / "tiny/tokenizer.json", tmp_path)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.tokenizer == tmp_path / "tokenizer.json"
    assert checkpoint.token_map == json.loads((GOLDEN / "tiny/token_map.json").read_text())["token_map"]
