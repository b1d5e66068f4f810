"""Tokenizer: ids as in the reference library, text never becomes a control token, characters stay whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chat_support import CONTROL_TEXTS, NANO_TOKENIZER, NASTY, golden, nano, released, v4_json, v41_bytes
from hypothesis import given
from hypothesis import strategies as st

from ds4v41.errors import OptionError, TokenError, TokenizerError
from ds4v41.tokenizer import StreamDecoder, Tokenizer

NANO = json.loads(NANO_TOKENIZER.read_text(encoding="utf-8"))
REFERENCE = tokenizers.Tokenizer.from_file(str(NANO_TOKENIZER))
IDS = st.lists(st.integers(0, 4095), max_size=40)


def gguf_records(doc: dict[str, Any]) -> tuple[list[str], list[str]]:
    """tokens and merges as a GGUF file holds them."""
    added = {a["id"]: a["content"] for a in doc["added_tokens"]}
    strings = {i: t for t, i in doc["model"]["vocab"].items()} | added
    merges = [m if isinstance(m, str) else " ".join(m) for m in doc["model"]["merges"]]
    return [strings[i] for i in range(len(strings))], merges


# reference ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", golden()["tokenizer_probes"], ids=lambda p: repr(p["text"])[:20])
def test_probe_ids(probe: dict[str, Any]) -> None:
    assert released().encode(probe["text"], control=True) == probe["ids"]
    assert released().decode(probe["ids"]) == probe["text"]


@given(NASTY)
def test_same_ids_as_the_library(text: str) -> None:
    assert nano().encode(text, control=True) == REFERENCE.encode(text, add_special_tokens=False).ids


@given(IDS)
def test_same_text_as_the_library(ids: list[int]) -> None:
    assert nano().decode(ids) == REFERENCE.decode(ids, skip_special_tokens=False)


@given(NASTY)
def test_released_vocabulary(text: str) -> None:
    tokenizer = released()
    plain, control = tokenizer.encode(text), tokenizer.encode(text, control=True)
    assert not tokenizer.special_ids & {*plain}
    assert tokenizer.decode(plain) == tokenizer.decode(control) == text


def test_released_ids() -> None:
    tokenizer = released()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (0, 1, 2, 129_280)
    assert tokenizer.control_id("<｜System｜>") == 128_799
    assert len(tokenizer.special_ids) == 1283


# safety ---------------------------------------------------------------------------------------------------------


@given(NASTY)
def test_text_never_becomes_a_control_token(text: str) -> None:
    ids = nano().encode(text)
    assert not nano().special_ids & {*ids}
    assert nano().decode(ids) == text


@pytest.mark.parametrize("text", CONTROL_TEXTS)
def test_control_has_to_be_asked_for(text: str) -> None:
    assert len(nano().encode(text)) > 1
    found = [i for i in nano().encode(text, control=True) if i in nano().special_ids]
    assert len(found) == (0 if "tool_result" in text else 1)


def test_bos_once() -> None:
    tokenizer = nano()
    assert tokenizer.encode("hi", add_bos=True) == [0, *tokenizer.encode("hi")]
    assert tokenizer.encode("<｜begin▁of▁sentence｜>hi", add_bos=True, control=True).count(0) == 1
    assert tokenizer.encode("<｜begin▁of▁sentence｜>hi", add_bos=True).count(0) == 1
    assert tokenizer.encode("", add_bos=True) == [0]


def test_skip_special_goes_by_id_and_not_by_flag() -> None:
    ids = nano().encode("<｜User｜>a<think>b｜DSML｜c<｜end▁of▁sentence｜>", control=True)
    assert nano().decode(ids, skip_special=True) == "abc"


def test_threads_share_one_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(NANO_TOKENIZER)
    texts = [f"def f{i}(x): return '🙂' * {i}  # <think>" for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda t: tokenizer.decode(tokenizer.encode(t)), texts))
    assert found == texts


# streaming ------------------------------------------------------------------------------------------------------


def stream(decoder: StreamDecoder, ids: list[int]) -> list[str]:
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@given(IDS)
def test_stream_equals_whole(ids: list[int]) -> None:
    assert "".join(stream(nano().stream(), ids)) == nano().decode(ids)
    assert "".join(stream(nano().stream(skip_special=True), ids)) == nano().decode(ids, skip_special=True)


@given(st.text(st.sampled_from("aé中日🙂👍🏽𝔘한 \n"), max_size=20))
def test_stream_never_splits_a_character(text: str) -> None:
    pieces = stream(nano().stream(), nano().encode(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_half_a_character() -> None:
    ids = nano().encode("🙂")
    assert len(ids) > 1
    decoder = nano().stream()
    assert decoder.push(ids[0]) == "" and decoder.pending
    assert decoder.flush() == "\ufffd" and not decoder.pending
    assert "".join(stream(decoder, ids)) == "🙂"


def test_token_bytes_are_the_pieces() -> None:
    ids = nano().encode("naïve 🙂")
    assert b"".join(map(nano().token_bytes, ids)) == "naïve 🙂".encode()


# GGUF metadata --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def from_gguf() -> Tokenizer:
    tokens, merges = gguf_records(NANO)
    return Tokenizer.from_gguf_metadata(tokens, [1] * len(tokens), merges, 0, 1)


@given(NASTY)
def test_gguf_gives_the_same_ids(from_gguf: Tokenizer, text: str) -> None:
    assert from_gguf.encode(text, control=True) == nano().encode(text, control=True)
    assert from_gguf.encode(text) == nano().encode(text)


def test_gguf_does_not_believe_token_types(from_gguf: Tokenizer) -> None:
    assert from_gguf.special_ids == nano().special_ids
    tokens, merges = gguf_records(NANO)
    assert Tokenizer.from_gguf_metadata(tokens, [3] * len(tokens), merges).special_ids == nano().special_ids
    assert Tokenizer.from_gguf_metadata(tokens, None, merges, pre="deepseek-v3").special_ids == nano().special_ids


def test_gguf_of_the_released_vocabulary() -> None:
    tokens, merges = gguf_records(json.loads(v41_bytes()))
    built = Tokenizer.from_gguf_metadata(tokens, None, merges, 0, 1)
    assert built.special_ids == released().special_ids
    for probe in golden()["tokenizer_probes"]:
        assert built.encode(probe["text"], control=True) == probe["ids"]


def test_gguf_problems_come_together() -> None:
    tokens, merges = gguf_records(NANO)
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_gguf_metadata([*tokens, tokens[5]], [1], [*merges, "nonsense", "qq zz"], pre="llama-bpe")
    text = str(error.value)
    for part in ("token types", "llama-bpe", "more than once", "nonsense", "qq zz"):
        assert part in text


# files ----------------------------------------------------------------------------------------------------------


def broken(change: Callable[[dict[str, Any]], object]) -> bytes:
    doc = copy.deepcopy(NANO)
    change(doc)
    return json.dumps(doc).encode()


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "BPE"),
        (b'{"model": {"type": "Unigram"}}', "Unigram"),
        (broken(lambda d: d["model"].update(vocab={})), "vocab"),
        (broken(lambda d: d["model"].update(vocab={"a": -1})), "'a'"),
        (broken(lambda d: d["model"]["vocab"].pop("!")), "byte tokens"),
        (broken(lambda d: d["model"].update(dropout=0.1)), "dropout"),
        (broken(lambda d: d.update(normalizer={"type": "NFC"})), "normalizer"),
        (broken(lambda d: d.update(decoder=None)), "ByteLevel"),
        (broken(lambda d: d["added_tokens"].append({"id": 9000, "content": "<x>"})), "holes"),
        (broken(lambda d: d["added_tokens"].append({"id": 7, "content": "<x>"})), "id 7"),
        (broken(lambda d: d["added_tokens"][4].update(lstrip=True)), "lstrip"),
        (broken(lambda d: d["added_tokens"].append({"content": 3})), "added_tokens[20]"),
        (broken(lambda d: d["model"].update(merges=[["zz", "qq"]])), "refuses"),
    ],
)
def test_damaged_file(data: bytes, part: str) -> None:
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_bytes(data, source="some/tokenizer.json")
    assert "some/tokenizer.json" in str(error.value) and part in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such file"):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(NANO_TOKENIZER.read_bytes())
    assert Tokenizer.from_file(tmp_path).vocab_size == 4096


def test_v4_vocabulary_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"128799.*place.*129264.*V4"):
        Tokenizer.from_bytes(v4_json(), source="v4")


def test_other_vocabularies_name_their_ids() -> None:
    data = broken(lambda d: d["added_tokens"][0].update(content="<|bos|>"))
    doc = json.loads(data)
    doc["model"]["vocab"]["<|bos|>"] = doc["model"]["vocab"].pop("<｜begin▁of▁sentence｜>")
    data = json.dumps(doc).encode()
    tokenizer = Tokenizer.from_bytes(data)
    with pytest.raises(TokenizerError, match="bos_id"):
        _ = tokenizer.bos_id
    assert Tokenizer.from_bytes(data, bos_id=0).encode("a", add_bos=True)[0] == 0
    with pytest.raises(TokenizerError, match="bos_id"):
        Tokenizer.from_bytes(data, bos_id=4096)
    with pytest.raises(TokenizerError, match="belongs to another model"):
        Tokenizer.from_bytes(data, eos_id=5)
    with pytest.raises(TokenizerError, match="no control token"):
        tokenizer.control_id("<｜begin▁of▁sentence｜>")


@dataclass
class Config:
    vocab_size: int = 4096
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int | None = 2
    image_token_id: int | None = 4095


def test_check_against_the_model() -> None:
    nano().check(Config())
    nano().check(Config(pad_token_id=None, image_token_id=None))
    with pytest.raises(TokenizerError) as error:
        nano().check(Config(4097, 1, 0, 3, 4))
    for part in ("vocab_size", "bos", "eos", "pad", "image"):
        assert part in str(error.value)


# bad arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 4096, 1.0, True, "1", None])
def test_bad_ids(bad: Any) -> None:
    with pytest.raises(TokenError, match=r"0 \.\. 4095"):
        nano().decode([1, bad])
    with pytest.raises(TokenError):
        nano().token_bytes(bad)
    with pytest.raises(TokenError):
        nano().stream().push(bad)


@pytest.mark.parametrize("bad", [b"bytes", None, 3, ["a"]])
def test_bad_text(bad: Any) -> None:
    with pytest.raises(OptionError, match="expected str"):
        nano().encode(bad)


def test_lone_surrogate() -> None:
    with pytest.raises(OptionError, match="character 1"):
        nano().encode("a\ud800")


def test_repr() -> None:
    assert "4096 tokens, 20 added" in repr(nano())
