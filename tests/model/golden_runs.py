"""The engine on the golden inputs: whole runs, and layers fed with golden values. `python -m tests.model.golden_runs`
prints the largest error of each kind, for docs/numerics.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from tests.golden.compare import relative, row_errors
from tests.golden.load import TensorFile, intermediates, runs

from .support import Rows, tiny

PROMPTS = ("p5", "p16", "p17", "p40", "p150", "p300")
MODES = ("fp32", "bf16", "fp8fp4")
PHASES = ("prefill", "decode0", "decode1", "decode2", "decode3")
N_STEPS = 24
WINDOW = 16


@dataclass(frozen=True)
class Replay:
    """Our logits and the golden ones. The golden tokens are fed whatever ours would have been."""

    prefill: Rows  # [n, vocab]
    steps: Rows  # [24, vocab]
    want_prefill: Rows
    want_steps: Rows
    golden_tokens: np.ndarray  # [25]

    @property
    def errors(self) -> np.ndarray:
        """Relative error of each prefill row."""
        return row_errors(self.prefill, self.want_prefill)

    @property
    def step_errors(self) -> np.ndarray:
        """Relative error of each step row."""
        return row_errors(self.steps, self.want_steps)

    @property
    def argmax_equal(self) -> np.ndarray:
        """Of each prefill row."""
        return np.asarray(self.prefill.argmax(axis=1) == self.want_prefill.argmax(axis=1))

    @property
    def n_greedy(self) -> int:
        """How many golden tokens are found before the first difference."""
        same = np.concatenate([self.prefill[-1:], self.steps]).argmax(axis=1) == self.golden_tokens
        return len(same) if same.all() else int(np.argmin(same))


def engine_mode(mode: str) -> str:
    """The activations of a golden mode."""
    return "fp8" if mode == "fp8fp4" else mode


@cache
def replay(mode: str, prompt: str) -> Replay:
    """A prompt of `PROMPTS`, and its 24 golden tokens one by one."""
    golden = runs(mode)
    with tiny(engine_mode(mode)).session() as session:
        prefill = session.prefill(golden[f"{prompt}.input_ids"], logits="all")
        assert prefill is not None
        tokens = golden[f"{prompt}.greedy_tokens"]
        steps = np.concatenate([session.step([int(token)]) for token in tokens[:N_STEPS]])
    return Replay(prefill, steps, golden[f"{prompt}.prefill_logits"], golden[f"{prompt}.decode_logits"], tokens)


@dataclass(frozen=True)
class Phase:
    """What one phase of the 40-token prompt gave, by the golden names, and the golden values."""

    got: dict[str, np.ndarray]
    want: dict[str, np.ndarray]


def _golden_phase(inside: TensorFile, phase: str) -> dict[str, np.ndarray]:
    start = phase + "."
    return {name.removeprefix(start): inside[name] for name in inside if name.startswith(start)}


@cache
def layer_by_layer(mode: str) -> dict[str, Phase]:
    """Every layer starts from the golden result of the one before it (stream, mix and Engram)."""
    model, inside, golden = tiny(engine_mode(mode)), intermediates(mode), runs(mode)
    n_layers, out = model.config.num_hidden_layers, {}
    with model.session() as session:
        for phase in PHASES:
            want = _golden_phase(inside, phase)
            step = 0 if phase == "prefill" else int(phase.removeprefix("decode"))
            ids = golden["p40.input_ids"] if phase == "prefill" else golden["p40.greedy_tokens"][step : step + 1]
            f32 = {name: np.ascontiguousarray(value, np.float32) for name, value in want.items() if "_out" in name}
            got = session._ext.trace_run(
                np.ascontiguousarray(ids, np.int32),
                "all",
                streams={i: f32[f"L{i - 1}.stream_out"] for i in range(1, n_layers)},
                mixes={i: f32[f"L{i - 1}.pre_mix_out"] for i in range(1, n_layers)},
                after_engram={i: f32[f"L{i}.engram_out"] for i in model.config.engram_layer_ids},
            )
            out[phase] = Phase(got, want)
    return out


FLOATS = (
    "engram_out",
    *(f"hc_{half}_{part}" for half in ("attn", "ffn") for part in ("pre", "post", "comb")),
    "attn_in",
    "attn_q",
    "attn_o",
    "attn_out",
    "ffn_in",
    "ffn_out",
    "stream_out",
    "pre_mix_out",
)


def layer_errors(mode: str) -> dict[str, tuple[float, str]]:
    """Kind -> (largest relative error over layers and phases, where)."""
    worst: dict[str, tuple[float, str]] = {}
    for phase, pair in layer_by_layer(mode).items():
        for name, value in pair.got.items():
            kind = name.split(".")[-1]
            if kind in FLOATS and name in pair.want:
                found = relative(value, pair.want[name]), f"{phase}.{name}"
                worst[kind] = max(worst.get(kind, (0.0, "")), found)
    return worst


def main() -> None:
    """Print the tables."""
    print("| mode | prompt | median row | 95 % of rows below | worst row | worst step | argmax equal | greedy equal |")
    print("|---|---|---|---|---|---|---|---|")
    for mode in MODES:
        for prompt in PROMPTS:
            r = replay(mode, prompt)
            e = r.errors
            print(
                f"| {mode} | {prompt} | {np.median(e):.1e} | {np.quantile(e, 0.95):.1e} | {e.max():.1e} "
                f"| {r.step_errors.max():.1e} | {r.argmax_equal.mean():.1%} | {r.n_greedy} of 25 |"
            )
    print("\n| value | " + " | ".join(MODES) + " |\n|---|---|---|---|")
    tables = {mode: layer_errors(mode) for mode in MODES}
    for kind in FLOATS:
        cells = [f"{tables[mode][kind][0]:.1e} ({tables[mode][kind][1]})" for mode in MODES]
        print(f"| {kind} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
