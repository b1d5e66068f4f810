"""Checks of what users pass in: one place, one wording."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import OptionError, TokenError, shown

_MOST = 2**63 - 1


def token_ids(tokens: ArrayLike, n_vocab: int) -> NDArray[np.int32]:
    """Token ids as int32 [n], n >= 1. Raises TokenError for anything else."""
    if isinstance(tokens, str):
        raise TokenError("tokens: expected token ids, found text; encode it with model.tokenizer.encode(text)")
    if isinstance(tokens, bytes):
        raise TokenError("tokens: expected token ids, found bytes; decode them to text and encode that")
    try:
        ids = np.asarray(list(tokens) if isinstance(tokens, (range, tuple)) else tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise TokenError(f"tokens: expected a flat list of token ids, found {type(tokens).__name__}") from error
    if ids.ndim != 1:
        raise TokenError(f"tokens: expected a flat list of token ids, found an array of shape {ids.shape}")
    if ids.size == 0:
        raise TokenError("tokens: expected at least one token id, found none")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TokenError(f"tokens: expected integers, found {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= n_vocab:
        bad = low if low < 0 else high
        where = int(np.flatnonzero(ids == bad)[0])
        raise TokenError(f"tokens: expected ids 0 to {n_vocab - 1}, found {bad} at index {where}")
    return np.ascontiguousarray(ids, dtype=np.int32)


def not_a_prompt(prompt: Any) -> None:
    """Raises TokenError for what is neither text nor ids but is often taken for a prompt, and says where it belongs."""
    first = prompt[0] if isinstance(prompt, (list, tuple)) and prompt else None
    if any(isinstance(one, Mapping) and "role" in one for one in (first, prompt)):
        raise TokenError("prompt: expected text or token ids, found messages; chat() takes those")
    if isinstance(first, str):
        raise TokenError("prompt: expected text or token ids, found a list of texts; a call takes one prompt")
    if prompt is None or isinstance(prompt, bytes):
        raise TokenError(f"prompt: expected text or token ids, found {'None' if prompt is None else 'bytes'}")


def positive_int(name: str, value: Any, minimum: int = 1, maximum: int | None = None) -> int:
    """An integer in a range. Raises OptionError that names the option."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise OptionError(f"{name}: expected an integer, found {shown(value)}")
    if value < minimum or value > (_MOST if maximum is None else maximum):
        limits = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        raise OptionError(f"{name}: expected {limits}, found {shown(value)}")
    return int(value)


def path_of(name: str, value: Any) -> Path:
    """A path, with ~ expanded. Raises OptionError that names the option for what can be no path."""
    if not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"{name}: expected text or a path, found {shown(value)}")
    try:
        text = os.fspath(value)
    except Exception as error:  # somebody else's __fspath__ may do anything
        raise OptionError(f"{name}: expected a path, found {shown(value)}, which gives none: {error}") from error
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(f"{name}: expected a path that is text without NUL, found {shown(text)}")
    try:
        os.fsencode(text)
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)
        return path
    except UnicodeEncodeError as error:
        raise OptionError(f"{name}: expected a path, found {shown(text)}, which is no name of a file") from error
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise OptionError(f"{name}: {shown(text)}: this path cannot be looked at: {error.strerror}") from error
    except RuntimeError as error:  # ~somebody
        raise OptionError(f"{name}: {shown(text)}: there is no such home folder; write the path out") from error


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """One of a few words. Raises OptionError that names the option and lists them."""
    if not isinstance(value, str) or value not in allowed:
        raise OptionError(f"{name}: expected one of {', '.join(allowed)}, found {shown(value)}")
    return value


def callback(name: str, value: Any) -> None:
    """A function, or None. Raises OptionError that names the option."""
    if value is not None and not callable(value):
        raise OptionError(f"{name}: expected a function, found {shown(value)}")
