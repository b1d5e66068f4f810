"""`ds4v41 bench engram`: is the disk fast enough? `ds4v41 bench` alone: what can be measured."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from ..bench import engram
from .output import print_json
from .parser import SPEED, UsageError


def run(args: Namespace) -> int:
    """Measure and print; the report is the result, so it goes to stdout."""
    if args.path is None:
        known = [*SPEED.items(), ("engram", "the disk and the Engram tables")]
        lines = [f"  {name:8} {what}" for name, what in known]
        raise UsageError("\n".join(["bench: expected what to measure, one of", *lines]))
    result = engram.run(
        args.path,
        engram_path=args.engram_path,
        text=args.text,
        direct=args.direct,
        seconds=args.seconds,
        step_seconds=args.step_ms / 1e3,
        chunk=args.chunk,
    )
    if args.json:
        print_json(asdict(result) | {"verdict": result.verdict()})
    else:
        print(result)
    return 0
