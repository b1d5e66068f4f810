"""What a store says about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from ..machine import human


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of a checkpoint. `kept`: all of it is in the store now (or was before)."""

    position: int
    kept: bool
    new_bytes: int = 0
    deleted: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Numbers of a store. `disk_bytes` is everything below its folder, `other_bytes` belongs to other models, modes or
    formats, `foreign_bytes` to files that are none of the store's."""

    path: str
    budget: int
    disk_bytes: int
    pages: int
    page_bytes: int
    frontiers: int
    frontier_bytes: int
    roots: int
    foreign_bytes: int
    written_bytes: int
    restored_tokens: int = 0
    damaged: tuple[str, ...] = ()
    memory_bytes: int = 0
    """What the tree in memory above the folder holds."""
    read_only: str = ""
    """Why nothing is written to the folder; empty when it can be."""
    remote: str = ""
    """The remote and how it goes; empty without one."""

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        return (
            f"{self.path}: {human(self.disk_bytes)} of {human(self.budget)}; {self.pages:,} pages "
            f"({human(self.page_bytes)}), {self.frontiers:,} frontiers ({human(self.frontier_bytes)}), {self.roots} "
            f"{'model' if self.roots == 1 else 'models'}; {human(self.written_bytes)} written"
            + (f"; {human(self.memory_bytes)} in memory above it" if self.memory_bytes else "")
            + (f"; behind it {self.remote}" if self.remote else "")
            + (f"; read-only ({self.read_only})" if self.read_only else "")
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What prune did, or with dry_run would do. `names` are the objects, the first to go first."""

    dry_run: bool
    names: tuple[str, ...]
    freed_bytes: int
    adopted: int
    leftovers: int
    disk_bytes: int
    budget: int


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What verify found. `damaged` names file and fault; nothing is deleted."""

    checked: int
    bytes: int
    damaged: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = field(default=())

    @property
    def clean(self) -> bool:
        """Nothing is wrong."""
        return not (self.damaged or self.missing or self.unlisted)
