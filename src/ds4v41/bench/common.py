"""What every result carries, and small statistics."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any


def environment(threads: int, isa: str) -> dict[str, Any]:
    """Machine, threads, commit, load and day of a run."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {
        "machine": machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "isa": isa,
        "commit": commit(),
        "load": round(load, 2),
        "date": date.today().isoformat(),
    }


def machine() -> str:
    """The processor by name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit of the source tree that this package lies in, or "unknown"."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def median(values: Sequence[float]) -> float:
    """The median."""
    return float(statistics.median(values))


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median by order statistics (the whole range for fewer than six values)."""
    ordered = sorted(ratios)
    n = len(ordered)
    if n < 6:
        return ordered[0], ordered[-1]
    half = 0.98 * n**0.5
    low = max(0, int(n / 2 - half))
    high = min(n - 1, int(n / 2 + half))
    return ordered[low], ordered[high]
