"""From the messages a caller gives to the turns of a prompt: everything checked, all problems reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ds4v41.chat.tokens import TASKS
from ds4v41.chat.tools import name_problem, read_arguments, split_namespace, tool_schemas
from ds4v41.chat.types import Message, message_digest, to_json
from ds4v41.errors import ChatError, shown

Revision: TypeAlias = Literal["dba1be0", "1017"]
Piece: TypeAlias = str | Mapping[str, Any]
"""Text, or the record of an image."""

_COMMON = {"role", "content"}
_KEYS: dict[str, set[str]] = {
    "system": _COMMON | {"tools", "response_format"},
    "user": _COMMON | {"tools", "task"},
    "assistant": _COMMON | {"reasoning_content", "reasoning", "tool_calls", "wo_eos", "prefix", "token_ids",
                            "token_digest"},
    "tool": _COMMON | {"tool_call_id"},
    "latest_reminder": _COMMON,
}  # fmt: skip
_NO_PLACE = {"name", "id", "mask", "annotations", "metadata", "created"}
"""Keys that other software attaches and the prompt format has no place for; they are left out with a note."""

_MAX_LISTED = 20


@dataclass(slots=True)
class Part:
    """One part of a user turn: pieces joined by a blank line; `result_of` is the call id if it is a tool result."""

    pieces: list[Piece]
    is_result: bool = False
    result_of: str = ""


@dataclass(slots=True)
class Call:
    """A past tool call."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(slots=True)
class Turn:
    """One turn of the prompt. `text` for all roles but user, `parts` for user."""

    role: str
    where: str
    text: str = ""
    parts: list[Part] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    response_format: Mapping[str, Any] | None = None
    task: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)
    open_end: bool = False
    open_reasoning: bool = False
    token_ids: tuple[int, ...] = ()

    @property
    def only_results(self) -> bool:
        """True for a user turn that holds nothing but tool results."""
        return self.role == "user" and all(part.is_result for part in self.parts)


