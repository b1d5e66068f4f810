"""How much disk a store may take when nobody says so."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_MOST = 64 << 30


def default_budget(folder: Path, used: int) -> int:
    """64 GiB, or a quarter of what is free (what the store has already included) when that is less."""
    probe = folder
    while not os.path.exists(probe) and probe != probe.parent:
        probe = probe.parent
    stat = os.statvfs(probe)
    return max(1 << 20, min(DEFAULT_MOST, (stat.f_bavail * stat.f_frsize + used) // 4))
