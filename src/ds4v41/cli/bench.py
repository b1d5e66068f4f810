"""`ds4v41 bench engram`: measurements of this machine."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from ..bench import engram
from .output import print_json


def run(args: Namespace) -> int:
    """Measure and print; the report is the result, so it goes to stdout."""
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
