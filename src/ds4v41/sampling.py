"""How a token is drawn from logits: the options, their checks, and the sampler that applies them.

The arithmetic is in the extension, so that the same seed gives the same tokens on every machine; docs/sampling.md
defines each step. Options are checked here, before any work, and never ignored.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds4v41.errors import OptionError, TokenError, shown

MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The options of a draw. Raises OptionError, naming every option that is wrong; None stands for the default.

    temperature: 0 takes the likeliest token (the lowest id of equal ones); 1 is the model's own distribution.
    top_k: keep the k likeliest tokens; 0 or None is off. Filters apply after temperature, in the order k, p, min_p.
    top_p: keep the fewest likeliest tokens that together reach this share of the probability that top_k left.
    min_p: keep tokens at least this many times as likely as the likeliest one.
    seed: 0 to 2**64 - 1; None takes a fresh one for the call, which the result reports.
    presence_penalty, frequency_penalty: -2 to 2, subtracted from logits of generated tokens: once, or per occurrence.
    repetition_penalty: 0.01 to 100; positive logits of tokens in the prompt or the answer are divided by it,
        negative ones multiplied; 1 is off.
    logit_bias: token id -> value added to its logit, -100 to 100; -math.inf bans the token.
    logprobs: report the log probability of each token in the model's own distribution (raw logits, temperature 1).
    top_logprobs: report this many likeliest tokens at each position too (0 to 20); needs logprobs=True.

    >>> SamplingParams.from_options({"temperature": 0.7, "top_q": 0.9})
    Traceback (most recent call last):
    ...
    ds4v41.errors.OptionError: top_q: unknown option; did you mean top_p?
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        values, problems = _checked({f.name: getattr(self, f.name) for f in fields(self)})
        _refuse(problems)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """The options by name. Raises OptionError that lists every unknown name and every wrong value at once."""
        known = [f.name for f in fields(cls)]
        problems = [unknown_option(name, known) for name in options if name not in known]
        values, wrong = _checked({name: value for name, value in options.items() if name in known})
        _refuse(problems + wrong)
        return cls(**values)

    def validate(self) -> None:
        """Raises OptionError as the constructor does (for objects that were made around it)."""
        _refuse(_checked({f.name: getattr(self, f.name) for f in fields(self)})[1])

    def resolved(self) -> SamplingParams:
        """The same options with a seed: their own, or a fresh one where it is None."""
        return self if self.seed is not None else replace(self, seed=fresh_seed())

    @property
    def needs_history(self) -> bool:
        """Whether a penalty is set, so that draws need the tokens so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawn token. `n_kept`: how many tokens the filters left (1 at temperature 0).

    `logprob` is None unless logprobs were asked for; `top_logprobs` are (token, logprob), likeliest first. `chance`:
    how likely the likeliest token was after bias and penalties, at temperature 1; None unless the decode loop asked.
    """

    token: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]
    n_kept: int
    chance: float | None = field(default=None, compare=False, repr=False)


class Sampler:
    """Draws tokens with one set of options. A draw depends on options, logits, history, seed and position only.

    `history` is a TokenHistory (see `new_history`), needed when a penalty is set. `allowed` is the mask of constrained
    decoding: token ids, or a bool for each token of the vocabulary; None allows every token.
    """

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        """Raises OptionError when an id of logit_bias is not in the vocabulary."""
        self.params = params.resolved()
        self.n_vocab = n_vocab
        bias = dict(params.logit_bias or {})
        outside = sorted(token for token in bias if token >= n_vocab)
        if outside:
            raise OptionError(
                f"logit_bias: expected token ids 0 to {n_vocab - 1}, found {', '.join(map(str, outside[:8]))}"
                + (f" and {len(outside) - 8} more" if len(outside) > 8 else "")
            )
        self._sampler = _extension().Sampler(
            n_vocab,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=sorted(bias.items()),
            logprobs=params.logprobs,
            top_logprobs=min(params.top_logprobs, n_vocab),
        )

    @property
    def handle(self) -> Any:
        """The extension's sampler."""
        return self._sampler

    @property
    def seed(self) -> int:
        """The seed in use: the one that was given, or the fresh one."""
        assert self.params.seed is not None  # resolved() filled it
        return self.params.seed

    def new_history(self, prompt: ArrayLike = ()) -> Any:
        """A TokenHistory with these prompt tokens: add(int32 ids), drop(n), copy(). Raises TokenError for wrong ids."""
        ids = np.asarray(prompt)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise TokenError(f"prompt: expected a flat list of token ids, found {ids.dtype} of shape {ids.shape}")
        if ids.size and (ids.min() < 0 or ids.max() >= self.n_vocab):
            worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise TokenError(f"prompt: expected token ids 0 to {self.n_vocab - 1}, found {worst}")
        history = _extension().TokenHistory(self.n_vocab)
        history.add_prompt(np.ascontiguousarray(ids, dtype=np.int32))
        return history

    def draw(
        self,
        logits: NDArray[np.float32],
        position: int,
        *,
        history: Any = None,
        allowed: Any = None,
        chance: bool = False,
    ) -> Draw:
        """Draw the token at `position` from its float32 logits [n_vocab]. chance: with `Draw.chance`.

        Raises NumericsError for NaN or +infinity, OptionError when the mask and the bias leave no token.
        """
        row = np.asarray(logits)
        if row.dtype != np.float32 or row.shape != (self.n_vocab,):
            raise OptionError(f"logits: expected float32 of shape ({self.n_vocab},), found {row.dtype} {row.shape}")
        ids = None if allowed is None else mask_ids(allowed, self.n_vocab)
        return Draw(*self._sampler.draw(np.ascontiguousarray(row), self.seed, position, history, ids, chance))


