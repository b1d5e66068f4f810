"""The command line: `ds4v41 generate | chat | inspect | convert | verify | pull | bench | store`.

Exit codes: 0 done, 1 it failed (the message is on stderr), 2 the command was given wrongly, 130 interrupted by Ctrl-C.
Results go to stdout, everything else (progress, statistics, errors) to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import Ds4Error, OptionError
from .parser import UsageError, build_parser, unknown_arguments

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` without the program's name; None takes the process's."""
    if not _standard_streams():
        _say("ds4v41: standard output is closed, and results go there; give it a file, a pipe or a terminal")
        return FAILED
    parser = build_parser()
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            raise UsageError(unknown_arguments(unknown, args.known))
        _tolerant_output()
        command = import_module(f".{args.module}", __name__)  # heavy imports happen here, not for --help
        code = int(command.run(args))
        sys.stdout.flush()
        return code
    except (UsageError, OptionError) as error:
        _say(f"ds4v41: {error}\n(`ds4v41 --help` lists the commands, `ds4v41 COMMAND --help` their options)")
        return USAGE
    except BrokenPipeError:
        _leave_broken_pipe()
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Ds4Error as error:
        _say(f"ds4v41: {error}")
        return FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else _bad_stream(error)
        _say(f"ds4v41: {where}{error.strerror or error}")
        return FAILED


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _standard_streams() -> bool:
    """Closed ones (Python has None for them) become empty, so that no file of ours takes their number. False when
    there is no standard output."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    missing = sys.stdout is None
    if missing:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return not missing


def _bad_stream(error: OSError) -> str:
    """Which of the standard streams the system means when it names no file: one that is open the wrong way round."""
    if error.errno != errno.EBADF:
        return ""
    for stream, name, wrong in ((sys.stdin, "input", os.O_WRONLY), (sys.stdout, "output", os.O_RDONLY)):
        with contextlib.suppress(OSError, ValueError):
            if fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) & os.O_ACCMODE == wrong:
                how = "written" if wrong == os.O_WRONLY else "read"
                return f"standard {name} is open to be {how} only: "
    return ""


def _tolerant_output() -> None:
    """A character that the terminal's encoding lacks is shown as an escape instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _leave_broken_pipe() -> None:
    """Whoever read the output has gone: say nothing, also not when the interpreter flushes at exit."""
    try:
        fileno = sys.stdout.fileno()
    except (OSError, ValueError):
        return  # not a real file: nothing is flushed at exit
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fileno)
    os.close(null)
