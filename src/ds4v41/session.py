"""Session: tokens, position and caches of one conversation, and everything that advances them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _ext, saved
from .advance import checkpoint, replayed_note, reuse
from .aio import AsyncStream
from .chat import Event
from .chatting import ChatStream, Reply, check_stream_flag
from .checks import callback, not_a_prompt, path_of, positive_int, token_ids
from .drafting import Allowed, ModelProposer, Proposer
from .errors import ContextError, OptionError, StateError, shown
from .generation import Generation, GenerationOptions
from .history import tagged_with
from .ledger import Ledger
from .memory import MAX_STEP_ROWS, run_rows
from .prefill import LogitsChoice, ProgressCallback, run_prefill
from .results import Completion, Piece, Stats
from .sampling import Draw

if TYPE_CHECKING:
    from .drafter import Drafter
    from .kvstore import KVStore, PutResult
    from .model import Model
    from .sampling import Sampler

Mark = _ext.Mark
CHECKPOINT_TOKENS = 2048
"""In the middle of a long prefill the store gets a checkpoint at the end of a chunk after so many tokens."""


class Session:
    """One conversation with a model. Made by `Model.session`; a context manager.

    A session takes one call at a time: a second thread that calls it gets a StateError. Different sessions of a model
    may run in different threads, and none changes another's bits (E5).
    """

    def __init__(
        self,
        model: Model,
        *,
        context: int = 0,
        retain: int = 0,
        chunk: int = 0,
        drafter: Drafter | None = None,
        store: KVStore | None = None,
        every_row: bool = False,
        ext: _ext.Session | None = None,
    ) -> None:
        self._model = model
        self._drafter = drafter
        # A step's rows are one run, however short the chunks of a prefill.
        if ext is None:
            rows = run_rows(chunk, context)
            draft = drafter._handle() if drafter else None
            ext = _ext.Session(model._handle(), context, retain, rows, draft, every_row)
        self._ext = ext
        self._chunk = chunk
        self._store = store
        # Rows from here on are verified drafts that the text has not reached (None: there are none).
        self._hold: int | None = None
        self._fault: str | None = None
        self._unsafe: str | None = None
        self._store = store
        self._last_row: tuple[int, NDArray[np.float32]] | None = None
        self._stats = Stats()
        self._epoch = 0

    # ---- what it is --------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The model this session runs."""
        return self._model

    @property
    def tokens(self) -> list[int]:
        """The tokens in the caches, in order. The last token of a generated text is not among them until something
        follows it: the model has not read it yet."""
        tokens: list[int] = self._ext.tokens[: self._hold].tolist()
        return tokens

    @property
    def position(self) -> int:
        """How many tokens the caches hold; the next token gets this position."""
        position = int(self._ext.position)
        return position if self._hold is None else min(position, self._hold)

    @property
    def drafter(self) -> Drafter | None:
        """The drafter it was opened with."""
        return self._drafter

    @property
    def drafter_fault(self) -> str | None:
        """Why drafting is off for this session, after the drafter failed; None while it works."""
        if self._fault is None and self._drafter is not None and self._ext.drafter_fault:
            self._note_fault(self._ext.drafter_fault)
        return self._fault

    @property
    def context(self) -> int:
        """How many tokens the caches can hold."""
        return int(self._ext.context)

    @property
    def chunk(self) -> int:
        """Rows of one prefill run: what was asked for, or less because of memory."""
        return self._chunk

    @property
    def stats(self) -> Stats:
        """What the last call did (reused, prefilled, decoded, seconds, why) and the totals."""
        # While another thread runs, or after close(), the number stays as it was.
        with contextlib.suppress(StateError):
            self._stats.engram_wait = self._ext.engram_counters()["wait_seconds"]
        return self._stats

    @property
    def epoch(self) -> int:
        """Changes whenever a call starts that is not the continuation of a running generation."""
        return self._epoch

    @property
    def closed(self) -> bool:
        """True after close()."""
        return bool(self._ext.closed)

    # ---- rows ----------------------------------------------------------------------------------------------------

    def prefill(
        self,
        tokens: ArrayLike,
        logits: LogitsChoice | None = "last",
        *,
        progress: ProgressCallback | None = None,
    ) -> NDArray[np.float32] | None:
        """Append `tokens` [n], any n >= 1.

        logits: "last" gives float32 [1, vocab], "all" float32 [n, vocab], None nothing. Interrupting it (Ctrl-C,
        cancel(), an exception from `progress`) leaves the session valid, with the chunks that were complete.
        Raises TokenError for an empty list or ids out of range, ContextError when n tokens do not fit.
        """
        if not (logits is None or (isinstance(logits, str) and logits in ("last", "all"))):
            raise OptionError(f'logits: expected "last", "all" or None, found {shown(logits)}')
        callback("progress", progress)
        ids = token_ids(tokens, self._model.config.vocab_size)
        self._fits(len(ids))
        self._begin()
        self._stats.begin(0, "prefill appends to what is there")
        return self._append(tagged_with(ids, self._model.prefill == "matrix"), logits, 0, progress)

    def step(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """Append 1 to 8 tokens and return the logits after each: float32 [n, vocab]. Same bits as prefill (E1), but for
        models opened with prefill="matrix": steps are canonical always."""
        ids = token_ids(tokens, self._model.config.vocab_size)
        if len(ids) > MAX_STEP_ROWS:
            raise OptionError(f"step: expected 1 to {MAX_STEP_ROWS} tokens, found {len(ids)}; use prefill for more")
        self._fits(len(ids))
        self._begin()
        rows = self._ext.run(ids, "all")
        assert rows is not None
        self._last_row = (self.position, rows[-1])
        return rows

    def _begin(self) -> None:
        """A new call: a cancel() that came too late for the last one does not touch it.

        Raises StateError, and changes nothing, when the session is closed or busy in another thread.
        """
        self._new_call()
        self.drop_ahead()

    def _new_call(self) -> None:
        _ = self._ext.position
        self._epoch += 1
        self._last_row = None
        self._ext.clear_cancel()

    def _fits(self, n: int) -> None:
        left = self.room
        if n > left:
            raise ContextError(
                f"{n:,} tokens do not fit: {self.position:,} of the context of {self.context:,} are used, {left:,} are "
                "left; open the session with a larger context="
            )

    def _append(
        self,
        history: NDArray[np.int32],
        logits: LogitsChoice | None,
        cached: int,
        progress: ProgressCallback | None,
        shared: int = 0,
    ) -> NDArray[np.float32] | None:
        self._last_row = None
        kept = self.position

        def done(n: int, seconds: float, matrix: bool) -> None:
            nonlocal kept
            self._stats.add_prefill(n, seconds, matrix)
            if self.position == shared or self.position - kept >= CHECKPOINT_TOKENS:
                kept = self.position
                checkpoint(self, branch=kept == shared)

        n_vocab = self._model.config.vocab_size
        rows = run_prefill(self._ext, history, logits, n_vocab, self._chunk, cached, progress, done, shared - kept)
        if kept != self.position:
            checkpoint(self)
        if rows is not None:
            self._last_row = (self.position, rows[-1])
        return rows

    def advance_to(
        self, ids: NDArray[np.int32], progress: ProgressCallback | None = None, shared: int = 0
    ) -> NDArray[np.float32]:
        """Make the session hold exactly `ids` [n], reusing the common prefix; the logits after the last: [vocab].

        shared: how many tokens other conversations begin with as well (a system prompt): the store gets a checkpoint
        there. `stats.reused` and `stats.why` say what was reused and why not more.
        """
        if len(ids) > self.context:
            raise ContextError(
                f"a prompt of {len(ids):,} tokens does not fit into the context of {self.context:,}; open the session "
                "with a larger context="
            )
        row = self._last_row
        self._begin()
        keep, history = reuse(self, ids)
        if keep == len(ids):
            known = row[1] if row is not None and row[0] == keep and self._stats.restored == 0 else None
            logits = np.asarray(self._ext.last_logits(), np.float32) if known is None else known
            self._last_row = (keep, logits)
            return logits
        self._append(history[keep:], "last", keep, progress, shared)
        assert self._last_row is not None
        return self._last_row[1]

    def feed(self, token: int) -> NDArray[np.float32]:
        """Append one generated token; the logits after it: [vocab]."""
        self.drop_ahead()
        self._last_row = None
        rows = self._ext.run(np.array([token], np.int32), "last")
        assert rows is not None
        self._last_row = (self.position, rows[0])
        return self._last_row[1]

    # ---- used by the decode loop -------------------------------------------------------------------------------

    def feed_draw(self, token: int, sampler: Sampler, history: Any, chances: bool = False) -> Draw:
        """Append one generated token (`history` knows it already) and draw the next; chances: with `Draw.chance`."""
        self.drop_ahead()
        self._last_row = None
        return Draw(*self._ext.feed_draw(token, sampler.handle, sampler.seed, history, chances))

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        return self.context - self.position

    @property
    def block_size(self) -> int:
        """Most drafts of one cycle; 0 without a drafter."""
        return self._drafter.block_size if self._drafter is not None else 0

    @property
    def n_ahead(self) -> int:
        """Verified drafts that the text has not reached."""
        return int(self._ext.position) - self.position

    @property
    def draft_backlog(self) -> int:
        """Rows that a draft would have to put into the drafter's windows first."""
        return int(self._ext.draft_unsettled)

    def settle_drafter(self) -> int:
        """Put the newest of them there, half a window at most; how many they were."""
        return int(self._ext.draft_settle_some())

    def proposer(self, sampler: Sampler, history: Any, allowed: Allowed | None) -> Proposer:
        """What makes drafts for a text with these options."""
        return ModelProposer(self, sampler, history, allowed)

    def verify(self, tokens: list[int]) -> NDArray[np.float32]:
        """Append one generated token and drafts after it; the logits after each: [n, vocab], the bits of `feed`.

        Only the first token counts as read; `accept` takes one more each time, `drop_ahead` takes back the rest.
        """
        self.drop_ahead()
        self._last_row = None
        self._hold = self.position + 1  # before the run: an interrupt right after it must not leave drafts behind
        rows = self._ext.run(np.array(tokens, np.int32), "all")
        assert rows is not None
        self._last_row = (self.position, rows[0])
        return rows

    def verify_draw(self, tokens: list[int], sampler: Sampler, history: Any) -> list[Draw]:
        """The same, with the draws from row after row while the drafts hold; those that do not are taken back."""
        self.drop_ahead()
        self._last_row = None
        self._hold = self.position + 1
        try:
            drawn = self._ext.verify_draw(tokens, sampler.handle, sampler.seed, history, True)
        except BaseException as error:
            if self._ext.taking_back:
                self._unsafe = f"{type(error).__name__}: {error}"
            raise
        return [Draw(*draw) for draw in drawn]

    def accept(self) -> None:
        """The text reached the next verified draft."""
        assert self._hold is not None and self._hold < self._ext.position
        self._hold += 1
        self._last_row = None

    def drop_ahead(self) -> None:
        """Take back verified drafts that the text did not reach. Raises StateError while the session is unsafe."""
        if self._unsafe is not None:
            raise StateError(
                f"taking back rejected drafts failed ({self._unsafe}); rewind() the session, or close it and open "
                "another"
            )
        if self._hold is None:
            return
        if self._ext.position > self._hold:
            try:
                self._ext.truncate(self._hold)
            except BaseException as error:
                self._unsafe = f"{type(error).__name__}: {error}"
                raise
        self._hold = None

    def drop_drafter(self, reason: str) -> None:
        """The drafter failed: no more drafts in this session. What the session computed is not touched by it."""
        self._note_fault(reason)
        self._ext.drop_drafter()

    def _note_fault(self, reason: str) -> None:
        self._fault = reason
        if self._stats.drafter is not None:
            self._stats.drafter.off_reason = reason

    # ---- where the time goes ------------------------------------------------------------------------------------

    def start_ledger(self) -> None:
        """From now on count and time every operation (`ledger()`); calling it again starts anew. Changes no result."""
        self._ext.start_ledger()

    def ledger(self) -> Ledger:
        """What was counted since `start_ledger()`: bytes, seconds and rates by operation and layer.

        Raises StateError when it was not started.
        """
        data = self._ext.ledger()
        if data is None:
            raise StateError("the ledger is off; call start_ledger() before the steps to be measured")
        return Ledger.from_ext(data)

    def draft_ledger(self) -> Ledger:
        """The same for the drafter: a run is a draft block with the draws behind it. Raises StateError without one."""
        data = self._ext.draft_ledger()
        if data is None:
            raise StateError("there is no ledger of a drafter; open the session with drafter= and call start_ledger()")
        return Ledger.from_ext(data)

    # ---- going back --------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """A mark of the present position. `truncate(mark)` comes back to it with the same bits, however far the
        session went on, unless it went back below the mark in between."""
        self.drop_ahead()
        if not self._ext.ready:
            self._ext.clear_cancel()  # tokens will run: a cancel() that came too late for the last call is not meant
        return self._ext.mark()

    def truncate(self, to: int | Mark) -> None:
        """Go back to a position or mark, for nothing; exact (E3). Raises StateError when a position is out of range,
        or was not marked and its window rows are not there: older than `retain` tokens, or decoder rows of a prompt
        that were never computed (`rewind` runs what is missing)."""
        if isinstance(to, Mark):
            self._new_call()
            self._ext.truncate_to_mark(to)
            self._hold = self._unsafe = None
            return
        if isinstance(to, bool) or not isinstance(to, (int, np.integer)):
            raise OptionError(f"truncate: expected a position or a mark, found {shown(to)}")
        if not 0 <= to <= self.position:
            raise StateError(f"truncate: expected a position from 0 to {self.position}, found {shown(to)}")
        self._new_call()
        self._ext.truncate(int(to))
        self._hold = self._unsafe = None

    def rewind(self, position: int) -> None:
        """Go back to any earlier position; exact (E3). Where window rows are not kept, the tokens they depend on are
        run again (at most layers x (window - 1) + 257 of them), which `stats.why` says."""
        position = positive_int("position", position, minimum=0)
        have = self.position
        if position > have:
            raise StateError(f"rewind: expected a position from 0 to {have}, found {position}")
        self._new_call()
        encoder = self._ext.encoder_kept(position)
        again = self._ext.rewind(position)
        self._hold = self._unsafe = None
        note = replayed_note(encoder, again)
        self._stats.begin(position, f"rewound to {position:,} of {have:,}{note}", replayed=again)

    def fork(self) -> Session:
        """A second session with the same state. Memory is shared until one of the two writes to it; bits never are.

        It has the same store, no marks, and statistics of its own.
        """
        self._begin()
        ext = self._ext.fork()
        other = Session(self._model, chunk=self._chunk, drafter=self._drafter, store=self._store, ext=ext)
        other._fault = self.drafter_fault
        return other

    # ---- keeping it --------------------------------------------------------------------------------------------

    @property
    def store(self) -> KVStore | None:
        """The store that this session reads from and writes to."""
        return self._store

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the whole state to one file; `Model.load_session` continues it with the same bits (E3). Returns the
        bytes written. Raises StoreError when the file cannot be written; an old one is then still there."""
        where = path_of("path", path)
        self._begin()
        return saved.save(self._ext, where, self._root(), self._model.numerics_id)

    def checkpoint(self) -> PutResult | None:
        """Put the present state into the store now (it happens by itself at the end of prefills and turns); None
        without a store."""
        return checkpoint(self)

    def _root(self) -> bytes:
        return self._model.store_root

    # ---- text --------------------------------------------------------------------------------------------------

    def generate(self, prompt: str | ArrayLike, **options: Any) -> Generation:
        """Continue `prompt` (text, or token ids); iterate over the result for pieces, or call its `finish()`.

        Text gets the begin-of-sentence token in front. The prompt is the whole context: what the session already
        holds of it is reused. Options: max_tokens, stop (strings or token ids), mask, progress, drafting ("auto",
        "answers": not inside reasoning, "off", or a number of drafts to force), and those of `SamplingParams`:
        temperature, top_p, top_k, min_p, seed, presence_penalty, frequency_penalty, repetition_penalty, logit_bias,
        logprobs, top_logprobs. Defaults are the checkpoint's (`Model.default_sampling`). Unknown options raise
        OptionError.

        >>> import ds4v41
        >>> with ds4v41.Model.open() as model, model.session() as session:
        ...     text = "".join(piece.text for piece in session.generate("def add(a, b):", max_tokens=8, temperature=0))
        """
        settings = GenerationOptions.from_options(options, self._model)
        return Generation(self, self._prompt_ids(prompt), settings)

    def agenerate(self, prompt: str | ArrayLike, **options: Any) -> AsyncStream[Piece, Completion]:
        """As `generate`: `async for piece in ...`, or `await` it for the whole Completion. The work runs in a thread;
        cancelling the task stops it and leaves the session valid."""
        return AsyncStream(self.generate(prompt, **options))

    def _prompt_ids(self, prompt: str | ArrayLike) -> NDArray[np.int32]:
        if isinstance(prompt, str):
            return np.asarray(self._model.tokenizer.encode(prompt, add_bos=True), np.int32)
        not_a_prompt(prompt)
        return token_ids(prompt, self._model.config.vocab_size)

    @overload
    def chat(self, messages: Sequence[Any], *, stream: Literal[False] = False, **options: Any) -> Reply: ...
    @overload
    def chat(self, messages: Sequence[Any], *, stream: Literal[True], **options: Any) -> ChatStream: ...
    def chat(self, messages: Sequence[Any], *, stream: bool = False, **options: Any) -> Reply | ChatStream:
        """Answer `messages` (dictionaries or `Message`s): the whole conversation, of which what the session already
        holds is reused.

        Returns a Reply (content, reasoning, tool_calls, finish_reason, usage, timings); with stream=True a ChatStream
        that yields events and has the reply at the end. Options: tools, tool_choice ("auto" or "none"),
        response_format, thinking, reasoning_effort, revision, drop_thinking, and everything that `generate` takes.
        Unknown options raise OptionError, messages that cannot be rendered ChatError.
        """
        running = ChatStream.start(self, messages, options)
        return running if check_stream_flag(stream) else running.finish()

    def achat(self, messages: Sequence[Any], **options: Any) -> AsyncStream[Event, Reply]:
        """As `chat`: `await` it for the Reply, or `async for event in ...`; cancelling the task stops it."""
        return AsyncStream(ChatStream.start(self, messages, options))

    # ---- life --------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Stop the call that runs in another thread: it raises Cancelled, the session stays valid."""
        self._ext.cancel()

    def close(self) -> None:
        """Give the caches back. Further calls raise StateError; closing twice is fine."""
        self._last_row = None
        if not self._ext.closed:
            self._ext.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<Session: closed>"
        return f"<Session: position {self.position:,} of {self.context:,}; {self._stats.why}>"
