"""ds4v41: DeepSeek V4.1 Flash on your own machine, from Python.

>>> import ds4v41
>>> with ds4v41.Model.open() as model, model.session() as session:
...     text = session.generate("def add(a, b):", max_tokens=12, temperature=0).finish().text
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    BackendError,
    Cancelled,
    ChatError,
    CheckpointError,
    ConfigError,
    ContextError,
    Ds4Error,
    EngramError,
    MemoryPlanError,
    NumericsError,
    OptionError,
    StateError,
    StoreError,
    TokenError,
    TokenizerError,
)

if TYPE_CHECKING:
    from .admission import DrafterStats as DrafterStats
    from .chat import Message as Message
    from .chat import ToolCall as ToolCall
    from .chatting import ChatStream as ChatStream
    from .chatting import Reply as Reply
    from .drafter import Drafter as Drafter
    from .generation import Generation as Generation
    from .kvstore import KVStore as KVStore
    from .kvstore import PruneResult as PruneResult
    from .kvstore import PutResult as PutResult
    from .kvstore import StoreStats as StoreStats
    from .kvstore import VerifyResult as VerifyResult
    from .model import Model as Model
    from .results import Completion as Completion
    from .results import Piece as Piece
    from .results import Progress as Progress
    from .results import Stats as Stats
    from .results import Timings as Timings
    from .results import TokenLogprob as TokenLogprob
    from .results import Usage as Usage
    from .sampling import SamplingParams as SamplingParams
    from .session import Mark as Mark
    from .session import Session as Session
    from .tokenizer import Tokenizer as Tokenizer

__version__ = "0.1.0"

# Loaded when first used: `import ds4v41` stays fast.
_LAZY = {
    "ChatStream": "chatting",
    "Completion": "results",
    "Drafter": "drafter",
    "DrafterStats": "admission",
    "Generation": "generation",
    "KVStore": "kvstore",
    "PruneResult": "kvstore",
    "PutResult": "kvstore",
    "StoreStats": "kvstore",
    "VerifyResult": "kvstore",
    "Mark": "session",
    "Message": "chat",
    "Model": "model",
    "Piece": "results",
    "Progress": "results",
    "Reply": "chatting",
    "SamplingParams": "sampling",
    "Session": "session",
    "Stats": "results",
    "Timings": "results",
    "TokenLogprob": "results",
    "Tokenizer": "tokenizer",
    "ToolCall": "chat",
    "Usage": "results",
}

__all__ = [
    "BackendError",
    "Cancelled",
    "ChatError",
    "ChatStream",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "ContextError",
    "Drafter",
    "DrafterStats",
    "Ds4Error",
    "EngramError",
    "Generation",
    "KVStore",
    "Mark",
    "MemoryPlanError",
    "Message",
    "Model",
    "NumericsError",
    "OptionError",
    "Piece",
    "Progress",
    "PruneResult",
    "PutResult",
    "Reply",
    "SamplingParams",
    "Session",
    "StateError",
    "Stats",
    "StoreError",
    "StoreStats",
    "Timings",
    "TokenError",
    "TokenLogprob",
    "Tokenizer",
    "TokenizerError",
    "ToolCall",
    "Usage",
    "VerifyResult",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
