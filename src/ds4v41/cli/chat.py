"""`ds4v41 chat`: in a terminal, or with messages from a file or pipe."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..chat import ContentDelta, Event, ReasoningDelta
from ..chatting import Reply
from ..checks import path_of
from ..errors import ChatError, Ds4Error, OptionError
from ..results import Progress
from .conversation import Conversation
from .inputs import check_text, decode_utf8, open_model, open_session, read_stdin
from .output import (
    DIM,
    PLAIN,
    Bar,
    has_colour,
    is_terminal,
    logprobs_json,
    note,
    note_stats,
    print_json,
    show,
    timings_json,
    usage_json,
)  # fmt: skip
from .parser import UsageError, sampling_options

INTERRUPTED = 130
_HISTORY_LINES = 1000


def run(args: Namespace) -> int:
    """Talk until the messages end."""
    if args.message is not None and args.whole:
        raise UsageError("chat: give MESSAGE or --whole, not both")
    if args.json and args.reasoning != "auto":
        raise UsageError("chat: --reasoning is for text; --json always has the reasoning")
    if args.history is not None and (args.message is not None or args.whole or not is_terminal(sys.stdin)):
        raise UsageError("chat: --history keeps the lines typed in a terminal, and none are typed here")
    options = sampling_options(args)
    with open_model(args) as model, open_session(model, args) as session:
        talk = Talk(Conversation(session, options), args)
        talk.prepare()
        if args.message is not None:
            return talk.one(check_text(args.message, "MESSAGE"))
        if args.whole:
            return talk.one(read_stdin())
        if is_terminal(sys.stdin):
            return talk.interactive()
        return talk.lines(_stdin_lines())


def _stdin_lines() -> Iterator[str]:
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    for number, line in enumerate(buffer, 1):
        yield decode_utf8(line, f"stdin, line {number}").rstrip("\r\n")


@dataclass(slots=True)
class Answer:
    """Prints the events of one answer: reasoning dimmed in a terminal, and set off from the answer."""

    reasoning: bool
    quiet: bool
    colour: bool
    bar: Bar
    thinking: bool = False
    written: str = ""

    def event(self, event: Event) -> None:
        """Show one event at once."""
        self.bar.close()
        if self.quiet:
            return
        if isinstance(event, ReasoningDelta):
            if self.reasoning:
                self._put(event.text, reasoning=True)
        elif isinstance(event, ContentDelta):
            self._put(event.text, reasoning=False)

    def _put(self, text: str, reasoning: bool) -> None:
        if reasoning != self.thinking:
            self._colour(reasoning)
            if not reasoning:
                show("\n\n")
            self.thinking = reasoning
        show(text)
        self.written = (self.written + text)[-1:]

    def _colour(self, dim: bool) -> None:
        if self.colour:
            sys.stdout.write(DIM if dim else PLAIN)

    def end(self) -> None:
        """The answer is over: normal colours, and a line end."""
        if self.thinking:
            self._colour(False)
        if not self.quiet and self.written != "\n":
            show("\n")


@dataclass(slots=True)
class Talk:
    """The front end of a conversation."""

    conversation: Conversation
    args: Namespace
    n_answers: int = 0
    leaving: bool = False
    commands: dict[str, tuple[str, str, Callable[[str], None]]] = field(init=False)

    def __post_init__(self) -> None:
        self.commands = {
            "/help": ("", "this list", self._help),
            "/think": ("[N]", "reasoning effort: 1 to 100, low, high, max, or off", self._think),
            "/file": ("PATH [TEXT]", "put a text file in front of the next message, which may be TEXT", self._file),
            "/save": ("PATH", "write the conversation, to go on with --load PATH", self._save),
            "/reset": ("", "forget the conversation, keep the system message", self._reset),
            "/stats": ("", "what the last answer took", self._stats),
            "/exit": ("", "leave (so does Ctrl-D)", self._exit),
        }

    def prepare(self) -> None:
        """Apply --think, --load and --system."""
        args, conversation = self.args, self.conversation
        if args.think is not None:
            conversation.set_effort(args.think)
        if args.load is not None:
            conversation.load(args.load)
        if args.system is not None:
            if conversation.messages and conversation.messages[0].get("role") == "system":
                raise UsageError(f"chat: {args.load} has a system message already; leave --system out")
            conversation.messages.insert(0, {"role": "system", "content": check_text(args.system, "--system")})

    # ---- the three ways of talking ---------------------------------------------------------------------------------

    def one(self, text: str) -> int:
        """One message, one answer."""
        return INTERRUPTED if self.answer(text) else 0

    def lines(self, lines: Iterator[str]) -> int:
        """A message or command a line; the first error ends it."""
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                if self._handle(line):
                    return INTERRUPTED
            except Ds4Error as error:
                raise ChatError(f"stdin, line {number}: {error}") from error
            if self.leaving:
                break
        return 0

    def interactive(self) -> int:
        """Prompt for messages; errors are shown and the talk goes on."""
        note(f"{self.conversation.session.model!r}\n/help lists the commands, Ctrl-D leaves")
        with _line_editing(self.args.history):
            while not self.leaving:
                try:
                    line = _read_message()
                except EOFError:
                    note("")
                    break
                except KeyboardInterrupt:
                    note("\n(Ctrl-D leaves)")
                    continue
                if not line.strip() and not self.conversation.attached:
                    continue
                self._guarded(line)
        return 0

    def _guarded(self, line: str) -> None:
        try:
            if self._handle(line):
                note("[stopped]")
        except Ds4Error as error:
            note(f"error: {error}")
        except BrokenPipeError:
            raise
        except OSError as error:
            note(f"error: {error.filename}: {error.strerror}")
        except KeyboardInterrupt:  # outside of the computation, such as between two pieces
            note("\n[stopped]")

    def _handle(self, line: str) -> bool:
        """A command, or a message (`//` begins one that starts with a slash). True when Ctrl-C stopped the answer."""
        if not line.startswith("/") or line.startswith("//"):
            return self.answer(line[1:] if line.startswith("//") else line)
        name, _, rest = line.strip().partition(" ")
        if name not in self.commands:
            raise OptionError(f"{name}: unknown command; /help lists them (a message that begins with / is typed //)")
        if name == "/file":
            return self._file_and_text(rest.strip())
        self.commands[name][2](rest.strip())
        return False

    def answer(self, text: str) -> bool:
        """Ask and print. True when Ctrl-C stopped it."""
        args = self.args
        if self.n_answers and not args.json and not is_terminal(sys.stdout):
            print()  # between the answers of a file of messages
        self.n_answers += 1
        with Bar("reading the conversation", "tokens") as bar:
            reasoning = args.reasoning == "show" or (args.reasoning == "auto" and is_terminal(sys.stdout))
            printer = Answer(reasoning, args.json, has_colour(sys.stdout), bar)

            def progress(p: Progress) -> None:
                bar.update(p.cached + p.processed, p.total)

            try:
                reply, stopped = self.conversation.ask(text, printer.event, progress)
            finally:
                printer.end()
        self._report(reply)
        return stopped

    def _report(self, reply: Reply) -> None:
        if self.args.json:
            print_json(reply_json(reply), one_line=True)
        elif reply.finish_reason == "length":
            note("[ended by --max-tokens or the end of the context]")
        for problem in reply.problems:
            note(f"[{problem}]")
        if self.args.stats:
            note_stats(self.conversation.session.stats, reply.usage, reply.finish_reason, reply.seed)

    # ---- commands ---------------------------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        _no_argument("/help", rest)
        for name, (argument, what, _) in self.commands.items():
            note(f"  {name + ' ' + argument:<20} {what}")
        note("  A line that ends with \\ goes on in the next one; Ctrl-C stops the answer.")

    def _think(self, rest: str) -> None:
        if rest:
            self.conversation.set_effort(rest)
        note(f"[reasoning effort {self.conversation.effort_text}]")

    def _file(self, rest: str) -> None:
        self._file_and_text(rest)

    def _file_and_text(self, rest: str) -> bool:
        path, text = _split_path("/file", rest)
        note(f"[{self.conversation.attach(path)}]")
        return self.answer(text) if text else False

    def _save(self, rest: str) -> None:
        path, more = _split_path("/save", rest)
        if more:
            raise OptionError(f"/save: expected one path, found {rest!r}; put quotes around a path with spaces")
        self.conversation.save(path)
        note(f"[{len(self.conversation.messages)} messages written to {path}]")

    def _reset(self, rest: str) -> None:
        _no_argument("/reset", rest)
        self.conversation.reset()
        note("[forgotten]")

    def _stats(self, rest: str) -> None:
        _no_argument("/stats", rest)
        stats = self.conversation.session.stats
        note(f"[{stats.reused:,} tokens reused ({stats.why}); {stats.timings}]")

    def _exit(self, rest: str) -> None:
        _no_argument("/exit", rest)
        self.leaving = True


def _no_argument(name: str, rest: str) -> None:
    if rest:
        raise OptionError(f"{name}: takes nothing, found {rest!r}")


def _split_path(name: str, rest: str) -> tuple[str, str]:
    """The path (in quotes when it has spaces) and what follows it."""
    stream = io.StringIO(rest)
    lexer = shlex.shlex(stream, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        path = lexer.get_token()
    except ValueError as error:
        raise OptionError(f"{name}: {rest}: a quote is not closed") from error
    if not path:
        raise OptionError(f"{name}: expected a path")
    return path, stream.read().strip()


def _read_message() -> str:
    """A line; more of them while each ends with a backslash. Raises EOFError at Ctrl-D."""
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(". "))
    return check_text("\n".join(lines), "the message")


@contextlib.contextmanager
def _line_editing(history: str | None) -> Iterator[None]:
    """Cursor keys and history for input(); `history` names a file that keeps the lines, readable by its owner only."""
    try:
        import readline
    except ImportError:  # a Python without it: plain input
        if history is not None:
            raise OptionError("--history needs Python's readline module, which is not here") from None
        yield
        return
    path = None if history is None else path_of("--history", history)
    if path is not None:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        readline.read_history_file(path)
        readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        if path is not None:
            readline.write_history_file(path)


def reply_json(reply: Reply) -> dict[str, Any]:
    """Plain data of a reply."""
    out: dict[str, Any] = {
        "role": reply.role,
        "content": reply.content,
        "reasoning": reply.reasoning,
        "finish_reason": reply.finish_reason,
        "stop": reply.stop,
        "problems": list(reply.problems),
        "tokens": list(reply.token_ids),
        "seed": reply.seed,
        "usage": usage_json(reply.usage),
        "timings": timings_json(reply.timings),
    }
    if reply.logprobs is not None:
        out["logprobs"] = logprobs_json(reply.logprobs)
    return out
