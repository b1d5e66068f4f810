"""What a model and a session will take, before anything is allocated."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _ext
from .checkpoint import Checkpoint, ModelConfig
from .errors import MemoryPlanError, OptionError
from .weights import shape_of

if TYPE_CHECKING:
    from .drafter import Drafter

MAX_CHUNK = 8192
MIN_CHUNK = 16
MAX_STEP_ROWS = 8
_MIN_SCRATCH = 2 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. `caches` is reserved for the whole context and committed as it fills."""

    weights: int
    caches: int
    scratch: int
    engram_on_disk: int
    engram_memory: int
    """Budget of the hot-row cache, or the tables themselves with engram="ram"."""
    available: int

    @property
    def total(self) -> int:
        """Everything that will be resident: weights, full caches, working memory of one chunk, Engram rows."""
        return self.weights + self.caches + self.scratch + self.engram_memory

    def __str__(self) -> str:
        return (
            f"weights {human(self.weights)}, caches {human(self.caches)}, working memory {human(self.scratch)}, "
            f"Engram rows {human(self.engram_memory)} (tables {human(self.engram_on_disk)} on disk); available "
            f"{human(self.available)}"
        )


def human(n: int) -> str:
    """Bytes in the unit that suits: 1,536 bytes -> 1.5 KiB."""
    size = float(n)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{int(size)} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError


def parse_bytes(name: str, value: Any) -> int:
    """Bytes from a number, or from text such as "512 MiB" (also KiB, GiB, TiB, kB, MB, GB, TB). Raises OptionError."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?\s*", value)
        if match is not None:
            power = " KMGT".index(match[2].upper() or " ")
            return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise OptionError(f'{name}: expected bytes as a number or as text such as "512 MiB", found {value!r}')


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


def weight_bytes(checkpoint: Checkpoint) -> tuple[int, int]:
    """Bytes of the mapped tensors that the model reads, and bytes of the Engram tables, which stay on disk."""
    resident = on_disk = 0
    for name, tensor in checkpoint.tensors.items():
        if ".engram.embed." in name:
            on_disk += tensor.nbytes
        elif not name.startswith(("mtp.", "vision", "aligner", "image_")):
            resident += tensor.nbytes
    return resident, on_disk


def run_rows(chunk: int, context: int) -> int:
    """Most rows of one run of a session: its chunk, and at least the rows of the longest step that fits."""
    return min(max(chunk, MAX_STEP_ROWS), context)


def plan_session(
    config: ModelConfig,
    weights: int,
    on_disk: int,
    activations: str,
    context: int,
    retain: int,
    chunk: int,
    engram_memory: int = 0,
    drafter: Drafter | None = None,
) -> tuple[MemoryPlan, int]:
    """Bytes of a session and the chunk (rows of one prefill run) that fits beside them.

    Working memory grows with the chunk; it may take an eighth of weights and caches and a quarter of what is free.
    """
    shape = shape_of(config)
    available = available_memory()
    chunk = min(chunk, context)
    while True:
        rows = run_rows(chunk, context)
        plan = _ext.memory_plan(shape, activations, context, retain, rows, drafter.n_stages if drafter else 0)
        scratch = plan["scratch"] + (drafter.session_bytes(rows) if drafter else 0)
        caches = plan["window"] + plan["compressed"] + plan["pending"]
        budget = min(max(_MIN_SCRATCH, (weights + caches) // 8), available // 4)
        if scratch <= budget or chunk <= MIN_CHUNK:
            return MemoryPlan(weights, caches, scratch, on_disk, engram_memory, available), chunk
        chunk = max(MIN_CHUNK, chunk // 2)


def refuse_what_cannot_fit(plan: MemoryPlan, context: int) -> None:
    """MemoryPlanError with the numbers when caches and working memory exceed what is available."""
    need = plan.caches + plan.scratch
    if need > plan.available:
        raise MemoryPlanError(
            f"a session of {context:,} tokens needs {human(need)} beside the weights, but {human(plan.available)} are "
            f"available ({plan}); open it with a smaller context= or retain="
        )
