"""A rendered prompt: segments that know whether they are control tokens, plain text or ids the model produced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ds4v41.chat.tokens import EOS, THINK_CLOSE
from ds4v41.errors import ChatError
from ds4v41.tokenizer import Tokenizer

Opens: TypeAlias = Literal["reasoning", "content", "reasoning_more", "content_more", "nothing"]
"""Where generation starts. `*_more` continues a text that the prompt holds the beginning of; `nothing` means that the
prompt ends in a finished turn, so there is nothing to answer."""


@dataclass(frozen=True, slots=True)
class Text:
    """Ordinary text; whatever it spells, it becomes ordinary tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class Control:
    """One control token, written by the renderer."""

    text: str


@dataclass(frozen=True, slots=True)
class Replay:
    """An assistant turn as the model produced it: the ids speak; `parts` is the same turn written out, for display
    and for the one case in which the ids cannot be used.

    thought: generation began inside the reasoning. opened: this prompt opens the reasoning of the turn.
    unanswered: the turn holds nothing but reasoning. closed: the turn has to end in the end-of-sentence token.
    """

    ids: tuple[int, ...]
    parts: tuple[Text | Control, ...]
    thought: bool
    opened: bool
    unanswered: bool
    closed: bool

    @property
    def text(self) -> str:
        """The turn written out."""
        return "".join(part.text for part in self.parts)

    def resolve(self, tokenizer: Tokenizer) -> list[int] | None:
        """The ids of this turn in this prompt, or None when they cannot be cut to fit (then `parts` counts).

        Reasoning that this prompt leaves out is cut off at its end token. Where the generation stopped before it
        wrote the closing tokens, they are added.
        """
        tokenizer.validate_ids(self.ids)
        body = [int(i) for i in self.ids]
        eos, think_close = tokenizer.control_id(EOS), tokenizer.control_id(THINK_CLOSE)
        if eos in body[:-1]:
            raise ChatError("token_ids of an assistant message: the end-of-sentence token stands before the end; "
                            "pass the ids of one answer only")
        ended = body[-1:] == [eos]
        body = body[:-1] if ended else body
        if self.thought and not self.opened:
            if think_close not in body and not self.unanswered:
                return None
            body = body[body.index(think_close) + 1 :] if think_close in body else []
        elif self.opened and not self.thought:
            body.insert(0, think_close)
        elif self.opened and self.unanswered and self.closed and think_close not in body:
            body.append(think_close)
        return [*body, eos] if ended or self.closed else body


Segment: TypeAlias = Text | Control | Replay


@dataclass(frozen=True, slots=True)
class Prompt:
    """The result of `render`.

    `images` are the records of the image blocks in the order of their placeholders. `notes` says what of the input
    has no place in the format and was left out or replaced.
    """

    segments: tuple[Segment, ...]
    thinking: bool
    opens: Opens
    images: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The prompt as text, for people. Control tokens and text that spells them look the same here, so it must
        not be encoded: use `encode`."""
        return "".join(segment.text for segment in self.segments)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids. Only the renderer's own markers become control tokens; replayed turns keep their ids.

        Raises TokenizerError when the vocabulary lacks a marker, TokenError for replayed ids out of range.
        """
        ids: list[int] = []
        for piece in _join_text(_written_out(self.segments, tokenizer)):
            if isinstance(piece, str):
                ids += tokenizer.encode(piece)
            elif isinstance(piece, Control):
                ids.append(tokenizer.control_id(piece.text))
            else:
                ids += piece
        return ids

    def __repr__(self) -> str:
        shown = self.text
        shown = shown if len(shown) <= 120 else f"{shown[:60]}…{shown[-59:]}"
        extra = f", {len(self.images)} images" if self.images else ""
        extra += f", notes={list(self.notes)!r}" if self.notes else ""
        return f"Prompt({shown!r}, opens={self.opens!r}{extra})"


def _written_out(segments: Iterable[Segment], tokenizer: Tokenizer) -> Iterator[Text | Control | list[int]]:
    for segment in segments:
        if isinstance(segment, Replay):
            ids = segment.resolve(tokenizer)
            if ids is None:
                yield from segment.parts
            else:
                yield ids
        else:
            yield segment


def _join_text(pieces: Iterable[Text | Control | list[int]]) -> Iterator[str | Control | list[int]]:
    """Neighbouring texts are encoded as one: a cut inside text would change its tokens."""
    held: list[str] = []
    for piece in pieces:
        if isinstance(piece, Text):
            held.append(piece.text)
            continue
        if held:
            yield "".join(held)
            held.clear()
        yield piece
    if held:
        yield "".join(held)
