"""The decode loop: prompt in, tokens out, one at a time, until something ends it; and text made of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from .checks import callback, positive_int
from .drafting import DrawnRows, MaskedRows, Rows, make_steps
from .errors import ContextError, OptionError, StateError, shown
from .masks import MaskHook, Masks
from .prefill import ProgressCallback
from .results import Completion, FinishReason, Piece, Timings, TokenLogprob, Usage
from .sampling import Draw, Sampler, SamplingParams, unknown_option
from .stops import StopMatcher

if TYPE_CHECKING:
    from .model import Model
    from .session import Session

Item = TypeVar("Item")

_ASK_SECONDS = 0.002
_OWN = ("max_tokens", "stop", "mask", "progress", "drafting")


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Everything that `generate` takes besides the prompt, checked."""

    sampling: SamplingParams
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    mask: MaskHook | None = None
    progress: ProgressCallback | None = None
    drafting: str | int = "auto"
    """"auto": when it pays; "answers": the same, but not inside reasoning; "off"; or how many drafts every step
    verifies, for tests. Never changes a token."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any], model: Model) -> GenerationOptions:
        """Raises OptionError for unknown names and wrong values."""
        known = [*_OWN, *(f.name for f in fields(SamplingParams))]
        unknown = [unknown_option(name, known) for name in options if name not in known]
        if unknown:
            raise OptionError("; ".join(unknown))
        max_tokens = options.get("max_tokens")
        if max_tokens is not None:
            max_tokens = positive_int("max_tokens", max_tokens)
        for name in ("mask", "progress"):
            callback(name, options.get(name))
        drafting = options.get("drafting")
        drafting = "auto" if drafting is None else _drafting(drafting, model.config.dspark_block_size)
        strings, ids = _split_stops(options.get("stop"), model.config.vocab_size)
        given = {name: value for name, value in options.items() if name not in _OWN and value is not None}
        sampling = SamplingParams.from_options({**model.default_sampling, **given})
        return cls(sampling, max_tokens, strings, ids, options.get("mask"), options.get("progress"), drafting)


def _drafting(drafting: Any, block: int) -> str | int:
    if isinstance(drafting, str) and drafting in ("auto", "answers", "off"):
        return drafting
    if isinstance(drafting, bool) or not isinstance(drafting, int) or not 0 <= drafting <= block:
        raise OptionError(
            f'drafting: expected "auto", "answers", "off" or a number of drafts from 0 to {block}, found '
            f"{shown(drafting)}"
        )
    return drafting


def _split_stops(stop: Any, n_vocab: int) -> tuple[tuple[str, ...], frozenset[int]]:
    """Stop strings and stop token ids."""
    if stop is None:
        return (), frozenset()
    given = [stop] if isinstance(stop, (str, int, np.integer)) else stop
    if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
        raise OptionError(f"stop: expected text, a token id, or a list of these, found {type(stop).__name__}")
    strings, ids = [], []
    for i, item in enumerate(given):
        if isinstance(item, bool) or not isinstance(item, (str, int, np.integer)):
            raise OptionError(f"stop[{i}]: expected text or a token id, found {shown(item)}")
        if isinstance(item, str):
            strings.append(item)
        elif 0 <= item < n_vocab:
            ids.append(int(item))
        else:
            raise OptionError(f"stop[{i}]: expected a token id from 0 to {n_vocab - 1}, found {shown(item)}")
    StopMatcher(strings)  # refuses empty strings now, not in the middle
    return tuple(strings), frozenset(ids)


class TokenStream:
    """Draws token after token. The session holds the prompt and every token but the last one drawn."""

    def __init__(self, session: Session, prompt: NDArray[np.int32], options: GenerationOptions) -> None:
        self.session, self.prompt, self.options = session, prompt, options
        room = session.context - len(prompt)
        if len(prompt) >= session.context:
            raise ContextError(
                f"a prompt of {len(prompt):,} tokens leaves no room in the context of {session.context:,}; open the "
                "session with a larger context="
            )
        if options.max_tokens is not None and options.max_tokens > room:
            raise ContextError(
                f"max_tokens={options.max_tokens:,} does not fit: the prompt has {len(prompt):,} tokens, the context "
                f"{session.context:,}, which leaves {room:,}; lower max_tokens or open a larger context="
            )
        self.limit = room if options.max_tokens is None else options.max_tokens
        self.sampler = Sampler(options.sampling, session.model.config.vocab_size)
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_id: int | None = None
        self.shared = 0  # tokens that other prompts begin with as well
        self._epoch: int | None = None

    def __iter__(self) -> Iterator[tuple[Draw, int]]:
        """(draw, its position) of each token, stop ids excluded; sets `finish_reason` at the end."""
        session, options = self.session, self.options
        row = session.advance_to(self.prompt, options.progress, self.shared)
        epoch = self._epoch = session.epoch
        history = self.sampler.new_history(self.prompt) if options.sampling.needs_history else None
        masks = None if options.mask is None else Masks(options.mask, self.sampler.n_vocab)
        ahead = None if masks is None else lambda drafts: masks.ahead(self.tokens + drafts)
        rows: Rows = DrawnRows(session, self.sampler, history)
        if masks is not None:
            rows = MaskedRows(session, self.sampler, history, masks, self.tokens)
        steps = make_steps(session, self.sampler, history, self.limit, options.drafting, self.prompt, rows, ahead)
        try:
            draw, position = steps.first(row), len(self.prompt)
            while True:
                if draw.token in options.stop_ids:
                    self.finish_reason, self.stop_id = "stop", draw.token
                    return
                self.tokens.append(draw.token)
                yield draw, position
                if len(self.tokens) == self.limit:
                    break
                if session.epoch != epoch:
                    raise StateError(
                        "the session was used by another call while this text was being generated; finish or close one "
                        "before starting the next, or use another session"
                    )
                if history is not None:
                    history.add(np.array([draw.token], np.int32))
                draw = steps.advance(draw.token)
                position += 1
            self.finish_reason = "length"
        finally:
            if session.epoch == epoch and not session.closed:
                steps.close()

    def turn_ended(self) -> None:
        """Keep the state in the session's store, unless another call has taken the session over."""
        if self._epoch is not None and self.session.epoch == self._epoch:
            self.session.checkpoint()

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(len(self.prompt), self.session.stats.reused, len(self.tokens))

    @property
    def timings(self) -> Timings:
        """Seconds so far."""
        return self.session.stats.timings

    def logprob(self, draw: Draw) -> TokenLogprob | None:
        """The draw's log probabilities when they were asked for."""
        if draw.logprob is None:
            return None
        return TokenLogprob(draw.token, draw.logprob, draw.top_logprobs)


