"""Every error this library raises on purpose, one class per kind of cause.

The message always says what was expected, what was found, where, and what to do about it.
The C++ extension throws exceptions that arrive here as these classes.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_SHOWN = 200


class Ds4Error(Exception):
    """Base class of all errors of this library."""


class OptionError(Ds4Error, ValueError):
    """An option has an unknown name, a wrong type or a value that is not supported."""


class ConfigError(Ds4Error, ValueError):
    """A model configuration is incomplete or contradicts itself. `problems` lists every fault found."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems)


class CheckpointError(Ds4Error):
    """A checkpoint cannot be used as it is. `problems` lists every fault found, each with file and offset."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems)


class MemoryPlanError(Ds4Error, MemoryError):
    """What was asked for does not fit in memory; the message has the numbers."""


class TokenError(Ds4Error, ValueError):
    """Token ids are out of range or the list of them is empty."""


class ContextError(Ds4Error, ValueError):
    """The context is full, or a prompt is longer than the context that is left."""


class StateError(Ds4Error, RuntimeError):
    """A session is closed, busy in another thread, or asked for a state that it does not have."""


class NumericsError(Ds4Error, ArithmeticError):
    """NaN or infinity where a finite number is needed."""


class EngramError(Ds4Error, OSError):
    """An Engram row could not be read: the message names file and offset."""


class BackendError(Ds4Error, RuntimeError):
    """A back end is not available on this machine or failed."""


class StoreError(Ds4Error, OSError):
    """A stored page, frontier or session file is damaged, foreign or cannot be written; the message names the file."""


class TokenizerError(Ds4Error, ValueError):
    """A tokenizer file is missing, damaged or does not belong to the model."""


class ChatError(Ds4Error, ValueError):
    """Messages or tools cannot be rendered as a prompt."""


class ManifestError(Ds4Error, ValueError):
    """A fidelity manifest is not what it should be. `problems` lists every fault found."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems)


class PullError(Ds4Error, RuntimeError):
    """A download failed, or what arrived is not what was published."""


class Cancelled(Ds4Error):
    """The work was cancelled from outside; the session is valid and holds what was complete."""


def shown(value: object) -> str:
    """What was found, for a message: its repr, but never endless, and never a failure of its own (a whole number of
    more than 4,300 digits has no text in Python)."""
    try:
        text = repr(value)
    except Exception:  # somebody else's __repr__ may do anything
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text):,} characters)"
