"""Reads the tool-call markup of an answer, piece by piece.

The caller tells apart text and the marker token: a marker that is only spelled in text is text. Well-formed calls
come out as events; everything else is given back as text together with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ds4v41.chat.tokens import DSML
from ds4v41.chat.tools import ToolTypes, parse_value, split_namespace
from ds4v41.chat.types import Event, ToolCall, ToolCallDelta, ToolCallEnd, ToolCallStart, to_json

_PARAMETER = re.compile(r'\s*parameter\s+name="(?P<name>.*?)"\s+string="(?P<string>true|false)"\s*>', re.DOTALL)
_TAG = re.compile(r"""\s*(?P<tag>[\w.-]+)(?P<attributes>(?:\s+[\w.-]+\s*=\s*(?:"[^"]*"|'[^']*'))*)\s*(?P<end>/?)>""")
_ATTRIBUTE = re.compile(r"""([\w.-]+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_VALUE_END = re.compile(r"\s*parameter\s*>")
_VALUE_END_BEGINS = re.compile(r"\s*(?:p(?:a(?:r(?:a(?:m(?:e(?:t(?:e(?:r\s*)?)?)?)?)?)?)?)?)?")
_KNOWN_TAGS = ("calls", "tool_calls", "invoke", "parameter")
_TAG_LIMIT = 4096


@dataclass(slots=True)
class _Tag:
    """One complete tag: `<｜DSML｜ name attributes>` or `</｜DSML｜ name>`."""

    name: str
    attributes: dict[str, str]
    closing: bool
    self_closing: bool
    text: str


@dataclass(slots=True)
class _Invoke:
    """The call that is being read. `start` is where it begins in the text of the block."""

    start: int
    index: int = -1
    id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    body: str = ""
    error: str | None = None

    @property
    def full_name(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}::{self.name}"


@dataclass(slots=True)
class _Value:
    """The parameter that is being read. `shown` says that its text is streamed as it comes."""

    name: str
    marked_text: bool | None
    types: frozenset[str] | None
    repeated: bool
    shown: bool
    text: list[str] = field(default_factory=list)
    end_tag: str = ""
    between: str = ""


class CallReader:
    """Reads from the first tag of an answer on. One object reads all call blocks of the answer.

    Feed `text`, `marker` (the token in the middle of a tag) and `literal` (another control token, for what it
    spells), then `end`. Events go to `emit`. `give_back(text, to_origin)` gets text that turned out not to be markup:
    it belongs where the block began, or into the answer. When `idle` is True after that, the block is over.
    """

    def __init__(self, types: ToolTypes, new_id: Callable[[], str], emit: Callable[[Event], None],
                 give_back: Callable[[str, bool], None]) -> None:
        self._types, self._new_id, self._emit, self._give_back = types, new_id, emit, give_back
        self.calls: list[ToolCall] = []
        self.problems: list[str] = []
        self.errors: list[str] = []
        self.left_out: list[str] = []
        self.idle = True
        self._started = 0
        self._reset()

    def _reset(self) -> None:
        self._seen: list[str] = []
        self._length = 0
        self._buffer = ""
        self._tag: Literal["", "<", "</"] = ""
        self._tried = 0
        self._units = 0
        self._gap = ""
        self._invoke: _Invoke | None = None
        self._value: _Value | None = None

    # input -----------------------------------------------------------------------------------------------------

    def open(self, before: str) -> None:
        """A block begins: `before` is the blank lines and the `<` in front of the marker that was just seen."""
        self.idle = False
        self._reset()
        self._note(before)
        self._buffer = before.lstrip("\n")
        self.marker()

    @property
    def inside_value(self) -> bool:
        """True between the tags of a parameter."""
        return not self.idle and self._value is not None and not self._value.end_tag

    def text(self, text: str) -> None:
        """Ordinary text."""
        self._note(text)
        self._buffer += text
        self._advance()

    def literal(self, text: str) -> bool:
        """A control token that is not the marker. Inside a value it is taken for what it spells (True)."""
        if not self.inside_value:
            return False
        self.text(text)
        return True

    def marker(self) -> bool:
        """The marker token. False when the block turned out to be over before it, so it was not used."""
        if self._tag:
            self._broken_tag("a marker inside a tag")
            if self.idle:
                return False
        opener: Literal["", "<", "</"] = ""
        if self._buffer.endswith("</"):
            opener = "</"
        elif self._buffer.endswith("<"):
            opener = "<"
        if not opener or (self.inside_value and opener == "<"):
            self._note(DSML)
            self._buffer += DSML
            self._advance()
            return True
        ready, self._buffer = self._buffer[: len(self._buffer) - len(opener)], opener
        self._flush(ready)
        if self.idle:
            return False
        self._note(DSML)
        self._buffer, self._tag, self._tried = "", opener, 0
        return True

    def abandon(self) -> None:
        """Reasoning ended inside the block: if a call is unfinished, all of it was a quotation."""
        if self.calls or (self._invoke is None and self._units):
            return
        start = self._invoke.start if self._invoke is not None and self._units > 1 else 0
        self._fail_invoke("the reasoning ended before the call did")
        self._restore(start, to_origin=True)

    def end(self, why: str) -> None:
        """No more input."""
        if self.idle:
            return
        invoke = self._invoke
        if invoke is not None:
            place = f" inside parameter {self._value.name!r}" if self._value is not None and self.inside_value else ""
            self._fail_invoke(f"{why}{place}")
            self._restore(invoke.start, to_origin=not invoke.id)
        elif not self._units or self._tag:
            self.errors.append(f"tool-call markup is incomplete: {why}")
            self._restore(0 if not self._units else self._length - len(self._buffer) - len(DSML) - len(self._tag),
                          to_origin=not self._units)
        elif self._buffer:
            rest, self._buffer = self._buffer, ""
            self._flush(rest)
        self.idle = True

    # pieces ----------------------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self._seen.append(text)
        self._length += len(text)

    def _advance(self) -> None:
        """Use as much of the buffer as can be decided now."""
        if self._tag:
            self._read_tag()
            return
        keep = 2 if self._buffer.endswith("</") else int(self._buffer.endswith("<"))
        ready, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        self._flush(ready)

    def _flush(self, text: str) -> None:
        """Text between tags, or of a value."""
        if not text:
            return
        if self._value is not None:
            if self._value.end_tag:
                self._value.between += text
            else:
                self._grow_value(text)
        elif self._invoke is not None:
            self._invoke.body += text
        elif self.calls:
            self.left_out.append(text)
        else:
            self._gap += text
            if self._gap.strip():
                self._stray(self._gap)

    def _stray(self, text: str) -> None:
        """Text where only tags may stand, outside of a call."""
        if self.calls:
            self.left_out.append(text)
        elif self._units:
            self.idle = True
            held, self._buffer = self._buffer, ""
            self._give_back(text + held, False)
        else:
            self.errors.append("tool-call markup without a call in it is shown as text")
            self._restore(0, to_origin=True)

    def _restore(self, start: int, to_origin: bool) -> None:
        """Give back the text from `start` on, and be done with the block."""
        self.idle = True
        self._give_back("".join(self._seen)[start:], to_origin)
        self._reset()

    def _read_tag(self) -> None:
        if self.inside_value:
            self._read_value_end()
            return
        while (at := self._buffer.find(">", self._tried)) >= 0:
            self._tried = at + 1
            tag = self._parse_tag(self._buffer[: at + 1])
            if tag is not None:
                rest = self._buffer[at + 1 :]
                self._buffer, self._tag = "", ""
                self._on_tag(tag, self._length - len(rest))
                self._after_tag(rest)
                return
        if len(self._buffer) > _TAG_LIMIT:
            self._broken_tag("a tag that does not end")

    def _after_tag(self, rest: str) -> None:
        if self.idle:
            if rest and self._length:  # after _restore, which clears the length, it was given back already
                self._give_back(rest, False)
            return
        self._buffer = rest
        self._advance()

    def _parse_tag(self, text: str) -> _Tag | None:
        closing = self._tag == "</"
        full = f"{self._tag}{DSML}{text}"
        strict = None if closing else _PARAMETER.fullmatch(text)
        if strict is not None:
            return _Tag("parameter", strict.groupdict(), False, False, full)
        loose = _TAG.fullmatch(text)
        if loose is None:
            return None
        attributes = {k: a or b for k, a, b in _ATTRIBUTE.findall(loose["attributes"])}
        return _Tag(loose["tag"], attributes, closing, bool(loose["end"]), full)

    def _broken_tag(self, reason: str) -> None:
        """What began like a tag is none: text."""
        text = f"{self._tag}{DSML}{self._buffer}"
        self._tag, self._buffer = "", ""
        if self.inside_value:
            self._buffer = text
            self._advance()
        elif self._invoke is not None:
            self._spoil(reason)
            self._buffer = text
            self._advance()
        else:
            self._stray(text)

    # tags ------------------------------------------------------------------------------------------------------

    def _on_tag(self, tag: _Tag, end: int) -> None:
        start = end - len(tag.text)
        self._gap = ""
        if tag.name not in _KNOWN_TAGS:
            self.problems.append(f"the tag {tag.text[:60]!r} was taken for the {'end' if tag.closing else 'start'} of "
                                 "the calls")
        if self._value is not None and not self._close_value(tag):
            return
        invoke = self._invoke
        if tag.name == "invoke" and not tag.closing:
            if invoke is not None:
                self._unclosed(start)
            self._open_invoke(tag, start, end)
        elif invoke is not None and tag.closing and tag.name == "invoke":
            self._close_invoke(end)
        elif invoke is not None and tag.closing and tag.name != "parameter":
            self._unclosed(start)
            self._close_block()
        elif invoke is not None:
            if tag.name == "parameter" and not tag.closing and "name" in tag.attributes:
                self._open_value(invoke, tag)
            else:
                self._spoil(f"{tag.text[:60]!r} cannot stand in a call")
        elif tag.name == "parameter" and not self._units:
            self._stray(tag.text)
        elif tag.name in ("parameter", "invoke"):
            self.problems.append(f"{tag.text[:60]!r} stands outside of a call")
        elif tag.closing:
            self._close_block()

    def _close_block(self) -> None:
        if self.calls:
            return
        if self._units:
            self.idle = True
        else:
            self.errors.append("tool-call markup without a call in it is shown as text")
            self._restore(0, to_origin=True)

    def _open_invoke(self, tag: _Tag, start: int, end: int) -> None:
        self._units += 1
        invoke = self._invoke = _Invoke(start)
        name = tag.attributes.get("name", "")
        if not name:
            self._spoil("the call has no name")
            return
        try:
            invoke.namespace, invoke.name = split_namespace(name, None)
        except ValueError:
            invoke.name = name
        invoke.index, invoke.id = self._started, self._new_id()
        self._started += 1
        if self._types.declared and invoke.full_name not in self._types:
            self.problems.append(f"the tool {name!r} was not declared")
        self._emit(ToolCallStart(invoke.index, invoke.id, invoke.name, invoke.namespace))
        if tag.self_closing:
            self._close_invoke(end)

    def _unclosed(self, end: int) -> None:
        """Another tag ends the call. With complete parameters that is good enough."""
        invoke = self._invoke
        assert invoke is not None
        if invoke.arguments and invoke.error is None:
            self.problems.append(f"call {invoke.full_name!r} was not closed")
        elif invoke.error is None:
            self._spoil("the call was not closed")
        self._close_invoke(end)

    def _close_invoke(self, end: int) -> None:
        invoke = self._invoke
        assert invoke is not None
        if invoke.error is None and invoke.body.strip():
            self._read_body(invoke)
        raw = "".join(self._seen)[invoke.start : end]
        if invoke.error is not None:
            self._fail_invoke(invoke.error)
            self._give_back(raw, False)
            return
        self._send(invoke, "}" if invoke.arguments else "{}")
        call = ToolCall(invoke.id, invoke.name, invoke.arguments, raw, invoke.namespace)
        self.calls.append(call)
        self._emit(ToolCallEnd(invoke.index, invoke.id, call))
        self._invoke = None

    def _read_body(self, invoke: _Invoke) -> None:
        """Some models write the arguments as one JSON object."""
        try:
            value = json.loads(invoke.body) if not invoke.arguments else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, Mapping):
            self._spoil("text that is neither a parameter nor a JSON object")
            return
        for key, item in value.items():
            self._begin_argument(invoke, key)
            self._send(invoke, to_json(item))
            invoke.arguments[key] = item

    def _spoil(self, reason: str) -> None:
        """The call cannot be used. Reading goes on, to find its end."""
        assert self._invoke is not None
        self._invoke.error = self._invoke.error or reason
        self._value = None

    def _fail_invoke(self, reason: str) -> None:
        invoke = self._invoke
        if invoke is None:
            return
        reason = invoke.error or reason
        what = f"tool call {invoke.full_name!r}" if invoke.name else "a tool call"
        self.errors.append(f"{what} is shown as text: {reason}")
        if invoke.id:
            self._emit(ToolCallEnd(invoke.index, invoke.id, None, reason))
        self._invoke = None

    # values ----------------------------------------------------------------------------------------------------

    def _open_value(self, invoke: _Invoke, tag: _Tag) -> None:
        if invoke.error is not None:
            return
        if invoke.body.strip():
            self._spoil("text that is neither a parameter nor a JSON object")
            return
        name = tag.attributes["name"]
        mark = {"true": True, "false": False}.get(tag.attributes.get("string", ""))
        types = self._types.of(invoke.full_name, name)
        repeated = name in invoke.arguments
        shown = mark is True and (types is None or "string" in types) and not repeated
        self._value = _Value(name, mark, types, repeated, shown)
        if not repeated:
            self._begin_argument(invoke, name)
        if shown:
            self._send(invoke, '"')
        if tag.self_closing:
            self._value.end_tag = tag.text

    def _begin_argument(self, invoke: _Invoke, name: str) -> None:
        self._send(invoke, f"{', ' if invoke.arguments else '{'}{to_json(name)}: ")

    def _send(self, invoke: _Invoke, text: str) -> None:
        if text:
            self._emit(ToolCallDelta(invoke.index, invoke.id, text))

    def _grow_value(self, text: str) -> None:
        assert self._value is not None and self._invoke is not None
        self._value.text.append(text)
        if self._value.shown:
            self._send(self._invoke, to_json(text)[1:-1])

    def _read_value_end(self) -> None:
        """After `</` and the marker inside a value: is it the closing tag of the parameter?"""
        assert self._value is not None
        match = _VALUE_END.match(self._buffer)
        if match is not None:
            rest = self._buffer[match.end() :]
            self._value.end_tag = f"</{DSML}{match.group()}"
            self._buffer, self._tag = rest, ""
            self._advance()
        elif not _VALUE_END_BEGINS.fullmatch(self._buffer):
            self._broken_tag("")

    def _close_value(self, tag: _Tag) -> bool:
        """A tag follows the closing tag of a value: finish the value, and go on with the tag (True).

        Text between the two tags means that the value only quoted its closing tag, if another closing tag follows;
        else the call is spoiled.
        """
        value, invoke = self._value, self._invoke
        assert value is not None and invoke is not None
        between = value.between
        if tag.closing and tag.name == "parameter":
            if between.strip():
                quoted = value.end_tag + between
                value.end_tag, value.between = tag.text, ""
                self._grow_value(quoted)
            else:
                self._spoil(f"parameter {value.name!r} is closed twice")
            return False
        self._value = None
        if between.strip():
            self._spoil(f"text after parameter {value.name!r}")
            return True
        self._set_argument(invoke, value)
        return True

    def _set_argument(self, invoke: _Invoke, value: _Value) -> None:
        result, remark = parse_value("".join(value.text), value.marked_text, value.types)
        if remark is not None:
            self.problems.append(f"{invoke.full_name}, parameter {value.name!r}: {remark}")
        if value.repeated:
            if to_json(invoke.arguments[value.name]) != to_json(result):
                self._spoil(f"parameter {value.name!r} is given twice, with different values")
            return
        self._send(invoke, '"' if value.shown else to_json(result))
        invoke.arguments[value.name] = result
