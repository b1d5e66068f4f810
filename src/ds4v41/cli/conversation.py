"""A conversation of `ds4v41 chat`: its messages and settings, asking, saving and loading."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic import write_atomically
from ..chat import Event, render
from ..chat.render import resolve_effort
from ..checks import path_of
from ..errors import ChatError, OptionError

if TYPE_CHECKING:
    from ..chatting import Reply
    from ..results import Progress
    from ..session import Session

SAVE_KEY, SAVE_VERSION = "ds4v41_chat", 1
_MOST_BYTES = 1 << 30


@dataclass(slots=True)
class Conversation:
    """Messages so far, and how the next one is asked."""

    session: Session
    options: Mapping[str, Any]
    """Sampling options of every answer."""
    thinking: bool = True
    effort: int | None = None
    """Reasoning effort, 1 to 100; None takes the default."""
    messages: list[Any] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)
    """Texts that go in front of the next message."""

    def set_effort(self, text: str) -> None:
        """`off`, a number or a name. Raises OptionError."""
        if text == "off":
            self.thinking = False
            return
        self.effort = resolve_effort(int(text) if re.fullmatch(r"[+-]?\d{1,9}", text) else text)
        self.thinking = True

    @property
    def effort_text(self) -> str:
        """The present setting, as `set_effort` takes it."""
        return str(resolve_effort(self.effort)) if self.thinking else "off"

    def ask(
        self, text: str, show: Callable[[Event], object], progress: Callable[[Progress], object]
    ) -> tuple[Reply, bool]:
        """Send a message; `show` gets the events of the answer. Returns the reply and whether Ctrl-C ended it.

        An answer that was stopped stays in the conversation as far as it got; when it had not begun (or had only
        reasoned), question and answer are taken back. An error takes the question back.
        """
        question = {"role": "user", "content": "\n\n".join([*self.attached, text] if text else self.attached)}
        stream = self.session.chat(
            [*self.messages, question],
            stream=True,
            thinking=self.thinking,
            reasoning_effort=self.effort,
            tool_choice="none",  # nobody is here who could run a call
            progress=progress,
            **self.options,
        )
        stopped = False
        try:
            for event in stream:
                show(event)
        except KeyboardInterrupt:
            stream.close()
            stopped = True
        reply = stream.reply
        if not stopped or reply.content:
            self.messages += [question, reply]
            self.attached.clear()
        return reply, stopped

    def attach(self, path: str) -> str:
        """Put a text file in front of the next message. Returns what to tell the user."""
        from .inputs import read_text

        text = read_text(path)
        longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        self.attached.append(f"{path}:\n{fence}\n{text.rstrip()}\n{fence}")
        return f"{path}: {len(text):,} characters go in front of the next message"

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [m for m in self.messages[:1] if isinstance(m, dict) and m.get("role") == "system"]
        self.attached.clear()

    def save(self, path: str) -> None:
        """Write the conversation, token ids included. Replaces only a file that holds a conversation."""
        where = path_of("path", path)
        if os.path.exists(where) and not _is_saved_chat(where):
            raise OptionError(f"{path}: this file exists and is no saved conversation; give another name")
        messages = [m if isinstance(m, dict) else m.to_dict() for m in self.messages]
        saved = {SAVE_KEY: SAVE_VERSION, "model": str(self.session.model.path), "messages": messages}
        write_atomically(where, json.dumps(saved, ensure_ascii=False, indent=1) + "\n")

    def load(self, path: str) -> None:
        """Go on with a saved conversation. Raises ChatError when the file holds none."""
        where = path_of("path", path)
        saved = _read_json(where)
        if not isinstance(saved, dict) or saved.get(SAVE_KEY) != SAVE_VERSION:
            raise ChatError(f"{path}: expected a conversation that /save wrote ({SAVE_KEY}: {SAVE_VERSION})")
        messages = saved.get("messages")
        if not isinstance(messages, list):
            raise ChatError(f"{path}: messages: expected a list, found {type(messages).__name__}")
        if messages:
            render(messages)  # refuses now what would be refused at the first question
        self.messages = messages


def _is_saved_chat(path: Path) -> bool:
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        return False
    try:
        saved = _read_json(path)
    except ChatError:
        return False
    return isinstance(saved, dict) and SAVE_KEY in saved


def _read_json(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ChatError(f"{path}: expected at most {_MOST_BYTES:,} bytes of JSON that /save wrote, found more")
        return json.loads(data)
    except RecursionError as error:
        raise ChatError(f"{path}: expected JSON that /save wrote, found one that is nested too deeply") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ChatError(f"{path}: expected JSON that /save wrote: {error}") from error
