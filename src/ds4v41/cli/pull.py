"""`ds4v41 pull`: download a published file."""

from __future__ import annotations

from argparse import Namespace

from ..pull import Pulled, pull
from .output import Bar, print_json
from .parser import UsageError


def run(args: Namespace) -> int:
    """Download, or say what would be downloaded with --dry-run."""
    if args.check and args.dry_run:
        raise UsageError("pull: --check reads files and --dry-run reads nothing: give one of them")
    with Bar("looking the files up") as bar:
        done = pull(
            args.what, args.to, revision=args.revision, check=args.check, dry_run=args.dry_run, progress=bar.update
        )
    if args.json:
        print_json([item.to_json() for item in done])
    else:
        for item in done:
            print(_line(item, args.dry_run, args.check))
    return 0


def _line(item: Pulled, dry_run: bool, check: bool) -> str:
    if dry_run:
        return f"{item.path}: {item.size:,} bytes, {item.downloaded:,} to download"
    if item.downloaded == 0:
        return f"{item.path}: {item.size:,} bytes, complete already ({'digest' if check else 'size'} checked)"
    return f"{item.path}: {item.size:,} bytes, {item.downloaded:,} of them downloaded now, digest checked"