class Reader:
    """Reads messages, collecting problems (raised together by `done`) and notes."""

    def __init__(self, revision: Revision) -> None:
        self.revision = revision
        self.problems: list[str] = []
        self.notes: list[str] = []

    def done(self) -> None:
        """Raise one ChatError that lists every problem."""
        if self.problems:
            shown = self.problems[:_MAX_LISTED]
            if len(self.problems) > _MAX_LISTED:
                shown.append(f"... and {len(self.problems) - _MAX_LISTED} more")
            raise ChatError("these messages cannot be rendered: " + "; ".join(shown))

    def turns(self, messages: Any, where: str) -> list[Turn]:
        """All messages as turns; tool results and neighbouring user messages merged."""
        if isinstance(messages, (str, bytes, Mapping, Message)) or not isinstance(messages, Iterable):
            self.problems.append(f"{where}: expected a list of messages, found {type(messages).__name__}")
            return []
        try:
            given = iter(messages)
        except TypeError:  # an array without dimensions
            self.problems.append(f"{where}: expected a list of messages, found {type(messages).__name__}")
            return []
        turns: list[Turn] = []
        for i, message in enumerate(given):
            turn = self._turn(message, f"{where}[{i}]")
            if turn is not None:
                self._append(turns, turn)
        return turns

    def _append(self, turns: list[Turn], turn: Turn) -> None:
        """A tool result or user text joins the user turn before it; a user text not if that one carries a task."""
        last = turns[-1] if turns else None
        joins = turn.role == "user" and last is not None and last.role == "user"
        if last is None or not joins or (last.task is not None and not turn.only_results):
            turns.append(turn)
            return
        last.parts += turn.parts
        if turn.task is not None:
            self.notes.append(f"{turn.where}.task: joins the user turn before it, so the task is lost (as in the "
                              "official encoder)")

    def _turn(self, raw: Any, where: str) -> Turn | None:
        if isinstance(raw, Message):
            raw = raw.to_dict()
        if not isinstance(raw, Mapping):
            self.problems.append(f"{where}: expected a message (an object with role and content), found "
                                 f"{type(raw).__name__}")
            return None
        role = raw.get("role")
        if not isinstance(role, str) or role not in _KEYS:
            hint = " (write developer instructions as a system message)" if role == "developer" else ""
            self.problems.append(f"{where}.role: expected one of {', '.join(_KEYS)}, found {shown(role)}{hint}")
            return None
        self._check_keys(raw, _KEYS[role], where)
        if role == "tool":
            return self._tool(raw, where)
        turn = Turn(role, where)
        if role == "user":
            self._user(raw, turn)
        else:
            turn.text = self._plain(raw.get("content"), f"{where}.content")
        if role == "system":
            self._system(raw, turn)
        elif role == "assistant":
            self._assistant(raw, turn)
        return turn

    def _check_keys(self, raw: Mapping[str, Any], known: set[str], where: str) -> None:
        for key, value in raw.items():
            if key in known or not value:
                continue
            if key in _NO_PLACE:
                self.notes.append(f"{where}.{key}: the prompt format has no place for it")
            else:
                self.problems.append(f"{where}.{key}: not known for role {raw['role']!r}, expected one of "
                                     f"{', '.join(sorted(known))}")

    # roles -----------------------------------------------------------------------------------------------------

    def _system(self, raw: Mapping[str, Any], turn: Turn) -> None:
        turn.schemas = tool_schemas(raw.get("tools"), f"{turn.where}.tools", self.problems)
        turn.response_format = self.response_format(raw.get("response_format"), f"{turn.where}.response_format")

    def response_format(self, given: Any, where: str) -> Mapping[str, Any] | None:
        """A response format to be shown in the prompt; `{"type": "text"}` asks for nothing special."""
        if given is None or given == {} or given == {"type": "text"}:
            return None
        if not isinstance(given, Mapping):
            self.problems.append(f"{where}: expected an object, found {type(given).__name__}")
            return None
        try:
            to_json(given)
        except (TypeError, ValueError, RecursionError) as error:
            self.problems.append(f"{where}: cannot be written as JSON ({error})")
            return None
        return given

    def _user(self, raw: Mapping[str, Any], turn: Turn) -> None:
        content, where = raw.get("content"), f"{turn.where}.content"
        if isinstance(content, str):
            turn.parts = [Part([self._utf8(content, where)])]
        elif isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
            turn.parts = [self._user_part(block, f"{where}[{i}]") for i, block in enumerate(content)]
        else:
            found = "none" if content is None else type(content).__name__
            self.problems.append(f"{where}: expected text or a list of blocks, found {found}")
        if not turn.parts:
            turn.parts = [Part([""])]
        turn.schemas = tool_schemas(raw.get("tools"), f"{turn.where}.tools", self.problems)
        if turn.schemas:
            self.notes.append(f"{turn.where}.tools: only a system message shows its tools; here they only keep the "
                              "reasoning of earlier turns")
        task = raw.get("task")
        if task is not None and (not isinstance(task, str) or task not in TASKS):
            self.problems.append(f"{turn.where}.task: expected one of {', '.join(TASKS)}, found {shown(task)}")
        elif task is not None:
            turn.task = task

    def _user_part(self, block: Any, where: str) -> Part:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            call = block.get("tool_use_id")
            pieces = self._result(block.get("content"), f"{where}.content")
            return Part(pieces, True, call if isinstance(call, str) else "")
        piece = self._piece(block, where)
        if piece is None:
            kind = block.get("type")
            piece = f"[Unsupported {kind}]"
            self.notes.append(f"{where}: block type {kind!r} is not known, shown as {piece!r}")
        return Part([piece])

    def _tool(self, raw: Mapping[str, Any], where: str) -> Turn:
        call = raw.get("tool_call_id", "")
        if not isinstance(call, str):
            self.problems.append(f"{where}.tool_call_id: expected text, found {type(call).__name__}")
            call = ""
        return Turn("user", where, parts=[Part(self._result(raw.get("content"), f"{where}.content"), True, call)])

    def _result(self, content: Any, where: str) -> list[Piece]:
        if isinstance(content, str):
            return [self._utf8(content, where)]
        if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
            self.problems.append(f"{where}: expected text or a list of blocks, found {type(content).__name__}")
            return []
        pieces: list[Piece] = []
        for i, block in enumerate(content):
            piece = self._piece(block, f"{where}[{i}]")
            if piece is not None:
                pieces.append(piece)
                continue
            kind = block.get("type")
            shown = f"[Unsupported {kind}]" if self.revision == "1017" else None
            self.notes.append(f"{where}[{i}]: block type {kind!r} is not known, "
                              + (f"shown as {shown!r}" if shown else "left out"))
            if shown:
                pieces.append(shown)
        return pieces

    def _assistant(self, raw: Mapping[str, Any], turn: Turn) -> None:
        where = turn.where
        given = [raw[key] for key in ("reasoning_content", "reasoning") if raw.get(key) is not None]
        if any(not isinstance(text, str) for text in given):
            self.problems.append(f"{where}.reasoning_content: expected text, found {type(given[0]).__name__}")
        elif len({*given}) > 1:
            self.problems.append(f"{where}: reasoning and reasoning_content differ; give one of them")
        elif given:
            turn.reasoning = self._utf8(given[0], f"{where}.reasoning_content")
        turn.calls = self._calls(raw.get("tool_calls"), f"{where}.tool_calls")
        for key in ("wo_eos", "prefix"):
            if raw.get(key) is not None and not isinstance(raw[key], bool):
                self.problems.append(f"{where}.{key}: expected true or false, found {shown(raw[key])}")
        turn.open_end = raw.get("wo_eos") is True or raw.get("prefix") is True
        turn.open_reasoning = raw.get("prefix") is True and bool(turn.reasoning) and not turn.text and not turn.calls
        self._token_ids(raw, turn)

    def _calls(self, raw: Any, where: str) -> list[Call]:
        if not raw:
            return []
        if not isinstance(raw, Sequence) or isinstance(raw, (str, bytes)):
            self.problems.append(f"{where}: expected a list of calls, found {type(raw).__name__}")
            return []
        return [call for i, item in enumerate(raw) if (call := self._call(item, f"{where}[{i}]")) is not None]

    def _call(self, raw: Any, where: str) -> Call | None:
        function = raw.get("function") if isinstance(raw, Mapping) else None
        if not isinstance(function, Mapping):
            self.problems.append(f"{where}: expected an object with a 'function', found {raw!r:.60}")
            return None
        problem = name_problem(function.get("name"))
        space = raw.get("namespace", function.get("namespace"))
        space = space.get("name") if isinstance(space, Mapping) else space
        if problem is None and space is not None:
            problem = name_problem(space)
        if problem is None and function.get("arguments") is None:
            problem = "arguments are missing, expected an object or its JSON text"
        if problem is not None:
            self.problems.append(f"{where}.function: {problem}")
            return None
        try:
            space, name = split_namespace(function["name"], space)
        except ValueError as error:
            self.problems.append(f"{where}.function: {error}")
            return None
        arguments = read_arguments(function["arguments"])
        try:
            to_json(arguments).encode("utf-8")
            if any(not isinstance(key, str) for key in arguments):
                raise TypeError("a parameter name is not text")
        except (TypeError, ValueError, RecursionError) as error:
            self.problems.append(f"{where}.function.arguments: cannot be written as JSON ({error})")
            return None
        call_id = raw.get("id") or function.get("id") or ""
        return Call(str(call_id), name if space is None else f"{space}::{name}", arguments)

    def _token_ids(self, raw: Mapping[str, Any], turn: Turn) -> None:
        ids = raw.get("token_ids")
        if ids is None:
            return
        if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Sequence):
            self.problems.append(f"{turn.where}.token_ids: expected a list of token ids, found {type(ids).__name__}")
            return
        digest = raw.get("token_digest")
        told = message_digest(turn.text, turn.reasoning, [(c.id, c.name, c.arguments) for c in turn.calls])
        if digest and digest != told:
            self.notes.append(f"{turn.where}: the message was edited after it was generated, so its text is encoded "
                              "anew and token_ids are not used")
        else:
            turn.token_ids = tuple(ids)

    # content ---------------------------------------------------------------------------------------------------

    def _plain(self, content: Any, where: str) -> str:
        """Content of roles that carry text only: None, text, or text blocks joined by a blank line."""
        if content is None:
            return ""
        if isinstance(content, str):
            return self._utf8(content, where)
        if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
            self.problems.append(f"{where}: expected text or a list of text blocks, found {type(content).__name__}")
            return ""
        texts = []
        for i, block in enumerate(content):
            piece = self._piece(block, f"{where}[{i}]")
            if isinstance(piece, str):
                texts.append(piece)
            else:
                self.problems.append(f"{where}[{i}]: only text blocks can stand here")
        return "\n\n".join(texts)

    def _utf8(self, text: str, where: str) -> str:
        """`text`, checked for lone surrogates (what is left of a character that something cut in two)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            self.problems.append(f"{where}: character {error.start} is a lone surrogate, which has no UTF-8 form")
            return ""
        return text

    def _piece(self, block: Any, where: str) -> Piece | None:
        """A text block or an image block; None for a block of another type."""
        if isinstance(block, str):
            return self._utf8(block, where)
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            self.problems.append(f"{where}: expected text or an object with a type, found {block!r:.60}")
            return ""
        kind = block["type"]
        if kind == "text":
            if not isinstance(block.get("text"), str):
                self.problems.append(f"{where}.text: expected text, found {type(block.get('text')).__name__}")
                return ""
            return self._utf8(block["text"], f"{where}.text")
        if kind not in ("image", "image_url"):
            return None
        record = _image_record(block)
        if record is None:
            self.problems.append(f"{where}: an image block needs image_url, url, source or data")
        return record or ""


def _image_record(block: Mapping[str, Any]) -> dict[str, Any] | None:
    url = block.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    candidates = {"url": url or block.get("url"), "source": block.get("source"), "data": block.get("data")}
    for key, value in candidates.items():
        if value:
            return {"type": "image", key: value}
    return None
