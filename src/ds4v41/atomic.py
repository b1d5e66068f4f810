"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path


def may_be_replaced(path: Path) -> bool:
    """Is there nothing, a regular file or a link? A rename would put a plain file in the place of a device or pipe."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return True
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 text file: under a temporary name in the same folder, to disk, then under its own name."""
    if not may_be_replaced(path):
        raise OSError(errno.EINVAL, "expected a regular file or none, found a folder, pipe or device", str(path))
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode_of(path))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder last through a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mode_of(path: Path) -> int:
    """The mode of the file that is replaced, or what the process gives new files."""
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
