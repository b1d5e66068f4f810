"""`ds4v41 bench roof | ops | select | decode | depth | prefill | ab`: speed, as a table or as JSON."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

from .. import bench
from ..bench.ab import parse_side
from ..bench.model import Path
from ..model import Model
from .output import print_json
from .parser import UsageError


def run(args: Namespace) -> int:
    """Run one measurement and print it."""
    result = _measure(args)
    if args.json:
        print_json({k: v.to_json() if k == "ledger" else v for k, v in result.items()})
        return 0
    ledger = result.pop("ledger", None)
    rows = result.pop("results", [])
    print("  ".join(f"{k} {_short(v)}" for k, v in result.items()))
    for row in rows:
        print("  ".join(f"{k} {_short(v)}" for k, v in row.items()))
    if ledger is not None and args.ledger:
        print(ledger)
    return 0


def _measure(args: Namespace) -> dict[str, Any]:
    if args.what == "roof":
        return bench.roof(**_probe(args))
    if args.what == "ops":
        options: dict[str, Any] = {"rows": _numbers("rows", args.rows)} if args.rows is not None else {}
        if args.types is not None:
            options["types"] = tuple(args.types.split(","))
        return bench.ops(**_probe(args), matrix=args.matrix, **options)
    if args.what == "select":
        return bench.select()
    if args.what == "ab":
        return bench.compare(args.model, parse_side(args.a), parse_side(args.b), pairs=args.pairs)
    if args.synthetic is None:
        if args.layers is not None or args.experts is not None:
            raise UsageError(f"bench {args.what}: --layers and --experts go with --synthetic; a file has its own")
        return _on_model(args, args.model, {"threads": args.threads, "backend": args.backend})
    if args.model is not None:
        raise UsageError(f"bench {args.what}: --synthetic makes a model, --model names one; give one of them")
    sizes = {name: n for name in ("layers", "experts") if (n := getattr(args, name)) is not None}
    make = partial(Model.synthetic, recipe=args.synthetic, backend=args.backend, threads=args.threads, **sizes)
    return _on_model(args, make, {})


def _on_model(args: Namespace, model: Path, opening: dict[str, Any]) -> dict[str, Any]:
    """A measurement of whole steps or prompts, on a file or on a model that is still to be made."""
    contexts = _numbers("context", args.context) if args.context is not None else ()
    more: dict[str, Any] = {}
    if args.what == "decode":
        if len(contexts) > 1:
            raise UsageError("bench decode: --context takes one position (bench depth takes several)")
        more = {"context": contexts[0]} if contexts else {}
        return bench.decode(model, steps=args.steps, **opening, **more)
    if args.what == "depth":
        more = {"contexts": contexts} if contexts else {}
        return bench.depth(model, steps=args.steps, **opening, **more)
    if contexts:
        more["tokens"] = contexts
    if args.behind is not None:
        more["behind"] = _numbers("behind", args.behind)
    return bench.prefill(model, matrix=args.matrix, **opening, **more)


def _probe(args: Namespace) -> dict[str, Any]:
    return {"threads": args.threads, "gib": args.gib, "huge_pages": not args.small_pages, "backend": args.backend}


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part.replace("_", "")) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--{name}: expected whole numbers with commas between, found {text!r}") from None


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} {_short(v)}" for k, v in value.items()) + "}"
    return str(value)
