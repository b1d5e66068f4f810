"""The machine's memory, and sizes in words."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from .errors import OptionError, shown

_ENDLESS = 1 << 62
"""No number of bytes is as large."""


def human(n: int) -> str:
    """Bytes in the unit that suits: 1,536 bytes -> 1.5 KiB."""
    size = float(n)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{int(size)} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError


def physical_memory() -> int:
    """Bytes of memory that this process may use at most: the machine's, or its control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def available_memory() -> int:
    """Bytes that can be taken now without swapping, as far as the system tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return min(int(line.split()[1]) * 1024, physical_memory())
    except OSError:
        pass
    return physical_memory()


def parse_bytes(name: str, value: Any, least: int = 0) -> int:
    """Bytes from a number, or from text such as "512 MiB" (also KiB, GiB, TiB, kB, MB, GB, TB, in any case). Raises
    OptionError, also for fewer than `least`."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", value, re.IGNORECASE)
        if match is not None and (match[2] or not match[3]):
            power = " KMGT".index(match[2].upper() or " ")
            size = float(match[1]) * (1024 if match[3] else 1000) ** power
            if least <= size < _ENDLESS:
                return int(size)
    elif isinstance(value, (int, np.integer)) and not isinstance(value, bool) and least <= value < _ENDLESS:
        return int(value)
    raise OptionError(f'{name}: expected bytes as a number or as text such as "512 MiB", found {shown(value)}')
