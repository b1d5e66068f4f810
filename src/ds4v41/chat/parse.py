"""Generated tokens -> reasoning, answer and tool calls, as they come."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ds4v41.chat.dsml import CallReader
from ds4v41.chat.prompt import Opens, Prompt
from ds4v41.chat.tokens import DSML, EOS, THINK_CLOSE, THINK_OPEN, TURN_MARKERS, VISIBLE
from ds4v41.chat.tools import ToolTypes, tool_schemas
from ds4v41.chat.types import ContentDelta, Event, Message, ReasoningDelta, message_digest
from ds4v41.errors import ChatError, OptionError, StateError, shown
from ds4v41.stops import StopMatcher
from ds4v41.tokenizer import Tokenizer

_MARKERS = (EOS, THINK_OPEN, THINK_CLOSE, DSML)


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ChatParser:
    """Takes an answer apart while it is generated.

    Markers count only as token ids: an answer that spells `</think>` or a tool call with ordinary tokens is text.
    Calls that are cut off or malformed come out as text, with the reason in `Message.parse_error`; everything
    irregular is listed in `Message.problems`. All deltas of a kind, joined, are the whole of that kind.

    >>> parser = ChatParser(tokenizer, thinking=True, tools=tools)      # doctest: +SKIP
    >>> for token in generated:                                         # doctest: +SKIP
    ...     for event in parser.push(token): ...
    ...     if parser.ended: break
    >>> message = parser.finish()                                       # doctest: +SKIP
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parse_tools: bool = True,
        stop: str | Sequence[str] = (),
        continues: bool = False,
        new_call_id: Callable[[], str] = _new_call_id,
    ) -> None:
        """thinking: the prompt opened the reasoning. continues: the prompt holds the beginning of the text, so
        leading newlines are kept. tools: declared tools, whose schemas type the arguments. parse_tools=False leaves
        markup as it is. stop: stop strings, looked for in the answer only. `tokenizer=None` is enough for
        `push_text`. Raises OptionError for a bad stop string, ChatError for bad tools.
        """
        problems: list[str] = []
        types = ToolTypes(tool_schemas(tools, "tools", problems))
        if problems:
            raise ChatError("these tools cannot be used: " + "; ".join(problems))
        self._tokenizer = tokenizer
        self._parse_tools = parse_tools
        self._reader = CallReader(types, new_call_id, self._out_call, self._out_given_back)
        self._stops = StopMatcher(stop)
        self._has_stops = bool(stop)
        self._state: Literal["reasoning", "answer", "done"] = "reasoning" if thinking else "answer"
        self._origin: Literal["reasoning", "answer"] = "answer"
        self._thinking = thinking
        self._at_start = not continues
        self._held = ""
        self._unlexed = ""
        self._events: list[Event] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._problems: list[str] = []
        self._ids: list[int] = []
        self._marks: list[tuple[int, int]] = []
        self._shown = self._fed = 0
        self._eos_seen = False
        self._after_end = 0
        self._message: Message | None = None
        self.tail_events: list[Event] = []
        """Events that `finish` produced: text that was still held back."""
        self._decoder = tokenizer.stream() if tokenizer is not None else None
        self._marker_ids, self._hidden = _token_roles(tokenizer)

    @classmethod
    def for_prompt(cls, tokenizer: Tokenizer, prompt: Prompt, **options: Any) -> ChatParser:
        """A parser that starts where `prompt` ends. Raises ChatError if there is nothing to generate after it."""
        opens: Opens = prompt.opens
        if opens == "nothing":
            raise ChatError("the conversation ends in a finished turn, so there is nothing to answer; add a user "
                            "message, or set prefix=True on the last assistant message to have it continued")
        return cls(tokenizer, thinking=opens.startswith("reasoning"), continues=opens.endswith("_more"), **options)

    @property
    def ended(self) -> bool:
        """True when the answer is over: end-of-sentence, a stop string, or a token that opens another turn."""
        return self._state == "done"

    @property
    def stop(self) -> str | None:
        """The stop string that was hit, or None."""
        return self._stops.hit

    # input -----------------------------------------------------------------------------------------------------

    def push(self, token_id: int) -> list[Event]:
        """One generated token -> what it adds. Tokens after the end are ignored (and counted in `problems`).

        Raises TokenError for an id out of range, StateError after `finish`.
        """
        if self._tokenizer is None or self._decoder is None:
            raise StateError("this parser has no tokenizer; make it with one, or use push_text")
        self._still_open()
        token_id = int(token_id)
        self._tokenizer.validate_ids((token_id,))
        if self._state == "done":
            self._after_end += 1
            return []
        marker, hidden = self._marker_ids.get(token_id), self._hidden.get(token_id)
        if hidden not in TURN_MARKERS or self._reader.inside_value:
            self._ids.append(token_id)
        if marker is None and hidden is None:
            self._text(self._decoder.push(token_id))
        else:
            self._text(self._decoder.flush())
            self._control(marker or hidden or "", hidden is not None)
        if self._has_stops and self._clean():
            self._marks.append((len(self._ids), self._fed + len(self._held)))
        return self._take()

    def push_text(self, text: str) -> list[Event]:
        """More text of an answer of which only the text is known. Here, markers are recognised by their spelling."""
        self._still_open()
        self._unlexed += text
        while self._unlexed and not self.ended:
            places = [(at, m) for m in _MARKERS if (at := self._unlexed.find(m)) >= 0]
            if not places:
                break
            at, marker = min(places)
            before, self._unlexed = self._unlexed[:at], self._unlexed[at + len(marker) :]
            self._text(before)
            if not self.ended:
                self._control(marker, False)
        if self.ended:
            self._unlexed = ""
            return self._take()
        keep = max((n for m in _MARKERS for n in range(1, len(m)) if self._unlexed.endswith(m[:n])), default=0)
        ready, self._unlexed = self._unlexed[: len(self._unlexed) - keep], self._unlexed[len(self._unlexed) - keep :]
        self._text(ready)
        return self._take()

    def finish(self, reason: str | None = None) -> Message:
        """The whole message. `reason` says why generation ended ("length", "cancelled", ...); by default it is
        "stop" if the answer ended by itself and "length" if not. A message with complete calls that ended by itself
        has "tool_calls". Events for text that was still held back are in `tail_events`."""
        if self._message is not None:
            return self._message
        if reason is not None and (not isinstance(reason, str) or not reason):
            raise OptionError(f"reason: expected text such as 'stop' or 'length', found {shown(reason)}")
        if self._state != "done":
            self._text(self._unlexed + (self._decoder.flush() if self._decoder is not None else ""))
        if self._state != "done":
            self._close()
        self.tail_events = self._take()
        self._message = self._build(reason)
        return self._message

    def _still_open(self) -> None:
        if self._message is not None:
            raise StateError("this answer is finished; make a new ChatParser for the next one")

    # state machine ---------------------------------------------------------------------------------------------

    def _clean(self) -> bool:
        """True when the tokens so far end where a piece of the answer's text does."""
        if self._state != "answer" or not self._reader.idle:
            return False
        return self._decoder is not None and not self._decoder.pending

    def _text(self, text: str) -> None:
        if not text or self._state == "done":
            return
        if not self._reader.idle:
            self._reader.text(text)
            return
        text = self._held + text
        if self._at_start:
            text = text.lstrip("\n")
        cut = len(text) - (2 if text.endswith("</") else int(text.endswith("<")))
        while cut and text[cut - 1] == "\n":
            cut -= 1
        self._held = text[cut:]
        self._out(text[:cut], self._state)
        if text:
            self._at_start = False

    def _control(self, marker: str, hidden: bool) -> None:
        if marker == EOS:
            self._eos_seen = True
            self._close()
        elif not self._reader.idle and marker != DSML:
            self._control_in_call(marker, hidden)
        elif hidden:
            self._stray(marker)
        elif marker == DSML:
            self._dsml()
        elif marker == THINK_CLOSE and self._state == "reasoning":
            self._out(self._held.rstrip("\n"), "reasoning")
            self._held, self._state, self._at_start = "", "answer", True
        elif not (marker == THINK_OPEN and self._state == "reasoning" and not self._reasoning and not self._held):
            self._problems.append(f"a stray {marker} was left out")

    def _control_in_call(self, marker: str, hidden: bool) -> None:
        if self._reader.literal(marker):
            self._problems.append(f"the control token {marker} inside an argument was taken as text")
        elif hidden:
            self._stray(marker)
        elif marker == THINK_CLOSE and self._origin == "reasoning":
            self._reader.abandon()
            if self._reader.idle:
                self._state = "reasoning"
                self._control(marker, False)

    def _stray(self, marker: str) -> None:
        """A control token that has no business in an answer. It never becomes text."""
        if marker in TURN_MARKERS:
            self._problems.append(f"the control token {marker} opens another turn: the answer ends there")
            self._eos_seen = True
            self._close()
        else:
            self._problems.append(f"the control token {marker} was left out")

    def _dsml(self) -> None:
        if not self._parse_tools:
            self._out(self._held + DSML, self._state)
            self._held, self._at_start = "", False
        elif not self._reader.idle and self._reader.marker():
            pass
        elif self._held.endswith("<"):
            before, self._held = self._held, ""
            self._marks = [mark for mark in self._marks if mark[1] <= self._fed]
            self._origin = "reasoning" if self._state == "reasoning" else "answer"
            self._state, self._at_start = "answer", self._at_start and self._origin == "answer"
            self._reader.open(before)
        else:
            self._reader.errors.append("a tool-call marker outside of a tag is shown as text")
            self._out(self._held + DSML, self._state)
            self._held, self._at_start = "", False

    def _close(self) -> None:
        """The answer is over; give out what is held back."""
        self._reader.end("the answer ended there" if self._eos_seen else "the output was cut off")
        if self._state != "done":
            self._out(self._held, self._state)
        self._held = ""
        if self._state != "done":
            self._show(self._stops.flush())
        self._state = "done"

    # output ----------------------------------------------------------------------------------------------------

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _out(self, text: str, kind: str) -> None:
        if not text or self._state == "done":
            return
        if kind == "reasoning":
            self._reasoning.append(text)
            self._events.append(ReasoningDelta(text))
            return
        self._fed += len(text)
        ready, hit = self._stops.push(text)
        self._show(ready)
        if hit is not None:
            self._state, self._held = "done", ""

    def _show(self, text: str) -> None:
        if text:
            self._shown += len(text)
            self._content.append(text)
            self._events.append(ContentDelta(text))

    def _out_call(self, event: Event) -> None:
        self._show(self._stops.flush())
        self._events.append(event)

    def _out_given_back(self, text: str, to_origin: bool) -> None:
        """Text which looked like markup and is none."""
        if not self._reader.idle:
            self._out(text, "answer")
            return
        if to_origin:
            self._state = self._origin if self._state != "done" else "done"
        self._text(text)

    # result ----------------------------------------------------------------------------------------------------

    def _build(self, reason: str | None) -> Message:
        reader = self._reader
        problems = [*self._problems, *reader.problems, *reader.errors]
        left_out = "".join(reader.left_out).strip()
        if left_out:
            problems.append(f"text after the tool calls was left out: {left_out!r}")
        if self._after_end:
            problems.append(f"tokens ignored after the end: {self._after_end}")
        ended = self._eos_seen or self._stops.hit is not None
        reason = reason or ("stop" if ended else "length")
        if reason == "stop" and reader.calls and self._stops.hit is None:
            reason = "tool_calls"
        content, reasoning = "".join(self._content), "".join(self._reasoning) if self._thinking else None
        ids = self._kept_ids()
        calls = tuple(reader.calls)
        digest = message_digest(content, reasoning, [(c.id, c.full_name, c.arguments) for c in calls]) if ids else ""
        return Message("assistant", content, reasoning, calls, token_ids=ids, token_digest=digest, finish_reason=reason,
                       stop=self._stops.hit, problems=_counted(problems),
                       parse_error="; ".join(_counted(reader.errors)) or None)

    def _kept_ids(self) -> tuple[int, ...]:
        """The ids that spell the message. A stop string cuts them if it begins where a token does; otherwise there
        are none, and the text is encoded anew when the message is sent back."""
        if self._stops.hit is None:
            return tuple(self._ids)
        exact = [n for n, fed in self._marks if fed == self._shown]
        return tuple(self._ids[: exact[-1]]) if exact else ()


def _counted(remarks: Sequence[str]) -> tuple[str, ...]:
    """Each remark once, with the number of times it was made."""
    times = Counter(remarks)
    return tuple(remark if n == 1 else f"{remark} ({n} times)" for remark, n in times.items())


def _token_roles(tokenizer: Tokenizer | None) -> tuple[dict[int, str], dict[int, str]]:
    """(ids that steer the parser, ids that must not appear in an answer), each id -> its text."""
    if tokenizer is None:
        return {}, {}
    markers = {i: m for m in _MARKERS if (i := tokenizer.find_control(m)) is not None}
    visible = {tokenizer.find_control(text) for text in VISIBLE}
    hidden = {i: tokenizer.token_text(i) for i in tokenizer.special_ids if i not in markers and i not in visible}
    return markers, hidden