class Driven(Iterator[Item], Generic[Item]):
    """A generator that one thread drives and that any thread may close, in the middle of a prefill too."""

    def __init__(self, steps: Generator[Item, None, None], session: Session) -> None:
        self._steps, self._session = steps, session
        self._turn = Lock()
        self._thread: int | None = None
        self._closing = False

    def __next__(self) -> Item:
        if not self._turn.acquire(blocking=self._closing):  # (a close() in another thread is awaited)
            raise StateError("the next piece is being computed already; take the pieces in one thread at a time")
        try:
            self._thread = get_ident()
            return next(self._steps)
        finally:
            self._thread = None
            self._turn.release()

    def close(self) -> None:
        """End it. When another thread computes the next piece, its call raises Cancelled."""
        if self._thread == get_ident():
            raise StateError("close() was called by a callback of this very text; raise an exception there instead")
        self._closing = True
        while not self._turn.acquire(timeout=_ASK_SECONDS):
            self._session.cancel()
        try:
            self._steps.close()
        finally:
            self._turn.release()


@dataclass(slots=True)
class _Text:
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Generation(Iterator[Piece]):
    """Text being generated: an iterator over pieces. Nothing is computed before the first `next`.

    `close()` ends it early (the session stays valid); `finish()` runs it to the end; `result` has the whole
    Completion once it is over.
    """

    def __init__(self, session: Session, prompt: NDArray[np.int32], options: GenerationOptions) -> None:
        eos = frozenset({session.model.config.eos_token_id})
        options = GenerationOptions(
            options.sampling,
            options.max_tokens,
            options.stop_strings,
            options.stop_ids | eos,
            options.mask,
            options.progress,
            options.drafting,
        )
        self.session = session
        self._stream = TokenStream(session, prompt, options)
        self._stops = StopMatcher(options.stop_strings)
        self._text = _Text()
        self._result: Completion | None = None
        self._pieces = Driven(self._run(), session)

    def _run(self) -> Generator[Piece, None, None]:
        decoder = self.session.model.tokenizer.stream(skip_special=True)
        draws = iter(self._stream)
        try:
            for draw, position in draws:
                logprob = self._stream.logprob(draw)
                if logprob is not None:
                    self._text.logprobs.append(logprob)
                shown, hit = self._stops.push(decoder.push(draw.token))
                self._text.parts.append(shown)
                if hit is not None:
                    self._conclude("stop", hit)
                yield Piece(shown, draw.token, position, logprob)
                if hit is not None:
                    return
            rest, hit = self._stops.push(decoder.flush())
            rest += self._stops.flush()
            self._text.parts.append(rest)
            reason = self._stream.finish_reason or "cancelled"
            if hit is not None:
                self._conclude("stop", hit)
            else:
                self._conclude(reason, self._stream.stop_id)
            if rest:
                yield Piece(rest, None, self.session.position)
        finally:
            if self._result is None:
                self._conclude("cancelled", None)

    def _conclude(self, reason: FinishReason, stop: str | int | None) -> None:
        stream = self._stream
        stream.turn_ended()
        wanted = stream.options.sampling.logprobs
        self._result = Completion(
            text="".join(self._text.parts),
            tokens=list(stream.tokens),
            finish_reason=reason,
            seed=stream.sampler.seed,
            usage=stream.usage,
            timings=stream.timings,
            stop=stop,
            logprobs=list(self._text.logprobs) if wanted else None,
        )

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End it here. The session holds what was computed; `result.finish_reason` is "cancelled"."""
        self._pieces.close()
        if self._result is None:
            self._conclude("cancelled", None)

    def finish(self) -> Completion:
        """Run to the end and return everything."""
        for _ in self:
            pass
        if self._result is None:  # closed before it began
            self._conclude("cancelled", None)
        return self.result

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text.parts)

    @property
    def seed(self) -> int:
        """The seed of the draws: the one that was given, or the fresh one."""
        return self._stream.sampler.seed

    @property
    def result(self) -> Completion:
        """The whole completion. Raises StateError before the end."""
        if self._result is None:
            raise StateError("this text is still being generated: exhaust the iterator, or call finish() or close()")
        return self._result

    def __repr__(self) -> str:
        state = "not finished" if self._result is None else self._result.finish_reason
        return f"<Generation: {len(self._stream.tokens)} tokens, {state}, seed {self.seed}>"
