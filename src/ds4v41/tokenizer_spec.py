"""What a tokenizer file says, checked and in one form: the base model without its added tokens, and the added tokens.

`tokenizer.json` and GGUF metadata both end here. The added tokens are kept apart on purpose: the BPE library never
sees them, so no text can turn into one of them unless our own code puts it there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ds4v41.errors import TokenizerError

RELEASE_VOCAB_SIZE = 129_280
"""Number of tokens of the released V4.1 vocabulary; some ids are checked when a vocabulary has exactly this size."""

_RELEASE_IDS = {
    0: "<｜begin▁of▁sentence｜>",
    1: "<｜end▁of▁sentence｜>",
    2: "<｜▁pad▁｜>",
    128_799: "<｜System｜>",
    128_803: "<｜User｜>",
    128_804: "<｜Assistant｜>",
    128_821: "<think>",
    128_822: "</think>",
    128_825: "｜DSML｜",
    129_264: "<｜deepseek_image｜>",
}

# The three split rules of the released tokenizer.json. Carriage return and newline stand as themselves.
_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
_RELEASE_PRE = ("joyai-llm", "deepseek-v3", "hunyuan-dense")
"""GGUF names which all stand for the three split rules above."""

_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One added token: its id, its text, and whether tokenizer.json looks for it before (False) or after (True)
    the tokens that are not normalised. The order matters only where two added tokens overlap."""

    id: int
    text: str
    normalized: bool


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """A checked tokenizer. `strings[id]` is the vocabulary spelling (byte-level for base tokens, plain for added)."""

    base_json: str
    strings: tuple[str, ...]
    added: tuple[AddedToken, ...]
    source: str


