"""Measurements that users run: `ds4v41 bench ...`. What the machine can do, and which share of it the engine reaches.

Each function returns plain data with the machine, the threads, the load and the roof measured in the same run. On a
machine that others use, wall time says little: shares are computed from the CPU time of the threads (`clock: "cpu"`),
wall rates stand beside them.
"""

from __future__ import annotations

from .ab import compare
from .model import decode, depth, prefill
from .probes import ops, roof, select

__all__ = ["compare", "decode", "depth", "ops", "prefill", "roof", "select"]
