"""Penalties, filters and keyed draws."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class TokenHistory:
    """The tokens that penalties see; see docs/sampling.md."""

    def __init__(self, n_vocab: int) -> None: ...

    def __copy__(self) -> TokenHistory: ...

    def copy(self) -> TokenHistory:
        """An independent copy, for a fork."""

    def add_prompt(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Tokens of the prompt (int32): they count for the repetition penalty."""

    def add(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Generated tokens (int32): they count for all penalties."""

    def drop(self, n: int) -> None:
        """Take back the last n generated tokens."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_generated(self) -> int: ...

class Sampler:
    """Draws tokens with one set of options. Safe to share between threads."""

    def __init__(self, n_vocab: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0, repetition_penalty: float = 1.0, logit_bias: Sequence[tuple[int, float]] = [], logprobs: bool = False, top_logprobs: int = 0, plain: bool = False) -> None: ...

    def draw(self, logits: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], seed: int, position: int, history: TokenHistory | None = None, allowed: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, chance: bool = False) -> tuple:
        """
        logits [n_vocab] float32, allowed int32 ids -> (token, logprob or None, ((token, logprob), ...), n_kept); with `chance` a fifth: how likely the likeliest token is after bias, penalties and mask, at temperature 1.
        """

    def draw_many(self, logits: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], seeds: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], positions: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], history: TokenHistory | None = None, allowed: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> NDArray[numpy.int32]:
        """The same row drawn for every (seed, position): tokens [n] int32."""

    @property
    def needs_history(self) -> bool: ...

    @property
    def n_vocab(self) -> int: ...

def noise(seed: int, position: int, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> NDArray[numpy.float32]:
    """The Gumbel noise of tokens at one position."""

def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 of 4 counter words and 2 key words."""

def child_seed(seed: int, index: int) -> int:
    """The seed of the index-th stream derived from a seed."""
