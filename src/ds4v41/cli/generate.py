"""`ds4v41 generate`: continue a text."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from .inputs import check_text, open_model, open_session, read_stdin, read_text
from .output import Bar, is_terminal, logprobs_json, note_stats, print_json, show, timings_json, usage_json
from .parser import UsageError, sampling_options

if TYPE_CHECKING:
    from ..generation import Generation
    from ..model import Model
    from ..results import Completion, Progress

INTERRUPTED = 130


def run(args: Namespace) -> int:
    """Generate and print; 130 when Ctrl-C ended it, with what there was until then printed."""
    options = sampling_options(args)
    prompt = _prompt(args)
    with open_model(args) as model, open_session(model, args) as session, Bar("reading the prompt", "tokens") as bar:

        def progress(p: Progress) -> None:
            bar.update(p.cached + p.processed, p.total)

        generation = session.generate(prompt, progress=progress, **options)
        interrupted = _stream(generation, bar, quiet=args.json)
        result = generation.result
        if args.json:
            print_json(completion_json(result, model), one_line=True)
        elif not result.text.endswith("\n"):
            print(flush=True)
        if args.stats:
            note_stats(session.stats, result.usage, result.finish_reason, result.seed)
    return INTERRUPTED if interrupted else 0


def _prompt(args: Namespace) -> str:
    if args.text is not None and args.file is not None:
        raise UsageError("generate: give TEXT or --file, not both")
    if args.text is not None:
        return check_text(args.text, "TEXT")
    if args.file is not None:
        return read_text(args.file)
    if is_terminal(sys.stdin):
        raise UsageError('generate: expected a prompt: ds4v41 generate "text", --file PATH, or text on stdin')
    return read_stdin()


def _stream(generation: Generation, bar: Bar, quiet: bool) -> bool:
    """Show pieces as they come; True when Ctrl-C ended it."""
    try:
        for piece in generation:
            bar.close()
            if not quiet:
                show(piece.text)
    except KeyboardInterrupt:
        generation.close()
        return True
    return False


def completion_json(result: Completion, model: Model) -> dict[str, Any]:
    """Plain data of a completion."""
    out: dict[str, Any] = {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stop": result.stop,
        "seed": result.seed,
        "usage": usage_json(result.usage),
        "timings": timings_json(result.timings),
        "model": str(model.path),
        "numerics_id": model.numerics_id,
    }
    if result.logprobs is not None:
        out["logprobs"] = logprobs_json(result.logprobs)
    return out