def fresh_seed() -> int:
    """An unpredictable seed, 0 to 2**64 - 1."""
    return int.from_bytes(os.urandom(8), "little")


def child_seed(seed: int, index: int) -> int:
    """The seed of the index-th stream derived from `seed` (a fork's): unrelated to it, and the same every time."""
    return int(_extension().child_seed(seed, index))


def mask_ids(allowed: Any, n_vocab: int) -> NDArray[np.int32]:
    """The token ids that a mask allows, int32. `allowed`: ids in any order, or n_vocab booleans. Raises OptionError."""
    if isinstance(allowed, Iterable) and not isinstance(allowed, (np.ndarray, str, bytes)):
        allowed = list(allowed)
    try:
        mask = np.asarray(allowed)
    except ValueError as error:
        raise OptionError(f"mask: expected token ids, found {type(allowed).__name__} that is no array") from error
    if mask.ndim != 1:
        raise OptionError(f"mask: expected a flat list of token ids, found {_found(allowed)} of shape {mask.shape}")
    if mask.dtype == np.bool_:
        if mask.size != n_vocab:
            raise OptionError(f"mask: expected {n_vocab} booleans, one for each token, found {mask.size}")
        return np.flatnonzero(mask).astype(np.int32)
    if mask.size == 0:
        raise OptionError("mask: expected at least one allowed token id, found none")
    if not np.issubdtype(mask.dtype, np.integer):
        raise OptionError(f"mask: expected token ids (integers) or booleans, found {mask.dtype}")
    low, high = int(mask.min()), int(mask.max())
    if low < 0 or high >= n_vocab:
        raise OptionError(f"mask: expected token ids 0 to {n_vocab - 1}, found {low if low < 0 else high}")
    return np.ascontiguousarray(mask, dtype=np.int32)


# What other libraries call an option, where no similar word would be found.
_ELSEWHERE = {
    "temp": "temperature", "n_predict": "max_tokens", "num_predict": "max_tokens", "grammar": "mask",
    "logits_processor": "mask", "logits_processors": "mask", "prompt_progress_callback": "progress",
}  # fmt: skip


def unknown_option(name: object, known: Iterable[str]) -> str:
    """What to say about an option name that does not exist."""
    options = sorted(known)
    if name == "stream":
        return "stream: unknown option; what generate returns is a stream: iterate over it, or call its finish()"
    if _ELSEWHERE.get(str(name)) in options:
        return f"{name}: unknown option; here it is {_ELSEWHERE[str(name)]}"
    close = difflib.get_close_matches(str(name), options, n=1, cutoff=0.6)
    return f"{name}: unknown option; " + (f"did you mean {close[0]}?" if close else f"expected {', '.join(options)}")


