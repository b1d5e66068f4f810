"""`ds4v41 synth`: a GGUF file with random weights."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ..synth_gguf import write_drafter, write_gguf
from .output import Bar, print_json


def run(args: Namespace) -> int:
    """Write the file and say what is in it."""
    out = Path(args.out).expanduser()
    with Bar(f"writing {out.name}") as bar:
        report = write_gguf(
            out,
            args.shape,
            layers=args.layers,
            experts=args.experts,
            recipe=args.recipe,
            engram_rows=args.engram_rows,
            drafter_experts=args.drafter_experts if args.drafter else 0,
            seed=args.seed,
            overwrite=args.overwrite,
            progress=lambda done, total, _name: bar.update(done, total),
        )
    drafter_bytes = 0
    if args.drafter:
        path = Path(args.drafter).expanduser()
        with Bar(f"writing {path.name}") as bar:
            drafter_bytes = write_drafter(
                path,
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
        if args.drafter:
            print(f"written: {args.drafter}, {drafter_bytes:,} bytes")
    return 0
