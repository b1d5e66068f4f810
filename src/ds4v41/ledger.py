"""The ledger of a session: where the bytes and the time of its steps went, per operation and layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any

from .errors import StateError

BESIDE = "engram_io"
"""Table rows on their way from disk behind other work: its seconds pass beside those of the other operations, and its
bytes are the disk's, so it is in no sum. What the disk cost is `engram_wait`."""


HOST_ONLY = ("engram_wait", BESIDE)
"""Rows of what no device does."""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One operation of one layer (-1: outside the layers), summed over all runs."""

    op: str
    layer: int
    dispatches: int
    bytes: int
    """Bytes of weights and caches that it had to read."""
    seconds: float
    """Until it was done, for the host that waits."""
    kernels: int = 0
    """On a device: its dispatches."""
    device_seconds: float | None = None
    """On a device: how long it worked; None elsewhere, and for what only the host does."""

    @property
    def time(self) -> float:
        """Seconds of the device, where there is one, else those that passed."""
        return self.seconds if self.device_seconds is None else self.device_seconds

    @property
    def gb_s(self) -> float:
        """Bytes over `time`."""
        return self.bytes / self.time / 1e9 if self.time > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Ledger:
    """What `Session.ledger()` saw. Timings are only given while every operation was counted (`missing` is empty)."""

    rows: tuple[LedgerRow, ...]
    runs: int
    tokens: int
    seconds: float
    """Wall time of the runs."""
    experts_touched: int
    missing: tuple[str, ...]
    roof_gb_s: float | None = None
    matrix_tokens: int = 0
    """Of the tokens, those that ran in the matrix class."""
    on_device: bool = False
    """Times, rates and shares are by the device's own clock; `seconds` and `covered` are what passed on the host."""

    @classmethod
    def from_ext(cls, data: Any, roof_gb_s: float | None = None) -> Ledger:
        """From what the extension returns (a dictionary)."""
        on_device = data["on_device"]
        rows = tuple(
            LedgerRow(
                op, layer, dispatches, n_bytes, seconds, kernels, device if on_device and op not in HOST_ONLY else None
            )
            for op, layer, dispatches, n_bytes, seconds, kernels, device in data["rows"]
        )
        missing = tuple(data["missing"])
        return cls(
            rows,
            data["runs"],
            data["tokens"],
            data["seconds"],
            data["experts_touched"],
            missing,
            roof_gb_s,
            data["matrix_tokens"],
            on_device,
        )

    @property
    def complete(self) -> bool:
        """Was every operation of every run counted?"""
        return not self.missing and self.runs > 0

    def require_complete(self) -> None:
        """StateError, naming what is missing, when timings would mislead."""
        if not self.complete:
            what = "no run was counted" if not self.missing else "; ".join(self.missing[:10])
            raise StateError(f"the ledger is incomplete, so it shows no timings: {what}")

    @property
    def bytes(self) -> int:
        """Bytes of weights and caches of all operations."""
        return sum(row.bytes for row in self.rows if row.op != BESIDE)

    @property
    def kernels(self) -> int:
        """Dispatches of the device; 0 on the CPU."""
        return sum(row.kernels for row in self.rows)

    @property
    def device_seconds(self) -> float | None:
        """How long the device worked on the operations; None on the CPU."""
        return sum(row.device_seconds or 0.0 for row in self.rows) if self.on_device else None

    @property
    def gb_s(self) -> float:
        """All bytes over the device's time, where there is one, else over wall time."""
        seconds = self.seconds if self.device_seconds is None else self.device_seconds
        return self.bytes / seconds / 1e9 if seconds > 0 else 0.0

    @property
    def covered(self) -> float:
        """Time of the operations and of waiting for table rows, over the wall time of the runs."""
        inside = sum(row.seconds for row in self.rows if row.op != BESIDE)
        return inside / self.seconds if self.seconds > 0 else 0.0

    def by_op(self) -> tuple[LedgerRow, ...]:
        """Summed over layers (layer -1), the longest first."""
        self.require_complete()
        return _summed(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        self.require_complete()
        rows: list[dict[str, Any]] = []
        for r in self.rows:
            row = {"op": r.op, "layer": r.layer, "dispatches": r.dispatches, "bytes": r.bytes, "seconds": r.seconds}
            rows.append(row | ({"kernels": r.kernels, "device_seconds": r.device_seconds} if self.on_device else {}))
        device = {"kernels": self.kernels, "device_seconds": self.device_seconds} if self.on_device else {}
        return device | {
            "clock": "device" if self.on_device else "wall",
            "runs": self.runs,
            "tokens": self.tokens,
            "matrix_tokens": self.matrix_tokens,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "gb_s": self.gb_s,
            "share": None if self.roof_gb_s is None else self.gb_s / self.roof_gb_s,
            "roof_gb_s": self.roof_gb_s,
            "covered": self.covered,
            "experts_touched": self.experts_touched,
            "rows": rows,
        }

    def plot(self, ax: Any = None) -> Any:
        """A bar for every operation: milliseconds a run, and its GB/s. Returns the matplotlib axes (new ones without
        `ax`). Needs the extra `ds4v41[plot]`; raises StateError without it, or when incomplete."""
        rows = self.by_op()[::-1]
        if ax is None:
            try:
                pyplot: Any = import_module("matplotlib.pyplot")
            except ImportError as error:
                raise StateError("a plot needs matplotlib: pip install 'ds4v41[plot]'") from error
            ax = pyplot.subplots(figsize=(8, 0.35 * len(rows) + 1.2), layout="constrained")[1]
        times = [1e3 * r.time / self.runs for r in rows]
        names = [f"{r.op} (beside)" if r.op == BESIDE else r.op for r in rows]
        bars = ax.barh(names, times, color=["#c8ccd4" if r.op == BESIDE else "#4a6fa5" for r in rows])
        ax.bar_label(bars, [f"{r.gb_s:,.1f} GB/s" if r.bytes else "" for r in rows], padding=3, fontsize="small")
        ax.margins(x=0.15)
        ax.set_xlabel("milliseconds of the device a run" if self.on_device else "milliseconds a run")
        roof = "" if self.roof_gb_s is None else f" of {self.roof_gb_s:,.1f} that the machine reads"
        ax.set_title(f"{self.runs:,} runs, {self.gb_s:,.1f} GB/s{roof}", fontsize="medium")
        return ax

    def _all(self) -> LedgerRow:
        dispatches = sum(r.dispatches for r in self.rows if r.op != BESIDE)
        return LedgerRow("all", -1, dispatches, self.bytes, self.seconds, self.kernels, self.device_seconds)

    def _table(self) -> list[list[str]]:
        device = self.on_device
        head = ["op", "calls", "MB/run", "ms/run", "% time", "GB/s", "roof"]
        if device:
            head = ["op", "calls", "kernels", "MB/run", "device ms/run", "% device", "GB/s", "roof", "waited ms/run"]
        table, total = [head], self.device_seconds if device else self.seconds
        for r in (*self.by_op(), self._all()):
            beside, host = r.op == BESIDE, device and r.op in HOST_ONLY
            no_share = self.roof_gb_s is None or r.bytes == 0 or beside
            share = "beside" if beside else "host" if host else f"{100 * r.time / total:.1f}" if total else ""
            row = [
                r.op,
                f"{r.dispatches / self.runs:,.0f}",
                *([f"{r.kernels / self.runs:,.0f}"] if device else []),
                f"{r.bytes / self.runs / 1e6:,.1f}",
                "" if host else f"{r.time / self.runs * 1e3:,.2f}",
                share,
                f"{r.gb_s:,.1f}",
                "" if no_share else f"{r.gb_s / self.roof_gb_s:.2f}",  # type: ignore[operator]
                *([f"{r.seconds / self.runs * 1e3:,.2f}"] if device else []),
            ]
            table.append(row)
        return table

    def __str__(self) -> str:
        if not self.complete:
            return f"<Ledger: incomplete, {len(self.missing)} operations missing, no timings>"
        table = self._table()
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        return "\n".join(
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in table
        )

    def _repr_html_(self) -> str:
        if not self.complete:
            return escape(str(self))
        head, *rows = self._table()
        cells = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        return "<table><tr>" + "".join(f"<th>{escape(c)}</th>" for c in head) + f"</tr>{cells}</table>"


def _summed(rows: Sequence[LedgerRow]) -> tuple[LedgerRow, ...]:
    sums: dict[str, LedgerRow] = {}
    for r in rows:
        s = sums.get(r.op, LedgerRow(r.op, -1, 0, 0, 0.0))
        device = r.device_seconds if s.device_seconds is None else s.device_seconds + (r.device_seconds or 0.0)
        sums[r.op] = LedgerRow(
            r.op,
            -1,
            s.dispatches + r.dispatches,
            s.bytes + r.bytes,
            s.seconds + r.seconds,
            s.kernels + r.kernels,
            device,
        )
    return tuple(sorted(sums.values(), key=lambda r: -r.time))
