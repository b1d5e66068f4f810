"""Messages -> prompt, as the model was trained to read them (see docs/decisions/0003-chat-rendering.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from ds4v41.chat.messages import Part, Reader, Revision, Turn
from ds4v41.chat.prompt import Control, Opens, Prompt, Replay, Segment, Text
from ds4v41.chat.tokens import (
    ASSISTANT,
    BOS,
    DEFAULT_EFFORT,
    EFFORT_LEVELS,
    EOS,
    IMAGE,
    REMINDER,
    SYSTEM,
    TASKS,
    THINK_CLOSE,
    THINK_OPEN,
    USER,
)
from ds4v41.chat.tools import calls_block, format_block, tool_schemas, tools_block
from ds4v41.chat.types import Message
from ds4v41.errors import OptionError, shown


def resolve_effort(effort: int | str | None) -> int:
    """Reasoning effort as a number 1..100: an int, "low" (50), "high" (75), "max" (100), or None (75).

    Raises OptionError for anything else. Other names (medium, xhigh, ...) mean different numbers in different
    programs, so they are refused and not guessed.
    """
    if effort is None:
        return DEFAULT_EFFORT
    if type(effort) is int and 1 <= effort <= 100:
        return effort
    if isinstance(effort, str) and effort in EFFORT_LEVELS:
        return EFFORT_LEVELS[effort]
    names = ", ".join(f"{name!r} ({value})" for name, value in EFFORT_LEVELS.items())
    raise OptionError(f"reasoning_effort: expected an int from 1 to 100 or one of {names}, found {shown(effort)}")


def render(
    messages: Sequence[Mapping[str, Any] | Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Literal["auto", "none"] | None = None,
    response_format: Mapping[str, Any] | None = None,
    thinking: bool = True,
    reasoning_effort: int | str | None = DEFAULT_EFFORT,
    revision: Revision = "dba1be0",
    drop_thinking: bool = True,
    context: Sequence[Mapping[str, Any] | Message] = (),
    add_bos: bool = True,
) -> Prompt:
    """Render a conversation.

    messages: dicts in OpenAI / DeepSeek style, or `Message` objects. Roles: system, user, assistant, tool,
        latest_reminder.
    tools, response_format: shown in the first system message (one is added when the conversation has none).
        With `tool_choice="none"` the tools are not shown at all.
    thinking: open the answer with reasoning. `reasoning_effort` (1..100 or low, high, max) is then written in front.
    revision: "dba1be0", or "1017" for the encoder of the later checkpoint: a user turn that holds only tool results
        does not count as the last user turn, and unknown blocks in tool results are shown.
    drop_thinking: leave out the reasoning of turns before the last user turn. Declared tools turn it off.
    context: messages that are in the model already; only what follows them is rendered.
    add_bos: begin with the begin-of-sentence token (never written after a context).

    A generated message keeps the ids the model produced, so a conversation that is sent back encodes to the same
    ids. Raises ChatError with every problem of the messages, OptionError for an option.
    """
    effort = resolve_effort(reasoning_effort)
    _check_options(thinking, revision, drop_thinking, add_bos, tool_choice)
    reader = Reader(revision)
    before, turns = reader.turns(context, "context"), reader.turns(messages, "messages")
    schemas = tool_schemas(tools, "tools", reader.problems)
    wanted_format = reader.response_format(response_format, "response_format")
    _declare(before or turns, schemas, wanted_format, reader)
    reader.done()
    every = [*before, *turns]
    if tool_choice == "none":
        for turn in every:
            turn.schemas = []
    _check_open_ends(every, thinking, reader)
    reader.done()
    _sort_results(every)
    writer = _Writer(every, thinking, effort, drop_thinking and not any(t.schemas for t in every), revision)
    segments: list[Segment] = [Control(BOS)] if add_bos and not before else []
    for i in range(len(before), len(every)):
        segments += writer.turn(i)
    notes = reader.notes + writer.lost_tasks(len(before))
    return Prompt(tuple(s for s in segments if not isinstance(s, Text) or s.text), thinking, writer.opens(),
                  tuple(writer.images), tuple(notes))


def _check_options(thinking: Any, revision: Any, drop_thinking: Any, add_bos: Any, tool_choice: Any) -> None:
    for name, flag in (("thinking", thinking), ("drop_thinking", drop_thinking), ("add_bos", add_bos)):
        if not isinstance(flag, bool):
            raise OptionError(f"{name}: expected True or False, found {shown(flag)}")
    if not isinstance(revision, str) or revision not in get_args(Revision):
        raise OptionError(f"revision: expected one of {', '.join(get_args(Revision))}, found {shown(revision)}")
    if tool_choice is not None and (not isinstance(tool_choice, str) or tool_choice not in ("auto", "none")):
        raise OptionError(f"tool_choice: expected 'auto' or 'none', found {shown(tool_choice)}; forcing a call is not "
                          "supported, because nothing would make the model keep to it")


def _declare(turns: list[Turn], schemas: list[dict[str, Any]], response_format: Mapping[str, Any] | None,
             reader: Reader) -> None:
    """Put tools and response format into the leading system turn; make one if there is none."""
    if not schemas and response_format is None:
        return
    if not turns or turns[0].role != "system":
        turns.insert(0, Turn("system", "tools"))
    lead = turns[0]
    if schemas and lead.schemas:
        reader.problems.append("tools: the first system message declares tools too; declare them in one place")
    if response_format is not None and lead.response_format is not None:
        reader.problems.append("response_format: the first system message has one too; give it in one place")
    lead.schemas = schemas or lead.schemas
    lead.response_format = response_format or lead.response_format


def _check_open_ends(turns: Sequence[Turn], thinking: bool, reader: Reader) -> None:
    for i, turn in enumerate(turns):
        if turn.open_reasoning and (i + 1 < len(turns) or not thinking):
            reader.problems.append(f"{turn.where}.prefix: reasoning can be continued only in the last message and "
                                   "with thinking on")


def _sort_results(turns: Sequence[Turn]) -> None:
    """Within a user turn, put tool results into the order of the calls they answer; other parts keep their slots.
    Unknown ids count as the first call; equal ones keep their order."""
    order: dict[str, int] = {}
    for turn in turns:
        if turn.role == "assistant" and turn.calls:
            order = {call.id: i for i, call in enumerate(turn.calls) if call.id}
        elif turn.role == "user":
            slots = [i for i, part in enumerate(turn.parts) if part.is_result]
            ordered = sorted((turn.parts[i] for i in slots), key=lambda part: order.get(part.result_of, 0))
            for slot, part in zip(slots, ordered, strict=True):
                turn.parts[slot] = part


class _Writer:
    """Writes turns into segments. A turn's header for the answer belongs to the turn before the answer."""

    def __init__(self, turns: list[Turn], thinking: bool, effort: int, drop: bool, revision: Revision) -> None:
        self.turns = turns
        self.images: list[Mapping[str, Any]] = []
        self._thinking, self._effort, self._drop = thinking, effort, drop
        self._last_user = _last_user(turns, revision)

    def turn(self, i: int) -> Iterator[Segment]:
        """All segments of turn `i`."""
        turn = self.turns[i]
        if i == 0 and (self._thinking or turn.role == "system"):
            yield Control(SYSTEM)
        if i == 0 and self._thinking:
            yield Text(f"Reasoning Effort: {self._effort} (range 1-100, the higher the value, the more thorough the "
                       "reasoning)\n\n")
        if turn.role == "assistant":
            yield from self._assistant(i)
        elif turn.role == "user":
            yield Control(USER)
            yield from self._user(turn.parts)
        elif turn.role == "latest_reminder":
            yield from (Control(REMINDER), Text(turn.text))
        else:
            yield from self._system(i)
        if self._answered_next(i):
            yield from self._header(i)

    def _answered_next(self, i: int) -> bool:
        return i + 1 == len(self.turns) or self.turns[i + 1].role in ("assistant", "latest_reminder")

    def _header(self, i: int) -> Iterator[Segment]:
        turn = self.turns[i]
        thinks = self._thinking and (not self._drop or i >= self._last_user)
        if turn.task is not None:
            if turn.task == "action":
                yield from (Control(ASSISTANT), Control(THINK_OPEN if self._thinking else THINK_CLOSE))
            yield Control(TASKS[turn.task])
        elif turn.role == "user" or (turn.role == "system" and i > 0):
            yield from (Control(ASSISTANT), Control(THINK_OPEN if thinks else THINK_CLOSE))

    def _system(self, i: int) -> Iterator[Segment]:
        turn = self.turns[i]
        if i > 0:
            yield Control(SYSTEM)
        yield Text(turn.text)
        if turn.schemas:
            yield Text("\n\n")
            yield from tools_block(turn.schemas)
        if turn.response_format is not None:
            yield from (Text("\n\n"), format_block(turn.response_format))

    def _user(self, parts: Sequence[Part]) -> Iterator[Segment]:
        for i, part in enumerate(parts):
            if i:
                yield Text("\n\n")
            if part.is_result:
                yield Text("<tool_result>")
            for j, piece in enumerate(part.pieces):
                if j:
                    yield Text("\n\n")
                if isinstance(piece, str):
                    yield Text(piece)
                else:
                    self.images.append(piece)
                    yield Control(IMAGE)
            if part.is_result:
                yield Text("</tool_result>")

    def _shows_reasoning(self, i: int) -> bool:
        after_task = i > 0 and self.turns[i - 1].task is not None
        return self._thinking and not after_task and (not self._drop or i > self._last_user)

    def _assistant(self, i: int) -> Iterator[Segment]:
        turn = self.turns[i]
        parts = tuple(self._written(i))
        if not turn.token_ids:
            yield from parts
            return
        unanswered = not turn.text and not turn.calls
        yield Replay(turn.token_ids, parts, turn.reasoning is not None, self._shows_reasoning(i), unanswered,
                     not turn.open_end)

    def _written(self, i: int) -> Iterator[Text | Control]:
        turn = self.turns[i]
        if self._shows_reasoning(i):
            yield Text(turn.reasoning or "")
            if turn.open_reasoning:
                return
            yield Control(THINK_CLOSE)
        yield Text(turn.text)
        if turn.calls:
            yield from calls_block([(call.name, call.arguments) for call in turn.calls])
        if not turn.open_end:
            yield Control(EOS)

    def opens(self) -> Opens:
        """Where generation starts after this prompt."""
        if not self.turns:
            return "nothing"
        i, turn = len(self.turns) - 1, self.turns[-1]
        if turn.role == "assistant":
            if not turn.open_end:
                return "nothing"
            return "reasoning_more" if turn.open_reasoning else "content_more"
        while i and turn.role == "latest_reminder":  # the header stands before a reminder
            i, turn = i - 1, self.turns[i - 1]
        if turn.role in ("latest_reminder", "assistant") or (turn.role == "system" and i == 0):
            return "nothing"
        reasons = self._thinking and turn.task in (None, "action")
        return "reasoning" if reasons else "content"

    def lost_tasks(self, start: int) -> list[str]:
        """Notes for tasks that no answer follows: the official encoder writes nothing for them."""
        return [
            f"{turn.where}.task: the next message is not an answer, so the task is lost (as in the official encoder)"
            for i, turn in enumerate(self.turns)
            if i >= start and turn.task is not None and not self._answered_next(i)
        ]


def _last_user(turns: Sequence[Turn], revision: Revision) -> int:
    """Index of the last turn that asks something; -1 if there is none. A system turn after the start counts."""
    for i in range(len(turns) - 1, -1, -1):
        turn = turns[i]
        if turn.role == "system" and i > 0:
            return i
        if turn.role == "user" and not (revision == "1017" and turn.only_results):
            return i
    return -1


