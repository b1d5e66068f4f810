"""Sizes in words, and how much disk a store may take when nobody says so."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from ..errors import OptionError, shown

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip
DEFAULT_MOST = 64 << 30
_ENDLESS = 1 << 62


def parse_size(name: str, value: object) -> int:
    """Bytes of 1_000_000 or "64 GiB". Raises OptionError."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 < value < _ENDLESS:
        return int(value)
    if isinstance(value, str) and (m := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)):
        size = float(m[1]) * _UNITS.get(m[2].lower(), 0)
        if 1 <= size < _ENDLESS:
            return int(size)
    raise OptionError(f'{name}: expected bytes, or a size such as "64 GiB", found {shown(value)}')


def default_budget(folder: Path, used: int) -> int:
    """64 GiB, or a quarter of what is free (what the store has already included) when that is less."""
    probe = folder
    while not os.path.exists(probe) and probe != probe.parent:
        probe = probe.parent
    stat = os.statvfs(probe)
    return max(1 << 20, min(DEFAULT_MOST, (stat.f_bavail * stat.f_frsize + used) // 4))
