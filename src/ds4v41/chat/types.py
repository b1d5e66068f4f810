"""What a chat is made of, and what a streamed answer is made of."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

ContentBlock: TypeAlias = Mapping[str, Any]
Content: TypeAlias = str | Sequence[ContentBlock | str] | None


def to_json(value: Any) -> str:
    """JSON as the prompt format writes it: separators ", " and ": ", non-ASCII characters kept."""
    return json.dumps(value, ensure_ascii=False)


def _clip(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asks for.

    `arguments` are typed values; `raw` is the markup as the model wrote it (empty for a call that you made
    yourself); `namespace` is set for tools declared in one.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    raw: str = field(default="", compare=False)
    namespace: str | None = None

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text; the streamed argument deltas, joined, are exactly this."""
        return to_json(dict(self.arguments))

    @property
    def full_name(self) -> str:
        """`namespace::name`, or just the name."""
        return self.name if self.namespace is None else f"{self.namespace}::{self.name}"

    def to_dict(self) -> dict[str, Any]:
        """OpenAI style: arguments as JSON text."""
        out: dict[str, Any] = {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments_json},
        }
        if self.namespace is not None:
            out["namespace"] = self.namespace
        return out

    def __repr__(self) -> str:
        inner = ", ".join(f"{key}={_clip(repr(value), 40)}" for key, value in self.arguments.items())
        return f"ToolCall({self.full_name}({_clip(inner, 120)}), id={self.id!r})"


@dataclass(frozen=True)
class Message:
    """One message of a chat; what `ChatParser.finish` returns and what `render` accepts (as it does plain dicts).

    A generated message also has `token_ids`, exactly what the model produced, which `render` uses in place of the
    text as long as the message was not edited (`reasoning` is None if it was generated without thinking, "" if there
    was none), `finish_reason` ("stop", "length", "tool_calls" or what the caller
    gave), `stop` (the stop string that ended it), `problems` (everything that was irregular, in words) and
    `parse_error` (why a tool call could not be read; its markup is then part of `content`).
    """

    role: str
    content: Content = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    token_ids: tuple[int, ...] = field(default=(), compare=False)
    token_digest: str = field(default="", compare=False)
    finish_reason: str | None = field(default=None, compare=False)
    stop: str | None = field(default=None, compare=False)
    problems: tuple[str, ...] = field(default=(), compare=False)
    parse_error: str | None = field(default=None, compare=False)

    def digest(self) -> str:
        """Fingerprint of the text, reasoning and calls. `token_ids` speak for the message only while
        `token_digest` equals it."""
        return message_digest(self.content, self.reasoning, [(c.id, c.full_name, c.arguments) for c in self.tool_calls])

    def to_dict(self) -> dict[str, Any]:
        """A plain, JSON-able dict that `render` accepts; the token ids travel along."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.token_ids:
            out["token_ids"] = list(self.token_ids)
            out["token_digest"] = self.token_digest
        return out

    def __repr__(self) -> str:
        parts = [repr(self.role)]
        if self.reasoning:
            parts.append(f"reasoning={_clip(self.reasoning)!r}")
        if self.content:
            parts.append(f"content={_clip(self.content)!r}" if isinstance(self.content, str) else "content=[...]")
        if self.tool_calls:
            parts.append(f"tool_calls={list(self.tool_calls)!r}")
        for name in ("tool_call_id", "finish_reason", "parse_error"):
            if getattr(self, name) is not None:
                parts.append(f"{name}={getattr(self, name)!r}")
        if self.token_ids:
            parts.append(f"{len(self.token_ids)} tokens")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Notebook view: reasoning folded away, then the text, then the calls."""
        out = [f"<b>{html.escape(self.role)}</b>"]
        if self.reasoning:
            out.append(f"<details><summary>reasoning</summary><pre>{html.escape(self.reasoning)}</pre></details>")
        if self.content:
            text = self.content if isinstance(self.content, str) else to_json(list(self.content))
            out.append(f"<pre>{html.escape(text)}</pre>")
        out += [f"<pre>{html.escape(c.full_name)}({html.escape(c.arguments_json)})</pre>" for c in self.tool_calls]
        out += [f"<p><i>{html.escape(p)}</i></p>" for p in self.problems]
        return "".join(out)


def message_digest(
    content: Any, reasoning: str | None, calls: Sequence[tuple[str, str, Mapping[str, Any]]]
) -> str:
    """See Message.digest. A call is (id, full name, arguments); `None` and empty text are the same."""
    spelled = [content or "", reasoning or "", [[i, name, dict(arguments)] for i, name, arguments in calls]]
    return hashlib.sha256(json.dumps(spelled, default=str).encode()).hexdigest()[:32]


# streamed events ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More answer text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts the calls of this message, also those that turn out malformed."""

    index: int
    id: str
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the call's arguments, as JSON text."""

    index: int
    id: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete (`call`), or it is not one (`error` says why; discard its deltas, do not run it)."""

    index: int
    id: str
    call: ToolCall | None
    error: str | None = None


Event: TypeAlias = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallDelta | ToolCallEnd
