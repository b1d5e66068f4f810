"""`ds4v41 store`: what a KV store holds, and looking after it."""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from ..checks import path_of
from ..errors import StoreError
from ..kvstore import KVStore
from ..kvstore.format import KIND_NAMES
from ..machine import human
from .output import console, print_json
from .parser import UsageError

FAILED = 1


def run(args: Namespace) -> int:
    """Run one of ls, stats, verify, prune; 1 when verify finds damage."""
    if args.dry_run and args.action != "prune":
        raise UsageError(f"store {args.action}: deletes nothing anyway; --dry-run is for prune")
    if args.budget is not None and args.action not in ("prune", "stats"):
        raise UsageError(f"store {args.action}: --budget is for prune and stats")
    if args.remote is not None and args.action not in ("verify", "stats"):
        raise UsageError(f"store {args.action}: looks at the folder alone; --remote is for verify and stats")
    folder = path_of("path", args.path)
    if not os.path.isdir(folder / "objects"):
        raise StoreError(f"{folder}: there is no store here (a store has a folder objects and an index.sqlite)")
    with KVStore(folder, budget=args.budget, remote=args.remote) as store:
        command = {"ls": _ls, "stats": _stats, "verify": _verify, "prune": _prune}[args.action]
        return command(store, args)


def _ls(store: KVStore, args: Namespace) -> int:
    rows = [
        {
            "id": item.id.hex(),
            "kind": KIND_NAMES[item.kind],
            "begin": item.begin,
            "end": item.end,
            "bytes": item.bytes,
            "after": item.parent.hex()[:16],
            "node": item.node.hex()[:16],
            "score": round(item.value(store.tick), 3),
        }
        for item in store.ls()
    ]
    if args.json:
        print_json(rows)
        return 0
    from rich.table import Table

    table = Table("object", "kind", "positions", "bytes", "follows", "prefix", "score")
    for row in rows:
        table.add_row(
            str(row["id"])[:16], str(row["kind"]), f"{row['begin']:,} .. {row['end']:,}", human(int(str(row["bytes"]))),
            str(row["after"]), str(row["node"]), str(row["score"]),
        )  # fmt: skip
    console(sys.stdout).print(table)
    return 0


def _stats(store: KVStore, args: Namespace) -> int:
    stats = store.stats()
    if args.json:
        print_json(stats.as_dict())
    else:
        print(stats)
        if stats.foreign_bytes:
            print(f"{human(stats.foreign_bytes)} in files that are not the store's; they count against its budget")
    return 0


def _verify(store: KVStore, args: Namespace) -> int:
    result = store.verify()
    if args.json:
        print_json({name: getattr(result, name) for name in result.__slots__} | {"clean": result.clean})
    else:
        for title, names in (
            ("damaged", result.damaged), ("missing", result.missing), ("not in the index", result.unlisted)
        ):  # fmt: skip
            for name in names:
                print(f"{title}: {name}")
        print(f"{result.checked:,} objects, {human(result.bytes)} read: {'clean' if result.clean else 'NOT clean'}")
    return 0 if result.clean else FAILED


def _prune(store: KVStore, args: Namespace) -> int:
    result = store.prune(dry_run=args.dry_run)
    if args.json:
        print_json({name: getattr(result, name) for name in result.__slots__})
        return 0
    for name in result.names:
        print(f"{'would delete' if result.dry_run else 'deleted'}: {name}")
    word, then = ("would free", "would be left") if result.dry_run else ("freed", "left")
    left = result.disk_bytes - (result.freed_bytes if result.dry_run else 0)
    print(f"{word} {human(result.freed_bytes)}; {human(left)} {then}, the budget is {human(result.budget)}")
    return 0
