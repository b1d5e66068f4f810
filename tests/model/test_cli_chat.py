"""`ds4v41 chat`: one message, files of messages, a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ds4v41

from .cli_support import ADDS, COMMAND, GREEDY, QUESTION, environment


def test_chat_one_message(call: Any) -> None:
    result = call("chat", QUESTION, *GREEDY)
    assert (result.code, result.out) == (0, ADDS + "\n")  # the reasoning is not part of the answer
    shown = call("chat", QUESTION, *GREEDY, "--reasoning", "show")
    assert shown.out == f"I need a function that adds two numbers. I will use the plus operator.\n\n{ADDS}\n"


def test_chat_json_separates_reasoning(call: Any) -> None:
    data = json.loads(call("chat", QUESTION, *GREEDY, "--json").out)
    assert data["content"] == ADDS and data["reasoning"].startswith("I need a function")
    assert data["finish_reason"] == "stop" and data["usage"]["completion_tokens"] == len(data["tokens"])
    off = json.loads(call("chat", QUESTION, *GREEDY, "--json", "--think", "off").out)
    assert off["content"] == ADDS and off["reasoning"] is None


def test_chat_reads_a_message_a_line_and_goes_on_with_the_conversation(call: Any) -> None:
    lines = f"{QUESTION}\n\nNow subtract them.\n"
    result = call("chat", *GREEDY, "--json", "--think", "off", stdin=lines)
    first, second = map(json.loads, result.out.splitlines())
    assert first["content"] == ADDS
    with ds4v41.Model.open() as model, model.session() as session:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        messages.append(session.chat(messages, temperature=0, thinking=False))
        messages.append({"role": "user", "content": "Now subtract them."})
        want = session.chat(messages, temperature=0, thinking=False)
    assert second["content"] == want.content
    assert second["usage"]["reused_tokens"] == want.usage.reused_tokens > 0


def test_chat_whole_stdin_is_one_message(call: Any) -> None:
    text = f"{QUESTION}\n/help\n"
    data = call("chat", *GREEDY, "--json", "--whole", "--think", "off", stdin=text).out.splitlines()
    assert len(data) == 1
    with ds4v41.Model.open() as model, model.session() as session:
        want = session.chat([{"role": "user", "content": text}], temperature=0, thinking=False)
    assert json.loads(data[0])["content"] == want.content


def test_chat_commands_save_and_load(call: Any, tmp_path: Path) -> None:
    saved = tmp_path / "my chat.json"
    lines = f"/think off\n{QUESTION}\n/save '{saved}'\n/reset\n/think\n/stats\n/exit\nnever asked\n"
    result = call("chat", *GREEDY, "--system", "You write Python.", stdin=lines)
    assert result.code == 0 and "3 messages written" in result.err and "[reasoning effort off]" in result.err
    assert "never asked" not in result.out + result.err
    data = json.loads(saved.read_text())
    assert [m["role"] for m in data["messages"]] == ["system", "user", "assistant"]
    assert data["messages"][2]["token_ids"]
    went_on = call("chat", "Again.", *GREEDY, "--json", "--think", "off", "--load", str(saved))
    with ds4v41.Model.open() as model, model.session() as session:
        more = [*data["messages"], {"role": "user", "content": "Again."}]
        want = session.chat(more, temperature=0, thinking=False)
    assert json.loads(went_on.out)["tokens"] == list(want.token_ids)


def test_save_replaces_only_conversations(call: Any, tmp_path: Path) -> None:
    source = tmp_path / "code.py"
    source.write_text("x = 1\n")
    result = call("chat", stdin=f"/save {source}\n")
    assert result.code == 1 and "line 1" in result.err and "is no saved conversation" in result.err
    assert source.read_text() == "x = 1\n"
    saved = tmp_path / "chat.json"
    assert call("chat", stdin=f"/save {saved}\n/save {saved}\n").code == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("content", ["", "[]", '{"ds4v41_chat": 2}', '{"ds4v41_chat": 1, "messages": 5}',
                                     '{"ds4v41_chat": 1, "messages": [{"role": "pope", "content": "x"}]}'])  # fmt: skip
def test_load_refuses_what_is_no_conversation(call: Any, tmp_path: Path, content: str) -> None:
    path = tmp_path / "chat.json"
    path.write_text(content)
    result = call("chat", "hello", "--load", str(path))
    assert result.code == 1 and result.out == "" and "Traceback" not in result.err


def test_two_system_messages_are_refused(call: Any, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    call("chat", "--system", "A", stdin=f"/save {saved}\n")
    assert call("chat", "hello", "--system", "B", "--load", str(saved)).code == 2


def test_file_goes_in_front_of_the_next_message(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "some code.py"
    path.write_text("x = '```'\n")
    saved = tmp_path / "chat.json"
    result = call(
        "chat", "--max-tokens", "3", stdin=f'/file "{path}"\nWhat is this?\n/file "{path}" And this?\n/save {saved}\n'
    )
    assert result.code == 0
    block = f"{path}:\n````\nx = '```'\n````\n\n"
    asked = [m["content"] for m in json.loads(saved.read_text())["messages"] if m["role"] == "user"]
    assert asked == [block + "What is this?", block + "And this?"]


@pytest.mark.parametrize(
    "line", ["/nonsense", "/think 0", "/file", "/file /nowhere", "/save", "/reset now", "/save 'x"]
)
def test_a_wrong_command_in_a_file_of_messages_ends_it(call: Any, line: str) -> None:
    result = call("chat", stdin=f"{line}\n{QUESTION}\n")
    assert result.code == 1 and result.out == "" and "Traceback" not in result.err


def test_two_slashes_begin_a_message(call: Any, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    call("chat", "--max-tokens", "2", stdin=f"//etc is a folder\n/save {saved}\n")
    assert json.loads(saved.read_text())["messages"][0]["content"] == "/etc is a folder"


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, *args: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [*COMMAND, *args], environment(TERM="xterm"))
        self.seen = b""

    def until(self, pattern: bytes) -> bytes:
        """Output up to and including the pattern."""
        end = time.monotonic() + 60
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < end, self.seen
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.fd, 65536)
                except OSError:  # the other side is gone
                    assert re.search(pattern, self.seen), self.seen
        out, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return out

    def interrupt(self, pattern: bytes) -> bytes:
        """Ctrl-C at the prompt, again when nothing happens: Python's input() misses a signal that comes while readline
        draws the line (it looks for signals only while it waits for a key)."""
        for _ in range(20):
            self.type(b"\x03")
            end = time.monotonic() + 3
            while time.monotonic() < end:
                if re.search(pattern, self.seen):
                    return self.until(pattern)
                if select.select([self.fd], [], [], 0.2)[0]:
                    self.seen += os.read(self.fd, 65536)
        raise AssertionError(self.seen)

    def type(self, text: bytes) -> None:
        os.write(self.fd, text)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_chat_in_a_terminal() -> None:
    terminal = Terminal("chat", *GREEDY)
    try:
        assert b"Ctrl-D leaves" in terminal.until(rb"> $")
        terminal.type(QUESTION.encode() + b"\n")
        terminal.until(rb"\x1b\[2mI need")  # reasoning is dimmed
        terminal.type(b"\x03")
        stopped = terminal.until(rb"> $")
        assert b"[stopped]" in stopped and b"def" not in stopped and b"\x1b[0m" in stopped
        terminal.type(b"half a line")
        # The echo first: Ctrl-C also drops typed keys that nobody has read, and readline, told that there are some,
        # then waits inside its read, where Python's signals are not looked for.
        terminal.until(b"half a line")
        terminal.interrupt(rb"\(Ctrl-D leaves\)\r\n.*> $")  # at the prompt, Ctrl-C drops the line
        terminal.type(b"/nonsense\n")
        assert b"error: /nonsense: unknown command" in terminal.until(rb"/help lists.*\r\n.*> $")
        terminal.type(QUESTION.encode() + b"\n")
        answer = terminal.until(rb"```\r\n.*> $")
        assert b"plus operator.\x1b[0m\r\n\r\n```python\r\ndef add_numbers(a, b):" in answer
        terminal.type(b"\x1b[A")  # history: the last line comes back
        terminal.until(QUESTION.encode())
        terminal.interrupt(rb"\(Ctrl-D leaves\)\r\n.*> $")
        terminal.type(b"\x04")
        assert terminal.wait() == 0
    finally:
        os.close(terminal.fd)
