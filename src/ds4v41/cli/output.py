"""What commands print: text as it comes, JSON, notes on stderr, progress."""

from __future__ import annotations

import json
import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    from ..results import Stats, Timings, TokenLogprob, Usage

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
_BAR_AFTER = 0.5
_LINE_EVERY = 10.0
_PLAIN_WIDTH = 2000
# A terminal obeys control characters: generated text must not move the cursor or retitle the window.
_HARMLESS = dict.fromkeys(
    [*range(0x09), 0x0B, 0x0C, 0x0D, *range(0x0E, 0x20), *range(0x7F, 0xA0)], "\N{REPLACEMENT CHARACTER}"
)


def is_terminal(stream: TextIO) -> bool:
    """Is it a terminal that a person looks at?"""
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def has_colour(stream: TextIO) -> bool:
    """May escape sequences be written to it?"""
    return is_terminal(stream) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def show(text: str) -> None:
    """Generated text, at once. In a terminal without control characters; into a file or pipe as it is."""
    if text:
        sys.stdout.write(text.translate(_HARMLESS) if is_terminal(sys.stdout) else text)
        sys.stdout.flush()


def note(text: str) -> None:
    """A line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any, *, one_line: bool = False) -> None:
    """JSON on stdout."""
    print(json.dumps(value, ensure_ascii=False, indent=None if one_line else 2), flush=True)


def console(stream: TextIO) -> Console:
    """A rich console: coloured in a terminal, plain and wide elsewhere."""
    from rich.console import Console

    if is_terminal(stream):
        return Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, width=_PLAIN_WIDTH, no_color=True, force_terminal=False)


def usage_json(usage: Usage) -> dict[str, int]:
    """Plain data."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "reused_tokens": usage.reused_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def timings_json(timings: Timings) -> dict[str, float | int | None]:
    """Plain data; rates are tokens per second."""
    return {
        "prefill_seconds": timings.prefill_seconds,
        "prefilled": timings.prefilled,
        "prefill_rate": timings.prefill_rate,
        "decode_seconds": timings.decode_seconds,
        "decoded": timings.decoded,
        "decode_rate": timings.decode_rate,
    }


def logprobs_json(logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    """Plain data."""
    return [
        {"token": entry.token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
        for entry in logprobs
    ]


def note_stats(stats: Stats, usage: Usage, finish_reason: str | None, seed: int) -> None:
    """What a call did, on stderr."""
    note(
        f"[{usage.prompt_tokens:,} prompt tokens, {usage.reused_tokens:,} reused ({stats.why}); "
        f"{usage.completion_tokens:,} generated, {finish_reason}; seed {seed}]"
    )
    note(f"[{stats.timings}]")
    if stats.drafter is not None:
        note(f"[drafter: {stats.drafter}]")


class Bar:
    """Progress on stderr: a bar in a terminal once it takes longer than a moment, now and then a line elsewhere.

    `unit` is "bytes" or what is counted. Call `update(done, total)`; leaving the context removes the bar.
    """

    def __init__(self, title: str, unit: str = "bytes") -> None:
        self.title, self.unit = title, unit
        self._terminal = is_terminal(sys.stderr)
        self._started = self._last_line = time.monotonic()
        self._progress: RichProgress | None = None
        self._task: Any = None

    def update(self, done: int, total: int, title: str | None = None) -> None:
        """`done` of `total`; `title` names what is being worked on now."""
        if title is not None:
            self.title = title
        now = time.monotonic()
        if not self._terminal:
            if now - self._last_line >= _LINE_EVERY:
                self._last_line = now
                note(f"{self.title}: {self._count(done)} of {self._count(total)} ({100 * done // max(total, 1)} %)")
            return
        if self._progress is None:
            if now - self._started < _BAR_AFTER:
                return
            self._progress = self._bar()
            self._task = self._progress.add_task(self.title, total=total)
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total, description=self.title)

    def _count(self, n: int) -> str:
        return f"{n / 2**30:,.2f} GiB" if self.unit == "bytes" else f"{n:,} {self.unit}"

    def _bar(self) -> RichProgress:
        from rich import progress as rich

        columns: list[rich.ProgressColumn] = [rich.TextColumn("{task.description}", markup=False), rich.BarColumn()]
        if self.unit == "bytes":
            columns += [rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()]
        else:
            columns += [rich.MofNCompleteColumn(), rich.TextColumn(self.unit, markup=False)]
        columns.append(rich.TimeRemainingColumn())
        return rich.Progress(
            *columns, console=console(sys.stderr), transient=True, redirect_stdout=False, redirect_stderr=False
        )

    def close(self) -> None:
        """Remove the bar; closing twice is fine, and a later update starts anew."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
