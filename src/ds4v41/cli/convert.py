"""`ds4v41 convert`: an official folder to a GGUF file, model or drafter."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from ..checkpoint.convert import convert, convert_drafter
from ..checkpoint.convert_plan import Plan
from ..checks import path_of
from .output import Bar, print_json
from .parser import UsageError


def run(args: Namespace) -> int:
    """Convert, or print the plan with --dry-run."""
    drafter, source, out = _paths(args)
    if drafter and args.tokenizer is not None:
        raise UsageError("convert drafter: --tokenizer is for the model; a drafter file holds none")
    with Bar(f"writing {out.name}") as bar:
        options = {
            "progress": lambda done, total, _name: bar.update(done, total),
            "dry_run": args.dry_run,
            "threads": args.threads,
            "revision": args.revision,
            "overwrite": args.overwrite,
        }
        if drafter:
            plan = convert_drafter(source, out, args.recipe, **options)
        else:
            plan = convert(source, out, args.recipe, tokenizer=args.tokenizer, **options)
    if args.json:
        print_json(plan.to_json())
    else:
        print("\n".join([*_lines(plan), "nothing written (--dry-run)" if args.dry_run else f"written: {out}"]))
    return 0


def _paths(args: Namespace) -> tuple[bool, Path, Path]:
    """Is it the drafter? Source and output (a name that is never used when a dry run has none)."""
    drafter = args.paths[0] == "drafter"
    paths = args.paths[1:] if drafter else args.paths
    if len(paths) == 1 and args.dry_run:
        paths = [*paths, os.devnull]
    if len(paths) != 2:
        name = "convert drafter" if drafter else "convert"
        raise UsageError(f"{name}: expected OFFICIAL and OUT, found {len(paths)} path(s): {' '.join(paths)}")
    return drafter, path_of("OFFICIAL", paths[0]), path_of("OUT", paths[1])


def _lines(plan: Plan) -> list[str]:
    """The plan for people."""
    types = ", ".join(f"{n:,} {name} ({size:,} bytes)" for name, (n, size) in plan.bytes_by_type().items())
    return [
        f"{plan.kind}, recipe {plan.recipe}: {plan.quantization}",
        f"{len(plan.tensors):,} tensors: {types}",
        f"header  {plan.data_start:>19,} bytes ({plan.header})",
        f"main    {plan.main_bytes:>19,} bytes",
        f"Engram  {plan.engram_bytes:>19,} bytes",
        f"file    {plan.file_bytes:>19,} bytes",
        *(f"note: {text}" for text in plan.notes),
    ]
