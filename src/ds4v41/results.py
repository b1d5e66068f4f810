"""What calls give back: pieces of text, completions, usage, timings, statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .kvstore import PutResult

from .admission import DrafterStats

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
"""stop: end of turn, stop id or stop string; length: max_tokens or the end of the context; tool_calls: calls to run."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log probability in the model's own distribution, and the likeliest tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of generated text. `text` may be empty (the token holds a part of a character, or text is held back
    because a stop string may begin); `token` is None for text that was held back until the end."""

    text: str
    token: int | None
    position: int
    logprob: TokenLogprob | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call."""

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one call. Rates are tokens per second; None when nothing was done."""

    prefill_seconds: float
    prefilled: int
    decode_seconds: float
    decoded: int

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens computed (not reused) per second."""
        return self.prefilled / self.prefill_seconds if self.prefilled and self.prefill_seconds > 0 else None

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens per second, after the first, which comes out of the prefill."""
        return self.decoded / self.decode_seconds if self.decoded and self.decode_seconds > 0 else None

    def __str__(self) -> str:
        parts = []
        if self.prefill_rate is not None:
            seconds, rate = self.prefill_seconds, self.prefill_rate
            parts.append(f"prefill {self.prefilled:,} tokens in {seconds:.2f} s ({rate:,.0f}/s)")
        if self.decode_rate is not None:
            parts.append(f"decode {self.decoded:,} steps in {self.decode_seconds:.2f} s ({self.decode_rate:,.1f}/s)")
        return ", ".join(parts) or "nothing computed"


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generated text."""

    text: str
    tokens: list[int] = field(repr=False)
    finish_reason: FinishReason
    seed: int
    usage: Usage
    timings: Timings
    stop: str | int | None = None
    """The stop string or stop id that ended it."""
    logprobs: list[TokenLogprob] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        usage = self.usage
        return (
            f"<pre>{escape(self.text)}</pre><small>{usage.completion_tokens} tokens, {escape(self.finish_reason)}; "
            f"{usage.reused_tokens} of {usage.prompt_tokens} prompt tokens reused; {escape(str(self.timings))}</small>"
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a prefill is. `cached` tokens were reused; `processed` of the other `total - cached` are done."""

    total: int
    cached: int
    processed: int
    seconds: float


@dataclass(slots=True)
class Stats:
    """What the last call of a session did, and what all its calls did together."""

    reused: int = 0
    prefilled: int = 0
    decoded: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    why: str = "nothing ran yet"
    """Why not more tokens were reused."""
    replayed: int = 0
    """Tokens run again because window rows in front of the reused position were not kept, in all layers or in the
    decoder's only; `why` says which."""
    restored: int = 0
    """Of the reused tokens, those that came from a store."""
    matrix: int = 0
    """Of the prefilled tokens, those that were computed in the matrix class (`Model.open(prefill="matrix")`)."""
    stored: PutResult | None = None
    """What became of the last checkpoint."""
    total_reused: int = 0
    total_prefilled: int = 0
    total_decoded: int = 0
    engram_wait: float = field(default=0.0, repr=False)
    """Seconds that layers of this session waited for Engram rows, in all: what the disk cost. `Model.engram` has the
    rest."""
    drafter: DrafterStats | None = field(default=None, repr=False)
    """What drafting did in the last call; None when the session has no drafter or did not use it."""

    @property
    def timings(self) -> Timings:
        """Rates of the last call."""
        return Timings(self.prefill_seconds, self.prefilled, self.decode_seconds, self.decoded)

    def begin(self, reused: int, why: str, replayed: int = 0, restored: int = 0) -> None:
        """A new call that found `reused` tokens in the session, or `restored` of them in a store."""
        self.reused, self.why = reused, why
        self.replayed, self.restored = replayed, restored
        self.prefilled = self.decoded = self.matrix = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self.drafter = None
        self.total_reused += reused

    def add_prefill(self, n: int, seconds: float, matrix: bool = False) -> None:
        """n prompt tokens were computed, in the canonical class or in the matrix class."""
        self.prefilled += n
        self.matrix += n if matrix else 0
        self.total_prefilled += n
        self.prefill_seconds += seconds

    def add_decode(self, n: int, seconds: float) -> None:
        """n generated tokens were fed back."""
        self.decoded += n
        self.total_decoded += n
        self.decode_seconds += seconds

    def _repr_html_(self) -> str:
        rows = [
            ("reused", f"{self.reused:,}"),
            ("restored", f"{self.restored:,}"),
            ("replayed", f"{self.replayed:,}"),
            ("prefilled", f"{self.prefilled:,}{', matrix class' if self.matrix else ''}"),
            ("decoded", f"{self.decoded:,}"),
            ("why", escape(self.why)),
            ("timings", escape(str(self.timings))),
        ]
        if self.drafter is not None:
            rows.append(("drafter", escape(str(self.drafter))))
        return "<table>" + "".join(f"<tr><th>{k}</th><td>{v}</td></tr>" for k, v in rows) + "</table>"
