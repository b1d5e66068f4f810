"""The Engram token map: token ids that differ only in case, accents or white space share one compressed id.

The n-gram hash works on compressed ids. Its multipliers depend on how many there are, so a map that is off by one id
changes every table row that is read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import NormalizedString, Regex, Tokenizer, normalizers

from ..errors import TokenizerError
from .files import open_error, require_file

_MAX_TOKENIZER = 512 << 20
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Stands for a text that is one space while white space at the ends is stripped. A private-use character that no
# normalisation step touches.
_LONE_SPACE = "\ue000"
_BATCH = 8192


def compressed_token_map(tokenizer_json: Path | bytes, vocab_size: int) -> tuple[NDArray[np.uint32], int]:
    """Compressed id of every token id, [vocab_size] uint32, and how many compressed ids there are.

    Keys are numbered in order of first appearance over ids 0, 1, 2, ... . Raises TokenizerError for a damaged
    tokenizer or one with fewer than `vocab_size` tokens, CheckpointError for a file that cannot be read.
    """
    tokenizer, source = _load(tokenizer_json)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found < vocab_size:
        raise TokenizerError(
            f"{source}: it has {found} tokens, but the model has {vocab_size}; use the tokenizer.json that was "
            "published with the model"
        )
    normalizer = _normalizer()
    numbers: dict[str, int] = {}
    token_map = np.empty(vocab_size, dtype=np.uint32)
    for start in range(0, vocab_size, _BATCH):
        ids = range(start, min(start + _BATCH, vocab_size))
        texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
        for i, text in zip(ids, texts, strict=True):
            key = _key(tokenizer, normalizer, source, i, text)
            token_map[i] = numbers.setdefault(key, len(numbers))
    return token_map, len(numbers)


def _load(tokenizer_json: Path | bytes) -> tuple[Tokenizer, str]:
    if isinstance(tokenizer_json, bytes):
        source, data = "tokenizer", tokenizer_json
    else:
        source = str(tokenizer_json)
        size = require_file(tokenizer_json).st_size
        if size > _MAX_TOKENIZER:
            raise TokenizerError(f"{source}: expected at most {_MAX_TOKENIZER} bytes, found {size}")
        try:
            data = tokenizer_json.read_bytes()
        except OSError as error:
            raise open_error(tokenizer_json, error) from error
    try:
        return Tokenizer.from_buffer(data), source
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # bare Exception, and for some damage a panic that is not even that
        raise TokenizerError(f"{source}: not a usable tokenizer.json: {error}") from error


def _key(tokenizer: Tokenizer, normalizer: normalizers.Normalizer, source: str, token_id: int, text: str) -> str:
    """What makes two tokens the same: the normalised text, or the raw token where the text is not whole UTF-8."""
    if _REPLACEMENT in text or not text:
        raw = tokenizer.id_to_token(token_id)
        if raw is None:
            raise TokenizerError(f"{source}: no token has id {token_id}; the file does not belong to the model")
        if text:
            return str(raw)
    normalized = NormalizedString(text)
    normalizer.normalize(normalized)
    return normalized.normalized or text


def _normalizer() -> normalizers.Normalizer:
    """NFKC, NFD, no accents, lower case, white space runs to one space, ends stripped (a lone space stays)."""
    steps = [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
    return normalizers.Sequence(steps)
