"""`ds4v41 synth`: a GGUF file with random weights."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from ..checks import path_of, positive_int
from ..errors import CheckpointError
from ..synth_gguf import write_drafter, write_gguf
from .output import Bar, print_json
from .parser import UsageError


def run(args: Namespace) -> int:
    """Write the file and say what is in it."""
    out = path_of("OUT", args.out)
    drafter = _drafter_path(args, out)
    experts = 16 if args.drafter_experts is None else positive_int("--drafter-experts", args.drafter_experts)
    with Bar(f"writing {out.name}") as bar:
        report = write_gguf(
            out,
            args.shape,
            layers=args.layers,
            experts=args.experts,
            recipe=args.recipe,
            engram_rows=args.engram_rows,
            drafter_experts=0 if drafter is None else experts,
            seed=args.seed,
            overwrite=args.overwrite,
            progress=lambda done, total, _name: bar.update(done, total),
        )
    drafter_bytes = 0
    if drafter is not None:
        with Bar(f"writing {drafter.name}") as bar:
            drafter_bytes = write_drafter(
                drafter,
                report.config,
                args.recipe,
                seed=args.seed,
                overwrite=args.overwrite,
                progress=lambda done, total, _name: bar.update(done, total),
            )
    if args.json:
        print_json(
            {
                "path": str(report.path),
                "file_bytes": report.file_bytes,
                "main_bytes": report.main_bytes,
                "engram_bytes": report.engram_bytes,
                "drafter_bytes": drafter_bytes,
                "layers": list(report.kinds),
            }
        )
    else:
        lines = [f"layer {i:2}  {kind}" for i, kind in enumerate(report.kinds)]
        print("\n".join([*lines, f"written: {report.path}, {report.file_bytes:,} bytes"]))
        if drafter is not None:
            print(f"written: {drafter}, {drafter_bytes:,} bytes")
    return 0


def _drafter_path(args: Namespace, out: Path) -> Path | None:
    """Where the drafter goes. What is wrong with that is said before the model is written."""
    if args.drafter is None:
        if args.drafter_experts is not None:
            raise UsageError("synth: --drafter-experts is for the drafter: add --drafter D.gguf")
        return None
    path = path_of("--drafter", args.drafter)
    if os.path.realpath(path) == os.path.realpath(out):
        raise UsageError(f"synth: model and drafter would be the same file, {path}")
    if os.path.lexists(path) and not args.overwrite:
        raise CheckpointError(f"{path}: this file exists already: remove it, or add --overwrite")
    return path