@cache
def byte_of_char() -> dict[str, int]:
    """The byte-level alphabet (as in GPT-2): printable character -> the byte it stands for."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    rest = [b for b in range(256) if b not in set(plain)]
    table.update({chr(0x100 + i): b for i, b in enumerate(rest)})
    return table


def refuse(source: str, problems: Sequence[str], advice: str) -> None:
    """Raise one TokenizerError that lists every problem; return when there is none."""
    if not problems:
        return
    shown = list(problems[:_MAX_LISTED])
    if len(problems) > _MAX_LISTED:
        shown.append(f"... and {len(problems) - _MAX_LISTED} more")
    raise TokenizerError(f"{source}: " + "; ".join(shown) + f". {advice}")


_ADVICE = "Use the tokenizer.json that belongs to the model's weights"


def spec_from_json(data: bytes, source: str) -> TokenizerSpec:
    """Read a tokenizer.json.

    Raises TokenizerError when it is not JSON, not a byte-level BPE, or contradicts itself.
    """
    try:
        doc = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{source}: expected a tokenizer.json, found text that is not JSON ({error}). "
                             f"{_ADVICE}.") from error
    model = doc.get("model") if isinstance(doc, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else type(model).__name__
        raise TokenizerError(f"{source}: expected a byte-level BPE model, found {kind!r}. {_ADVICE}.")
    problems = _pipeline_problems(doc)
    vocab, vocab_problems = _read_vocab(model.get("vocab"))
    added, added_problems = _read_added(doc.get("added_tokens"))
    problems += vocab_problems + added_problems
    strings, table_problems = _string_table(vocab, added)
    refuse(source, problems + table_problems, _ADVICE)
    base = {**doc, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    spec = TokenizerSpec(json.dumps(base, ensure_ascii=False), strings, added, source)
    _check_release(spec)
    return spec


def spec_from_gguf(
    tokens: Sequence[str], token_types: Sequence[int] | None, merges: Sequence[str], pre: str, source: str
) -> TokenizerSpec:
    """Build the same tokenizer from GGUF metadata (`tokenizer.ggml.tokens`, `.token_type`, `.merges`, `.pre`).

    Token types are checked for their number only, never believed: converters disagree about them. A token belongs
    to the base vocabulary if it is one character of the byte alphabet or the result of a merge; every other token
    is an added one. For the released vocabulary that gives the same split as tokenizer.json.
    """
    problems: list[str] = []
    if token_types is not None and len(token_types) != len(tokens):
        problems.append(f"{len(tokens)} tokens but {len(token_types)} token types")
    if pre not in (*_RELEASE_PRE, "gpt-2"):
        problems.append(f"unknown pre-tokenizer {pre!r}, expected one of {', '.join((*_RELEASE_PRE, 'gpt-2'))}")
    vocab = {text: i for i, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        problems.append(f"{len(tokens) - len(vocab)} token strings occur more than once")
    pairs, base = _read_merges(merges, vocab, problems)
    missing = [c for c in byte_of_char() if c not in vocab]
    if missing:
        problems.append(f"{len(missing)} of the 256 byte tokens are missing")
    refuse(source, problems, "The tokenizer metadata of this file is damaged; convert the model again")
    added = tuple(AddedToken(i, text, False) for i, text in enumerate(tokens) if text not in base)
    model = {"type": "BPE", "vocab": {t: i for t, i in vocab.items() if t in base}, "merges": pairs}
    doc: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(pre),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
    spec = TokenizerSpec(json.dumps(doc, ensure_ascii=False), tuple(tokens), added, source)
    _check_release(spec)
    return spec


def _read_merges(
    merges: Sequence[str], vocab: Mapping[str, int], problems: list[str]
) -> tuple[list[list[str]], set[str]]:
    """Merges as pairs, and the base vocabulary that they span."""
    base = set(byte_of_char())
    pairs: list[list[str]] = []
    for i, merge in enumerate(merges):
        left, blank, right = merge.partition(" ")
        if not blank or left not in vocab or right not in vocab or left + right not in vocab:
            problems.append(f"merge {i} ({merge!r}) is not two known tokens that make a third")
            continue
        pairs.append([left, right])
        base.add(left + right)
    return pairs, base


def _pre_tokenizer(pre: str) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre == "gpt-2"}
    if pre == "gpt-2":
        return byte_level
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False} for rule in _SPLITS
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


def _pipeline_problems(doc: Mapping[str, Any]) -> list[str]:
    """What would make plain text lossy or encoding random."""
    problems = []
    if doc.get("normalizer") not in (None, {"type": "Sequence", "normalizers": []}):
        problems.append("a text normalizer is set, expected none (it would change the text)")
    decoder = doc.get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        problems.append("the decoder is not ByteLevel")
    if doc["model"].get("dropout"):
        problems.append("BPE dropout is set, which makes encoding random")
    return problems


def _read_vocab(raw: Any) -> tuple[dict[str, int], list[str]]:
    if not isinstance(raw, dict) or not raw:
        return {}, ["model.vocab is missing or not an object"]
    bad = [t for t, i in raw.items() if type(i) is not int or i < 0]
    problems = [f"vocabulary entry {t!r} has id {raw[t]!r}" for t in bad]
    missing = sum(c not in raw for c in byte_of_char())
    if missing:
        problems.append(f"{missing} of the 256 byte tokens are missing from the vocabulary")
    return {t: i for t, i in raw.items() if type(i) is int and i >= 0}, problems


def _read_added(raw: Any) -> tuple[tuple[AddedToken, ...], list[str]]:
    if raw is None:
        return (), []
    if not isinstance(raw, list):
        return (), ["added_tokens is not a list"]
    added: list[AddedToken] = []
    problems: list[str] = []
    for n, entry in enumerate(raw):
        entry = entry if isinstance(entry, dict) else {}
        token_id, text = entry.get("id"), entry.get("content")
        if type(token_id) is not int or token_id < 0 or not isinstance(text, str) or not text:
            problems.append(f"added_tokens[{n}] needs an id >= 0 and a content")
        elif any(entry.get(flag) for flag in ("single_word", "lstrip", "rstrip")):
            problems.append(f"added_tokens[{n}] ({text!r}) sets single_word, lstrip or rstrip, which is not supported")
        else:
            added.append(AddedToken(token_id, text, bool(entry.get("normalized", False))))
    return tuple(sorted(added, key=lambda a: a.id)), problems


def _string_table(vocab: Mapping[str, int], added: Sequence[AddedToken]) -> tuple[tuple[str, ...], list[str]]:
    by_id: dict[int, str] = {}
    problems: list[str] = []
    for text, i in [*vocab.items(), *((a.text, a.id) for a in added)]:
        if by_id.setdefault(i, text) != text:
            problems.append(f"id {i} stands for both {by_id[i]!r} and {text!r}")
    texts = {a.text for a in added}
    if len(texts) != len(added):
        problems.append("an added token occurs more than once")
    top = max(by_id, default=-1)
    if top + 1 != len(by_id):
        problems.append(f"ids have holes: {len(by_id)} tokens but the highest id is {top}")
        return (), problems
    return tuple(by_id[i] for i in range(len(by_id))), problems


def _check_release(spec: TokenizerSpec) -> None:
    """Refuse the V4 vocabulary, which differs from V4.1 in nine strings only and would go unnoticed."""
    if len(spec.strings) != RELEASE_VOCAB_SIZE:
        return
    problems = [
        f"id {i} is {spec.strings[i]!r}, expected {text!r}"
        for i, text in _RELEASE_IDS.items()
        if spec.strings[i] != text
    ]
    refuse(spec.source, problems, "This is not the V4.1 vocabulary (V4 has the same size); use the V4.1 tokenizer")
