"""Chat on a session: messages -> prompt -> tokens -> events and a reply."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from .chat import ChatParser, Event, Message, Prompt, render
from .chat.tokens import USER
from .errors import ChatError, OptionError, StateError, shown
from .generation import Driven, GenerationOptions, TokenStream
from .results import Timings, TokenLogprob, Usage

if TYPE_CHECKING:
    from .session import Session

RENDER_OPTIONS = (
    "tools", "tool_choice", "response_format", "thinking", "reasoning_effort", "revision", "drop_thinking",
)  # fmt: skip


@dataclass(frozen=True, repr=False)  # the short form of Message
class Reply(Message):
    """The model's message, with what it took. Send it back as it is: it encodes to the same token ids."""

    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0), compare=False)
    timings: Timings = field(default_factory=lambda: Timings(0, 0, 0, 0), compare=False)
    seed: int = field(default=0, compare=False)
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, compare=False, repr=False)

    def _repr_html_(self) -> str:
        took = f"{self.usage.completion_tokens} tokens, {self.finish_reason}; {self.timings}"
        return f"{super()._repr_html_()}<small>{took}</small>"


class ChatStream(Iterator[Event]):
    """An answer being generated: an iterator over events (content, reasoning and tool call deltas).

    `close()` ends it early, `finish()` runs it to the end and returns the Reply.
    """

    def __init__(self, session: Session, prompt: Prompt, options: GenerationOptions, tools: Any, parse: bool) -> None:
        self.session = session
        self.prompt = prompt
        tokenizer = session.model.tokenizer
        self._parser = ChatParser.for_prompt(
            tokenizer, prompt, tools=tools, parse_tools=parse, stop=options.stop_strings
        )
        ids = np.asarray(prompt.encode(tokenizer), np.int32)
        self._stream = TokenStream(session, ids, options)
        user = np.flatnonzero(ids == tokenizer.find_control(USER))
        self._stream.shared = int(user[0]) if len(user) else 0  # the system prompt
        self._logprobs: list[TokenLogprob] = []
        self._reply: Reply | None = None
        self._events = Driven(self._run(), session)

    @classmethod
    def start(cls, session: Session, messages: Sequence[Any], options: Mapping[str, Any]) -> ChatStream:
        """Render the messages and check every option; nothing is computed yet."""
        rendering = {name: options[name] for name in RENDER_OPTIONS if name in options}
        rest = {name: value for name, value in options.items() if name not in RENDER_OPTIONS}
        settings = GenerationOptions.from_options(rest, session.model)
        if not session.model.can_chat:
            raise ChatError(
                "the tokenizer of this model has no chat markers (<｜User｜>, <｜Assistant｜>, ...); use generate()"
            )
        if isinstance(messages, Sequence) and not messages:
            raise ChatError("messages: expected at least one message, found none")
        prompt = render(messages, **rendering)
        if prompt.images:
            raise ChatError("the messages hold images, which this version cannot read; send text only")
        tools = rendering.get("tools")
        return cls(session, prompt, settings, tools, rendering.get("tool_choice") != "none")

    def _run(self) -> Generator[Event, None, None]:
        parser, stream = self._parser, self._stream
        try:
            reason: str | None = None
            for draw, _position in stream:
                logprob = stream.logprob(draw)
                if logprob is not None:
                    self._logprobs.append(logprob)
                yield from parser.push(draw.token)
                if parser.ended:
                    break
            else:
                reason = stream.finish_reason
            self._conclude(None if reason == "stop" else reason)
            yield from parser.tail_events
        finally:
            if self._reply is None:
                self._conclude("cancelled")

    def _conclude(self, reason: str | None) -> None:
        message = self._parser.finish(reason)
        self._stream.turn_ended()
        own = {f.name: getattr(message, f.name) for f in fields(Message)}
        self._reply = Reply(
            **own,
            usage=self._stream.usage,
            timings=self._stream.timings,
            seed=self._stream.sampler.seed,
            logprobs=tuple(self._logprobs) if self._stream.options.sampling.logprobs else None,
        )

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """End it here; `reply.finish_reason` is "cancelled"."""
        self._events.close()
        if self._reply is None:
            self._conclude("cancelled")

    def finish(self) -> Reply:
        """Run to the end and return the reply."""
        for _ in self:
            pass
        if self._reply is None:  # closed before it began
            self._conclude("cancelled")
        return self.reply

    @property
    def reply(self) -> Reply:
        """The whole reply. Raises StateError before the end."""
        if self._reply is None:
            raise StateError("this answer is still being generated: exhaust the iterator, or call finish() or close()")
        return self._reply

    @property
    def seed(self) -> int:
        """The seed of the draws."""
        return self._stream.sampler.seed

    def __repr__(self) -> str:
        state = "not finished" if self._reply is None else self._reply.finish_reason
        return f"<ChatStream: {len(self._stream.tokens)} tokens, {state}>"


def check_stream_flag(stream: Any) -> bool:
    """`stream=` of chat."""
    if not isinstance(stream, bool):
        raise OptionError(f"stream: expected True or False, found {shown(stream)}")
    return stream
