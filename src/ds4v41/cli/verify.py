"""`ds4v41 verify`: run manifests again and compare."""

from __future__ import annotations

from argparse import Namespace

from ..manifest import Manifest, find_manifests, read_manifest
from ..verify import FixtureResult, Verifier, run_manifests
from .output import Bar, print_json
from .parser import UsageError

FAILED = 1


def run(args: Namespace) -> int:
    """0 when every fixture gave the recorded bits (or was recorded, with --update)."""
    if args.mac_day is not None:
        return _mac_day(args)
    if args.model is not None or args.contexts is not None:
        raise UsageError("verify: --model and --contexts go with --mac-day")
    if args.update and args.trace:
        raise UsageError("verify: --trace compares and --update records (the trace too): give one of them")
    manifests = [read_manifest(path) for path in find_manifests(args.manifests)]
    with Bar("hashing the checkpoint") as bar:

        def report(manifest: Manifest, result: FixtureResult) -> None:
            bar.close()
            if not args.json:
                _print(manifest, result, args.update)

        with Verifier(backend=args.backend, threads=args.threads, progress=bar.update) as verifier:
            every = run_manifests(manifests, verifier, update=args.update, trace=args.trace, report=report)
    ok = all(result.ok for _, results in every for result in results)
    if args.json:
        listed = [
            {"path": str(manifest.path), "fixtures": [result.to_json() for result in results]}
            for manifest, results in every
        ]
        print_json({"ok": ok, "manifests": listed})
    return 0 if ok else FAILED


def _mac_day(args: Namespace) -> int:
    if args.manifests or args.update or args.trace or args.threads is not None:
        raise UsageError("verify: --mac-day runs checks of its own; it takes --backend, --model, --contexts and --json")
    if args.contexts is not None and args.model is None:
        raise UsageError("verify: --contexts are depths of --model: add it")
    from .. import device_check

    try:
        contexts = device_check.CONTEXTS if args.contexts is None else tuple(int(n) for n in args.contexts.split(","))
    except ValueError:
        raise UsageError(f"verify: --contexts: expected numbers with commas between, found {args.contexts!r}") from None
    backend = "metal" if args.backend == "auto" else args.backend
    say = (lambda line: None) if args.json else (lambda line: print(line, flush=True))
    report = device_check.run(args.mac_day, backend=backend, model=args.model, contexts=contexts, say=say)
    if args.json:
        print_json(report)
    else:
        print(f"{'ok' if report['ok'] else 'DIFFERS'}: the report is in {args.mac_day}")
    return 0 if report["ok"] else FAILED


def _print(manifest: Manifest, result: FixtureResult, update: bool) -> None:
    words = ("recorded", "unchanged") if update else ("DIFFERS", "ok")
    word = words[not result.changed if update else result.ok]
    print(
        f"{word:<9} {manifest.path.stem}/{result.name}: {result.n_tokens} tokens, {result.n_rows} rows of logits "
        f"({result.seconds:.1f} s)",
        flush=True,
    )
    for problem in result.problems:
        print(f"          {problem}", flush=True)
