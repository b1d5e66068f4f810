"""Chat: messages -> prompt (`render`), generated tokens -> message (`ChatParser`)."""

from __future__ import annotations

from ds4v41.chat.parse import ChatParser
from ds4v41.chat.prompt import Control, Prompt, Replay, Segment, Text
from ds4v41.chat.render import render, resolve_effort
from ds4v41.chat.types import (
    ContentDelta,
    Event,
    Message,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

__all__ = [
    "ChatParser",
    "ContentDelta",
    "Control",
    "Event",
    "Message",
    "Prompt",
    "ReasoningDelta",
    "Replay",
    "Segment",
    "Text",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "render",
    "resolve_effort",
]
