"""Made-up byte-level BPE tokenizers of any size, with a wanted number of compressed ids.

The Engram hash depends on how many compressed ids a tokenizer makes, so a synthetic checkpoint needs a tokenizer that
makes exactly as many as its configuration says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import count, product
from string import ascii_lowercase
from typing import Any

from .checkpoint.tokenmap import compressed_token_map
from .errors import OptionError

CONTROLS = ("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")
_SPACE = "Ġ"  # how byte-level BPE writes a space


def synthetic_tokenizer(vocab_size: int, compressed_size: int, special: Mapping[int, str]) -> bytes:
    """A tokenizer.json of `vocab_size` ids that make `compressed_size` compressed ids.

    `special` gives the ids with a fixed meaning; the chat controls take the highest free ids, then come the 256 bytes
    and words of letters. New words add a compressed id, variants with a space in front or in capitals do not. Raises
    OptionError with the possible range when there is no such tokenizer.
    """
    fixed = dict(special)
    free = [i for i in range(vocab_size) if i not in fixed]
    n_words = len(free) - len(CONTROLS) - 256
    base_keys = _base_keys(tuple(sorted(special.values())))
    n_new, n_same = compressed_size - base_keys, n_words - (compressed_size - base_keys)
    # Each new word allows three variants, each of the 26 letters two.
    least = base_keys + max(0, -(-(n_words - 2 * 26) // 4))
    if n_words < 0 or n_new < 0 or n_same < 0 or n_same > 3 * n_new + 2 * 26:
        smallest = vocab_size - n_words
        raise OptionError(
            f"no synthetic tokenizer has {vocab_size} ids and {compressed_size} compressed ids: the vocabulary needs "
            f"at least {smallest} ids, and {vocab_size} ids can make {least} to {base_keys + max(n_words, 0)} "
            "compressed ones"
        )
    fixed |= {free.pop(): control for control in reversed(CONTROLS)}
    merges = [*_new_words(n_new), *_variants(n_new, n_same)]
    words = [*_byte_alphabet(), *(left + right for left, right in merges)]
    vocab = dict(zip(words, free, strict=True))
    return _tokenizer_json(vocab, merges, fixed)


def default_compressed_size(vocab_size: int) -> int:
    """A number of compressed ids that a vocabulary of this size can have, with both kinds of words.

    Of the tokens that are always there 29 repeat another one: 26 capitals and 3 kinds of white space.
    """
    return max(vocab_size - 29 - max(vocab_size - 267, 0) // 4, 1)


@lru_cache(maxsize=16)
def _base_keys(special: tuple[str, ...]) -> int:
    """Compressed ids of a tokenizer without any words."""
    fixed = dict(enumerate([*special, *CONTROLS]))
    vocab = {byte: len(fixed) + i for i, byte in enumerate(_byte_alphabet())}
    return compressed_token_map(_tokenizer_json(vocab, [], fixed), len(fixed) + 256)[1]


def _tokenizer_json(vocab: dict[str, int], merges: list[tuple[str, str]], fixed: Mapping[int, str]) -> bytes:
    added = [
        {
            "id": i,
            "content": fixed[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": fixed[i] not in CONTROLS,
        }
        for i in sorted(fixed)
    ]
    byte_level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab | {content: i for i, content in fixed.items()},
        "merges": [list(merge) for merge in merges],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": model,
    }
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each of the 256 bytes: itself where it is printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _words(n: int) -> Iterator[str]:
    """The first `n` words of two letters, of three, and so on; the beginning of each is a letter or an earlier word."""
    for length in count(2):
        for letters in product(ascii_lowercase, repeat=length):
            if n <= 0:
                return
            n -= 1
            yield "".join(letters)


def _new_words(n: int) -> Iterator[tuple[str, str]]:
    return ((word[:-1], word[-1]) for word in _words(n))


def _variants(n_new: int, n: int) -> Iterable[tuple[str, str]]:
    """The first `n` merges that make a token equal to an earlier one but for a space or capitals."""
    letters = ascii_lowercase

    def every() -> Iterator[tuple[str, str]]:
        yield from ((_SPACE, letter) for letter in letters)
        yield from ((_SPACE, word) for word in _words(n_new))
        capitals = [word.upper() for word in _words(n_new)]
        yield from ((word[:-1], word[-1]) for word in capitals)
        yield from ((_SPACE, letter.upper()) for letter in letters)
        yield from ((_SPACE, word) for word in capitals)

    return (merge for _, merge in zip(range(n), every(), strict=False))
