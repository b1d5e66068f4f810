"""What commands read: prompts from arguments, files and stdin; the model that the options name."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from ..checks import path_of
from ..errors import OptionError
from .output import Bar

if TYPE_CHECKING:
    from ..model import Model
    from ..session import Session

_MOST_BYTES = 256 << 20
"""More than any context holds."""


def open_model(args: Namespace) -> Model:
    """The model of -m and its options, with a bar while --check reads it."""
    from ..model import Model

    with Bar("checking the weights") as bar:
        return Model.open(
            args.model,
            backend=args.backend,
            activations=args.activations,
            prefill=args.prefill,
            threads=args.threads,
            check=args.check,
            progress=bar.update,
        )


@contextlib.contextmanager
def open_session(model: Model, args: Namespace) -> Iterator[Session]:
    """A session of --context tokens, with the drafter of --drafter and the store of --store."""
    from ..drafter import Drafter
    from ..kvstore import KVStore

    if args.store is None and args.store_budget is not None:
        raise OptionError("--store-budget: there is no store to bound; give --store FOLDER with it")
    if args.store is None and args.store_remote is not None:
        raise OptionError("--store-remote: it lies behind a store of this machine; give --store FOLDER with it")
    chunk = {} if args.chunk is None else {"chunk": args.chunk}
    drafter = None
    if args.drafter is not None:
        drafter = Drafter.open(None if args.drafter == "own" else args.drafter, model)
    with contextlib.ExitStack() as stack:
        store = None
        if args.store is not None:
            store = stack.enter_context(KVStore(args.store, budget=args.store_budget, remote=args.store_remote))
        yield stack.enter_context(model.session(args.context, drafter=drafter, store=store, **chunk))


def read_text(path: str) -> str:
    """A UTF-8 file. Raises OptionError that says where it is not UTF-8; OSError when it cannot be read."""
    with open(path_of("path", path), "rb") as file:  # may be a pipe: a shell's <(command)
        return decode_utf8(_limited(file, path), path)


def read_stdin() -> str:
    """All of stdin, as UTF-8."""
    buffer = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if buffer is None else decode_utf8(_limited(buffer, "stdin"), "stdin")


def _limited(file: BinaryIO, where: str) -> bytes:
    """All of a file. Raises OptionError instead of filling the memory from one that never ends."""
    data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OptionError(f"{where}: expected at most {_MOST_BYTES:,} bytes of text, found more")
    return data


def decode_utf8(data: bytes, where: str) -> str:
    """Text of bytes. Raises OptionError that names the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{where}: expected UTF-8 text, found byte 0x{data[error.start]:02x} at offset {error.start}; "
            "convert the file to UTF-8"
        ) from error


def check_text(text: str, what: str) -> str:
    """Text from the command line: refuses bytes that were no UTF-8 (Python hands them over as lone surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise OptionError(
            f"{what}: expected UTF-8 text, found a byte that is none at character {error.start}"
        ) from error
    return text
