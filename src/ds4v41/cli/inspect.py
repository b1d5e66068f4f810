"""`ds4v41 inspect`: what a checkpoint holds."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..checkpoint import Checkpoint
from ..checks import positive_int
from ..errors import OptionError
from ..inspect import inspect_checkpoint
from .output import console, print_json
from .parser import UsageError

FAILED = 1


def run(args: Namespace) -> int:
    """Print the report; 1 when the checkpoint has problems."""
    if args.activations is not None and args.context is None:
        raise UsageError("inspect: --activations is for the memory plan: add --context N")
    planner = None if args.context is None else partial(plan_memory, activations=args.activations or "auto")
    report = inspect_checkpoint(args.path, context=args.context, plan_memory=planner)
    if args.context is not None and report.memory_plan is None and not report.problems:
        raise OptionError(f"--context: {report.path} is a {report.kind}, which has no session of its own; leave it out")
    if args.json:
        print_json(report.to_json())
    else:
        console(sys.stdout).print(report)
    return FAILED if report.problems else 0


def plan_memory(checkpoint: Checkpoint, context: int, activations: str = "auto") -> Mapping[str, Any]:
    """Terms of the memory plan of a session of `context` tokens, in bytes; nothing is allocated."""
    from ..engram import EngramOptions
    from ..machine import physical_memory
    from ..memory import plan_session, weight_bytes
    from ..model import DEFAULT_RETAIN, usable_cores
    from ..weights import default_activations

    config = checkpoint.config
    context = positive_int("--context", context, 1, config.max_position_embeddings)
    mode = default_activations(config, checkpoint.dialect) if activations == "auto" else activations
    weights, on_disk = weight_bytes(checkpoint)
    rows = EngramOptions().cache_bytes(on_disk)
    plan, chunk = plan_session(
        config, weights, on_disk, mode, context, min(DEFAULT_RETAIN, context), None, rows, threads=usable_cores()
    )
    plan = replace(plan, available=physical_memory())
    return {
        "context": f"{context:,} tokens",
        "activations": mode,
        "weights": plan.weights,
        "caches": plan.caches,
        "working memory": plan.scratch,
        "Engram rows": plan.engram_memory,
        "total": plan.total,
        "Engram tables on disk": plan.engram_on_disk,
        "memory of this machine": plan.available,
        "chunk": f"{chunk:,} rows",
        "fits": "yes" if plan.total <= plan.available else "no",
    }
