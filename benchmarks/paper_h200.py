"""The paper model fitted to what one GPU did: what a dispatch costs against its bytes, and what that predicts.

    python benchmarks/paper_h200.py [--json]

Measured is what benchmarks/results/h200 holds, times of kernels and of whole steps. Fitted by least squares of relative
residuals: the row products (a start, and the longer of two times: bytes at the measured copy rate, or multiply-adds at
a rate of their own), then three numbers of whole steps. Everything else that is printed is predicted: arithmetic, not
a measurement. docs/paper-model.md has the tables; tests/model/test_paper.py holds them against the files.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import paper

from ds4v41.synth_gguf import slice_config

RESULTS = Path(__file__).parent / "results" / "h200"
EVENT_US = 5.0
"""What an event on each side of a launch adds to its time (docs/cuda.md); the shortest kernel with it took 4.7 us."""
EXPERTS = 16
"""Routed experts of a layer in the model that was measured."""
BYTES = {"q8": 34 / 32, "q4": 144 / 256, "mxfp4": 17 / 32, "f16": 2.0}
"""Bytes of a weight."""


@dataclass(frozen=True, slots=True)
class Product:
    """A dispatch that reads weights: millions of weights by type, activation rows, microseconds."""

    name: str
    rows: int
    weights: dict[str, float]
    us: float
    fitted: bool = True

    @property
    def megabytes(self) -> float:
        """Bytes of weights, each read once."""
        return sum(n * BYTES[kind] for kind, n in self.weights.items())

    @property
    def quantised(self) -> bool:
        """Blocks with scales; else half floats."""
        return "f16" not in self.weights

    @property
    def madds(self) -> float:
        """Millions of multiply-adds."""
        return self.rows * sum(self.weights.values())


_ONE = 2304 * 5120 / 1e6  # weights of a matrix of an expert, in millions
_LAUNCHES: tuple[tuple[str, dict[str, float], str, str], ...] = (
    ("query up", {"q8": 32768 * 1280 / 1e6}, "linear_wide [6,1,0,3,1,0] 512x", "linear_wide [6,6,0,3,1,0]"),
    ("output", {"q8": 5120 * 8192 / 1e6}, "linear_wide [6,1,0,5,1,0] 320x", "linear_wide [6,6,0,5,1,0]"),
    ("groups", {"q8": 8192 * 4096 / 1e6}, "linear_wide [6,1,0,1,1,0] 256x", "linear_wide [6,6,0,1,1,0]"),
    ("query down", {"q8": 1280 * 5120 / 1e6}, "linear_wide [6,1,0,8193,1,0] 80x", "linear_wide [6,6,0,8193,1,0] 160x"),
    ("window row", {"q8": 512 * 5120 / 1e6}, "linear_wide [6,1,0,8193,1,0] 32x", "linear_wide [6,6,0,8193,1,0] 64x"),
    ("shared gate and up", {"q8": 2 * _ONE}, "moe_up_wide [6,1,0,1,1,0]", "moe_up_wide [6,6,0,1,1,0]"),
    ("head", {"q8": 129280 * 5120 / 1e6}, "linear_wide [6,1,0,0,1,0] 8080x", "linear_wide [6,6,0,0,1,0]"),
    ("Engram projection", {"f16": 25600 * 6144 / 1e6}, "linear [1,1,0,1,1,0] 3200x", "linear [1,6,0,1,1,0] 3200x"),
    ("index queries", {"f16": 4096 * 1280 / 1e6}, "linear [1,1,0,3,1,0] 512x", "linear [1,6,0,3,1,0] 512x"),
    ("compressor", {"f16": 512 * 5120 / 1e6}, "linear_split [1,1,0,0,1,0] 128x", "linear_split [1,6,0,0,1,0] 128x"),
    ("routed gate and up", {"q4": 12 * _ONE}, "moe_up_wide [7,1,0,0,1,0]", "moe_up_wide [7,6,0,0,1,0]"),
    ("down", {"q4": 6 * _ONE, "q8": _ONE}, "moe_down_wide [7,1,6,2,1,0]", "moe_down_wide [7,6,6,2,1,0]"),
)  # fmt: skip
"""Name, weights, and how the launch is called in the files for one row and for six. For six rows of one token the
experts chosen are not known, so the last two are fitted for one row only and shown for six as six times the pairs."""


def _load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return data


def products() -> list[Product]:
    """The measured dispatches that read weights."""
    measured, out = _load("kernels-q4.json"), []
    for name, weights, one, six in _LAUNCHES:
        for rows, key, launch in ((1, "one_row", one), (6, "six_rows", six)):
            found = [r for r in measured[key] if r["launch"].startswith(launch)]
            assert len(found) == 1, (name, launch, len(found))
            experts = "q4" in weights
            out.append(Product(name, rows, weights, found[0]["us"] / found[0]["dispatches"], rows == 1 or not experts))
    return out


@dataclass(frozen=True, slots=True)
class Fit:
    """Microseconds: of a start, of a start more for quantised types, of a million multiply-adds by kind."""

    start: float
    quantised_start: float
    quantised_madd: float
    half_madd: float
    copy_gb_s: float

    def us(self, p: Product) -> float:
        """A dispatch with its two events."""
        madd = self.quantised_madd if p.quantised else self.half_madd
        start = self.start + (self.quantised_start if p.quantised else 0.0)
        return start + max(p.megabytes / self.copy_gb_s * 1e3, madd * p.madds)

    def bound_by_bytes(self, p: Product) -> bool:
        """Is reading the longer of the two?"""
        return p.megabytes / self.copy_gb_s * 1e3 > (self.quantised_madd if p.quantised else self.half_madd) * p.madds


def fit_products(items: list[Product]) -> Fit:
    """Least squares of relative residuals over the fitted items; which of the two times is longer is found by
    repetition. The rate of bytes is the measured copy rate, not fitted."""
    copy = 1e3 * _load("steps-q4.json")["copy_tb_s_read_plus_write"]
    items = [p for p in items if p.fitted]
    us = np.array([p.us for p in items])
    by_bytes = np.zeros(len(items), bool)
    for _ in range(50):
        rows = [
            [1.0, float(p.quantised), 0.0 if b or not p.quantised else p.madds, 0.0 if b or p.quantised else p.madds]
            for p, b in zip(items, by_bytes, strict=True)
        ]
        fixed = np.array([p.megabytes / copy * 1e3 if b else 0.0 for p, b in zip(items, by_bytes, strict=True)])
        found = np.linalg.lstsq(np.array(rows) / us[:, None], (us - fixed) / us, rcond=None)[0]
        fit = Fit(*(float(x) for x in found), copy)
        now = np.array([fit.bound_by_bytes(p) for p in items])
        if (now == by_bytes).all():
            return fit
        by_bytes = now
    raise AssertionError("the fit does not settle")


@dataclass(frozen=True, slots=True)
class Steps:
    """What whole steps say beside the kernels of a step. Fitted to one-row steps."""

    level_us: float
    """Of a level of dispatches, beyond what its kernels take: Q4 at 8k."""
    index_us_mb: float
    """Of a megabyte of index rows: Q4 at 300k and 1M over 8k."""
    mxfp4: float
    """Multiply-adds of the experts, MXFP4 over Q4: MXFP4 at 8k."""


def _kernels(rows: str) -> float:
    """Sum of the kernels of a step at 8k, without their events, in microseconds."""
    return sum(float(r["us"]) - EVENT_US * r["dispatches"] for r in _load("kernels-q4.json")[rows])


def _config(experts: int) -> Any:
    return slice_config("released", 40, experts, 384_000_000)


def _index_mb(context: int, rows: int = 1) -> float:
    return paper.step(_config(EXPERTS), "q4", context, rows)["select"][1] / 1e6


def _expert_madds(rows: int) -> float:
    return 40 * rows * 18 * _ONE


def _step(name: str, context: int) -> dict[str, float]:
    found: dict[str, float] = next(s for s in _load(name)["steps"] if s["context"] == context)
    return found


def fit_steps(fit: Fit) -> Steps:
    """From the step times of one row."""
    base = _step("steps-q4.json", 8192)
    level = (1e3 * base["one_row_ms"] - _kernels("one_row")) / base["levels"]
    more = [(_index_mb(c) - _index_mb(8192), _step("steps-q4.json", c)["one_row_ms"] - base["one_row_ms"])
            for c in (300_000, 1_000_000)]  # fmt: skip
    a = np.array([[mb / ms] for mb, ms in more])
    index = 1e3 * float(np.linalg.lstsq(a, np.ones(len(more)), rcond=None)[0][0])
    slower = 1e3 * (_step("steps-mxfp4.json", 8192)["one_row_ms"] - base["one_row_ms"])
    return Steps(level, index, 1 + slower / (fit.quantised_madd * _expert_madds(1)))


def predict(fit: Fit, steps: Steps, recipe: str, context: int, rows: int, experts: int = EXPERTS) -> float:
    """Milliseconds of a step. Its kernels at 8k are the measured ones of a step of 1 or 6 rows; all else is the fit."""
    us = _kernels("one_row" if rows == 1 else "six_rows")
    us += steps.level_us * _step("steps-q4.json", 8192)["levels"]
    us += steps.index_us_mb * (_index_mb(context, rows) - _index_mb(8192, rows))
    if recipe == "mxfp4":
        us += (steps.mxfp4 - 1) * fit.quantised_madd * _expert_madds(rows)
    router = 40 * (experts - EXPERTS) * 5120 * 4 / 1e6  # its matrix in f32
    return (us + router / fit.copy_gb_s * 1e3) / 1e3


def checks(fit: Fit, steps: Steps) -> list[dict[str, Any]]:
    """Every measured step beside what the fit says; `used`: the step was fitted to, so it says nothing new."""
    out = []
    for recipe, name, contexts in (
        ("q4", "steps-q4.json", (8192, 300_000, 1_000_000)),
        ("mxfp4", "steps-mxfp4.json", (8192,)),
    ):
        for context in contexts:
            for rows, key in ((1, "one_row_ms"), (6, "six_rows_ms")):
                measured, predicted = _step(name, context)[key], predict(fit, steps, recipe, context, rows)
                out.append({"recipe": recipe, "context": context, "rows": rows, "measured_ms": measured,
                            "predicted_ms": predicted, "ratio": predicted / measured, "used": rows == 1})  # fmt: skip
    return out


def what_if(fit: Fit, steps: Steps) -> dict[str, float]:
    """Predicted milliseconds of one Q4 row at 8k behind one change at a time."""
    base = predict(fit, steps, "q4", 8192, 1)
    measured = {p.name: p for p in products() if p.rows == 1}
    every_layer = ("query up", "output", "groups", "query down", "window row")
    experts = ("shared gate and up", "routed gate and up", "down")
    times = dict.fromkeys((*every_layer, *experts), 40) | {"head": 1}
    held = sum(n * (measured[k].us - EVENT_US) for k, n in times.items())
    bytes_only = sum(n * (fit.start - EVENT_US + measured[k].megabytes / fit.copy_gb_s * 1e3) for k, n in times.items())
    rest = _kernels("one_row") - sum(p.us * n - EVENT_US * n for p, n in ((measured[k], n) for k, n in times.items()))
    saved = {
        "no time between levels (a graph a step)": steps.level_us * _step("steps-q4.json", 8192)["levels"] / 1e3,
        "quantised products bound by bytes": (held - bytes_only) / 1e3,
        "all other dispatches at 3 us": (rest - 3.0 * (746 - 321)) / 1e3,
    }
    one = {name: base - ms for name, ms in saved.items()}
    return {"as it is": base, **one, "all three": base - sum(saved.values())}


def report() -> dict[str, Any]:
    """All of it as plain data."""
    items = products()
    fit = fit_products(items)
    steps = fit_steps(fit)
    rows = [{"name": p.name, "rows": p.rows, "mb": p.megabytes, "measured_us": p.us, "fit_us": fit.us(p),
             "ratio": fit.us(p) / p.us, "bound_by": "bytes" if fit.bound_by_bytes(p) else "multiply-adds",
             "fitted": p.fitted} for p in items]  # fmt: skip
    ratios = np.array([r["ratio"] for r in rows if r["fitted"]])
    released = {
        f"{recipe}, 1 row, {context:,}": predict(fit, steps, recipe, context, 1, 384)
        for recipe in ("q4", "mxfp4")
        for context in (8192, 300_000, 1_000_000)
    }
    return {
        "fit": {name: getattr(fit, name) for name in Fit.__slots__},
        "relative_rms": float(np.sqrt(np.mean((ratios - 1) ** 2))),
        "steps_fit": {name: getattr(steps, name) for name in Steps.__slots__},
        "products": rows,
        "steps": checks(fit, steps),
        "predicted_384_experts_ms": released,
        "predicted_changes_ms": what_if(fit, steps),
    }


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = report()
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        print(f"{name}:" if isinstance(value, (dict, list)) else f"{name}: {value:.3f}")
        lines = value.items() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for line in lines:
            print(f"  {line}")


if __name__ == "__main__":
    main()