# ---------------------------------------------------------------- checks

# Range of every number, and what else its message should say.
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, ""),
    "top_p": (0.0, 1.0, " (1 is off)"),
    "min_p": (0.0, 1.0, " (0 is off)"),
    "presence_penalty": (-2.0, 2.0, " (0 is off)"),
    "frequency_penalty": (-2.0, 2.0, " (0 is off)"),
    "repetition_penalty": (0.01, 100.0, " (1 is off)"),
}
_INTEGERS: dict[str, tuple[int, int, str]] = {
    "top_k": (0, 2**31 - 1, " (0 or None is off)"),
    "seed": (0, MAX_SEED, " or None for a fresh one"),
    "top_logprobs": (0, MAX_TOP_LOGPROBS, ""),
}


def _refuse(problems: list[str]) -> None:
    if problems:
        raise OptionError("; ".join(problems))


def _found(value: object) -> str:
    return shown(value) if isinstance(value, (Real, str)) else type(value).__name__


def _number(name: str, value: object, low: float, high: float, hint: str) -> tuple[float, str | None]:
    wanted = f"{name}: expected a number from {low:g} to {high:g}{hint}, found "
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        return math.nan, wanted + _found(value)
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond every float
        number = math.inf
    return number, None if low <= number <= high else wanted + _found(value)  # NaN fails the comparison


def _integer(name: str, value: object, low: int, high: int, hint: str) -> tuple[int, str | None]:
    wanted = f"{name}: expected a whole number from {low} to {high}{hint}, found "
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        return 0, wanted + _found(value)
    number = int(value)
    return number, None if low <= number <= high else wanted + _found(value)


def _bias(value: object) -> tuple[dict[int, float], list[str]]:
    if not isinstance(value, Mapping):
        return {}, [f"logit_bias: expected a mapping of token id to number, found {_found(value)}"]
    bias: dict[int, float] = {}
    problems: list[str] = []
    for key, entry in value.items():
        token, wrong_key = _integer("logit_bias key", key, 0, 2**31 - 1, " (a token id)")
        if isinstance(entry, Real) and not isinstance(entry, bool) and entry == -math.inf:
            amount, wrong_entry = -math.inf, None
        else:
            name = f"logit_bias[{shown(key)}]"
            amount, wrong_entry = _number(name, entry, -100.0, 100.0, " or -inf to ban the token")
        problems += [text for text in (wrong_key, wrong_entry) if text]
        bias[token] = amount
    return bias, problems


def _checked(options: Mapping[str, object]) -> tuple[dict[str, Any], list[str]]:
    """The options as plain Python values without the ones that are None, and everything that is wrong with them."""
    values: dict[str, Any] = {f.name: f.default for f in fields(SamplingParams) if f.name in options}
    problems: list[str] = []
    for name, value in options.items():
        wrong: str | None = None
        if value is None:
            continue
        if name in _NUMBERS:
            values[name], wrong = _number(name, value, *_NUMBERS[name])
        elif name in _INTEGERS:
            values[name], wrong = _integer(name, value, *_INTEGERS[name])
        elif name == "logit_bias":
            values[name], wrong_entries = _bias(value)
            problems += wrong_entries
        elif not isinstance(value, (bool, np.bool_)):
            wrong = f"{name}: expected True or False, found {_found(value)}"
        else:
            values[name] = bool(value)
        problems += [wrong] if wrong else []
    temperature = values.get("temperature", 1.0)
    if 0 < temperature < MIN_TEMPERATURE:
        problems.append(f"temperature: expected 0 (the likeliest token) or at least 0.00001, found {temperature!r}")
    if values.get("top_logprobs", 0) > 0 and not values.get("logprobs", False):
        found = shown(values["top_logprobs"])
        problems.append(f"top_logprobs: needs logprobs=True, found top_logprobs={found} without it")
    return values, problems


def _extension() -> Any:
    return import_module("ds4v41._ext").sampling
