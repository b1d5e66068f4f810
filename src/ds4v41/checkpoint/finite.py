"""Search for NaN and infinity in stored weights of every type, without decoding them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 8 << 20
Words = NDArray[Any]
# Plain types: word type, and a test that is true for words that are not finite numbers.
_PLAIN: dict[str, tuple[str, Callable[[Words], NDArray[np.bool_]]]] = {
    "BF16": ("<u2", lambda w: (w & 0x7F80) == 0x7F80),
    "F16": ("<u2", lambda w: (w & 0x7C00) == 0x7C00),
    "F32": ("<u4", lambda w: (w & 0x7F800000) == 0x7F800000),
    "F8_E4M3": ("u1", lambda w: (w & 0x7F) == 0x7F),  # this format has NaN and no infinity
    "F8_E8M0": ("u1", lambda w: w == 0xFF),
}
# Block types: bytes and elements of a block, and where its f16 and e8m0 scales are. The codes are always finite.
_BLOCKS: dict[str, tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {
    "Q8_0": (34, 32, (0,), ()),
    "Q4_K": (144, 256, (0, 2), ()),
    "Q2_K": (84, 256, (80, 82), ()),
    "IQ2_XXS": (66, 256, (0,), ()),
    "MXFP4": (17, 32, (), (0,)),
}
Found = tuple[tuple[int, ...], int, str]


def find_non_finite(data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Found | None:
    """The first value that is not finite: (index, byte inside the tensor, "NaN" or "infinity"), or None.

    `data` is [nbytes] uint8; for block types the index is that of the block's first element. Types of codes alone
    (I8) have nothing to find.
    """
    if dtype in _PLAIN:
        return _find_plain(data, dtype, shape)
    if dtype in _BLOCKS:
        return _find_blocks(data, dtype, shape)
    return None


def _find_plain(data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Found | None:
    word_type, bad = _PLAIN[dtype]
    size = np.dtype(word_type).itemsize
    for start in range(0, data.size, _CHUNK):
        words = _words(data[start : start + _CHUNK], word_type)
        mask = bad(words)
        if mask.any():
            i = int(mask.argmax())
            at_byte = start + i * size
            return _index(at_byte // size, shape), at_byte, _kind(int(words[i]), dtype)
    return None


def _find_blocks(data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Found | None:
    block, n_elements, halves, exponents = _BLOCKS[dtype]
    step = _CHUNK // block * block
    for start in range(0, data.size, step):
        blocks = data[start : start + step].reshape(-1, block)
        first: tuple[int, int, str] | None = None
        for scale_type, offsets in (("F16", halves), ("F8_E8M0", exponents)):
            word_type, bad = _PLAIN[scale_type]
            for offset in offsets:
                words = _words(blocks[:, offset : offset + np.dtype(word_type).itemsize], word_type)
                mask = bad(words)
                if mask.any():
                    i = int(mask.argmax())
                    found = (i, offset, _kind(int(words[i]), scale_type))
                    first = found if first is None else min(first, found)
        if first is not None:
            i, offset, kind = first
            i_block = start // block + i
            return _index(i_block * n_elements, shape), i_block * block + offset, kind
    return None


def _words(data: NDArray[np.uint8], word_type: str) -> Words:
    """Little-endian words of bytes that need not be aligned."""
    return np.ascontiguousarray(data).reshape(-1).view(word_type)


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape)) if shape else ()


_MANTISSA = {"BF16": 0x7F, "F16": 0x3FF, "F32": 0x7FFFFF}


def _kind(word: int, dtype: str) -> str:
    mantissa = _MANTISSA.get(dtype)
    return "infinity" if mantissa is not None and word & mantissa == 0 else "NaN"
