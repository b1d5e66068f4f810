"""The numeric class of each token: a history is token ids in which those of the matrix class carry a tag."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MATRIX_TAG = 1 << 30
"""Added to the id of a token that is computed in the matrix class: a state is named by its history."""


def tagged_with(ids: NDArray[np.int32], matrix: bool) -> NDArray[np.int32]:
    """Tokens [n] that are all to be computed in one class."""
    return ids | np.int32(MATRIX_TAG) if matrix else ids.copy()


def classes_of(history: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """The ids [n] of a history [n], and which of them are of the matrix class."""
    return history & np.int32(~MATRIX_TAG), (history & np.int32(MATRIX_TAG)) != 0


def history_of(
    ids: NDArray[np.int32], history: NDArray[np.int32], common: int, matrix: bool
) -> NDArray[np.int32]:
    """A prompt as it is computed here: what the session shares with it as that was computed (`history`), run again or
    not, the rest in the class of prompts."""
    tagged = tagged_with(ids, matrix)
    tagged[:common] = history[:common]
    return tagged
