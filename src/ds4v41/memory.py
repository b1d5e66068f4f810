"""What a model and a session will take, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import _ext
from .checkpoint import Checkpoint, ModelConfig
from .errors import MemoryPlanError
from .machine import available_memory, human
from .weights import shape_of

if TYPE_CHECKING:
    from .drafter import Drafter

MAX_CHUNK = 8192
MIN_CHUNK = 16
MAX_STEP_ROWS = 8
_MIN_SCRATCH = 1 << 20


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
    chunk: int | None,
    engram_memory: int = 0,
    drafter: Drafter | None = None,
    threads: int = 0,
    backend: str = "auto",
    matrix: bool = False,
) -> tuple[MemoryPlan, int]:
    """Bytes of a session and the chunk (rows of one prefill run) that fits beside them.

    Working memory grows with the chunk. It may take a quarter of what is free; of a chunk that nobody asked for (None)
    the activations also keep to a thirty-second of weights and caches. threads: workers of a CPU back end, each of
    which has working memory of its own; 0 for a device.
    """
    shape = shape_of(config)
    available = available_memory()
    asked = chunk is not None
    chunk = min(chunk if chunk is not None else MAX_CHUNK, context)
    while True:
        rows = run_rows(chunk, context)
        stages = drafter.n_stages if drafter else 0
        plan = _ext.memory_plan(shape, activations, context, retain, rows, stages, threads, backend, matrix)
        activation_bytes = plan["scratch"] + (drafter.session_bytes if drafter else 0)
        scratch = activation_bytes + plan["working"] + (drafter.working_bytes if drafter else 0)
        caches = plan["window"] + plan["compressed"] + plan["pending"]
        fits = asked or activation_bytes <= max(_MIN_SCRATCH, (weights + caches) // 32)
        if (fits and scratch <= available // 4) or chunk <= MIN_CHUNK:
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
