"""The mask hook of one text: asked once for each list of tokens, by the text itself or ahead of it by its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sampling import mask_ids

MaskHook = Callable[[list[int]], Any]
"""Constrained decoding: generated token ids so far -> allowed ids (or one bool a token), or None for no limit. The
answer must depend on the ids alone: with a drafter the hook is also asked about texts that never come to be."""
_Ids = NDArray[np.int32] | None


class Masks:
    """Calls the hook and keeps its answers about texts that may still come."""

    def __init__(self, hook: MaskHook, n_vocab: int) -> None:
        self._hook, self._n_vocab = hook, n_vocab
        self._ahead: list[tuple[list[int], _Ids]] = []

    def at(self, tokens: Sequence[int]) -> Any:
        """What may follow the text so far. Answers about other texts of this length or less are forgotten."""
        known = next((ids for text, ids in self._ahead if text == tokens), ...)
        self._ahead = [(text, ids) for text, ids in self._ahead if len(text) > len(tokens)]
        return self._hook(list(tokens)) if known is ... else known

    def ahead(self, tokens: Sequence[int]) -> _Ids:
        """What may follow a text that is only expected. Raises what the hook raises; OptionError for a wrong answer."""
        answer = self._hook(list(tokens))
        ids = None if answer is None else np.array(mask_ids(answer, self._n_vocab))
        self._ahead.append((list(tokens), ids))
        return ids
