"""The engine against the golden runs of the reference program: tolerances of tests/golden/README.md."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.golden.compare import bf16_steps, relative, row_errors
from tests.golden.load import FOLDER, intermediates, runs
from tests.ref.formats import bf16_round

from .golden_runs import FLOATS, MODES, N_STEPS, PHASES, PROMPTS, WINDOW, engine_mode, layer_by_layer, replay
from .support import nano, tiny

# ---- fp32, end to end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["p5", "p16", "p17", "p40"])
def test_fp32_rows_and_steps(prompt: str) -> None:
    found = replay("fp32", prompt)
    assert found.errors.max() < 1e-5
    assert found.step_errors.max() < 5e-5
    assert found.n_greedy == N_STEPS + 1


def test_fp32_p150() -> None:
    found = replay("fp32", "p150")
    assert np.median(found.errors) < 1e-5
    assert (found.errors < 1e-3).mean() >= 0.95
    assert found.n_greedy == N_STEPS + 1


def test_fp32_p300() -> None:
    found = replay("fp32", "p300")
    assert (found.errors < 5e-2).mean() >= 0.9
    assert found.argmax_equal.mean() >= 0.98
    assert found.n_greedy >= 17


# ---- bf16 and fp8, end to end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "median", "share"), [("bf16", 0.15, 0.85), ("fp8fp4", 0.2, 0.78)])
def test_rounded_modes_by_statistics(mode: str, median: float, share: float) -> None:
    for prompt in PROMPTS:
        assert np.median(replay(mode, prompt).errors) < median, prompt
    assert np.concatenate([replay(mode, prompt).argmax_equal for prompt in PROMPTS]).mean() >= share


@pytest.mark.parametrize("mode", MODES)
def test_an_error_would_be_seen(mode: str) -> None:
    """The measures above are not blind: the logits of a prompt with one other token are outside of them."""
    prompt = replay(mode, "p40")
    with tiny(engine_mode(mode)).session() as session:
        ids = runs(mode)["p40.input_ids"].copy()
        ids[3] = (int(ids[3]) + 1) % 512
        rows = session.prefill(ids, logits="all")
    assert rows is not None
    assert np.median(row_errors(rows, prompt.want_prefill)) > (1e-3 if mode == "fp32" else 0.05)


# ---- layer by layer, with golden inputs ----------------------------------------------------------------------------

# (stream_out, engram_out; everything else). A flipped code shows in a sub-layer's output, mostly in one-row steps.
LIMITS = {"fp32": (1e-6, 2e-6), "bf16": (5e-3, 3e-2), "fp8fp4": (5e-3, 3e-2)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES)
def test_layer_by_layer(mode: str, phase: str) -> None:
    pair = layer_by_layer(mode)[phase]
    outer, inner = LIMITS[mode]
    checked = 0
    for name, want in pair.want.items():
        kind = name.split(".")[-1]
        if kind not in FLOATS or name not in pair.got:
            continue
        limit = outer if kind in ("stream_out", "engram_out") else inner
        assert relative(pair.got[name], want) < limit, name
        checked += 1
    assert checked == 8 * (len(FLOATS) - 1) + 2  # 8 layers, Engram in two of them


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES)
def test_experts(mode: str, phase: str) -> None:
    """Equal sets with equal weights. (No router gap of this data is below 1e-3, so none may differ.)"""
    pair = layer_by_layer(mode)[phase]
    for layer in range(8):
        chosen, weights = pair.got[f"L{layer}.router_indices"], pair.got[f"L{layer}.router_weights"]
        golden, golden_weights = pair.want[f"L{layer}.router_indices"], pair.want[f"L{layer}.router_weights"]
        a, b = np.argsort(chosen, axis=1), np.argsort(golden, axis=1)
        assert_array_equal(np.take_along_axis(chosen, a, 1), np.take_along_axis(golden, b, 1))
        assert_allclose(
            np.take_along_axis(weights, a, 1),
            np.take_along_axis(golden_weights, b, 1),
            rtol=1e-6 if mode == "fp32" else 1e-2,
        )


def _golden_selection(pair: Any, layer: int, phase: str) -> list[set[int]]:
    listed = pair.want[f"L{layer}.topk_idxs"]
    first = len(listed) if phase == "prefill" else WINDOW
    return [{int(i) - first for i in row if i >= 0} for row in listed]


def _near_tie(want: np.ndarray, entries: set[int]) -> bool:
    """Do the scores of these entries lie within one bfloat16 step of each other?"""
    scores = np.asarray(bf16_round(want[sorted(entries)]))
    return int(bf16_steps(scores, np.full_like(scores, scores[0])).max()) <= 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES)
def test_selection(mode: str, phase: str) -> None:
    pair, model = layer_by_layer(mode)[phase], tiny(engine_mode(mode))
    rows = 0
    for layer in model.config.index_source_layer_ids:
        selected, n_selected = pair.got[f"L{layer}.selected"], pair.got[f"L{layer}.n_selected"]
        for i, golden in enumerate(_golden_selection(pair, layer, phase)):
            ours = selected[i, : n_selected[i]].tolist()
            assert ours == sorted(set(ours)), "in position order, each once"
            assert len(ours) == len(golden)
            if set(ours) != golden:
                assert mode != "fp32"
                assert _near_tie(pair.want[f"L{layer}.index_scores"][i], set(ours) ^ golden)
            rows += 1
    assert rows == 4 * len(pair.got["logits"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES)
def test_index_scores(mode: str, phase: str) -> None:
    """Every visible entry of a layer without candidates, every admitted one of a layer with them."""
    pair, model = layer_by_layer(mode)[phase], tiny(engine_mode(mode))
    for layer in model.config.index_source_layer_ids:
        scores, want = pair.got[f"L{layer}.index_scores"], pair.want[f"L{layer}.index_scores"]
        shown = scores > -np.inf
        visible = want > -np.inf
        assert not (shown & ~visible[:, : shown.shape[1]]).any()
        if not model.config.uses_candidates(layer):
            assert_array_equal(shown, visible)
        a, b = scores[shown], want[:, : shown.shape[1]][shown]
        if mode == "fp32":
            assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max(initial=1))
        else:
            # The reference rounds its scores to bfloat16; one step, at the largest score of the row's size.
            assert_allclose(a, b, rtol=2**-7, atol=2**-8 * np.abs(b).max(initial=1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES)
def test_candidates(mode: str, phase: str) -> None:
    pair, config = layer_by_layer(mode)[phase], tiny(engine_mode(mode)).config
    source, size = config.candidate_source_layer_id, config.candidate_block_size
    blocks, counts = pair.got[f"L{source}.candidate_blocks"], pair.got[f"L{source}.n_candidate_blocks"]
    want = pair.want[f"L{source}.candidate_mask"]
    visible = pair.want[f"L{source}.index_scores"] > -np.inf
    for i in range(len(want)):
        mask = np.zeros(want.shape[1], bool)
        for block in blocks[i, : counts[i]]:
            mask[block * size : (block + 1) * size] = True
        assert_array_equal(mask & visible[i], want[i] & visible[i])


@pytest.mark.parametrize("mode", MODES)
def test_engram_rows(mode: str) -> None:
    """Hash ids of the prompt, and of steps that look back into it."""
    golden, inside, model = runs(mode), intermediates(mode), tiny(engine_mode(mode))
    prompt = golden["p40.input_ids"]
    line = np.concatenate([prompt, golden["p40.greedy_tokens"][:4]]).astype(np.int32)
    for table, layer in enumerate(model.config.engram_layer_ids):
        rows = model._handle().engram_rows(table, line)
        assert_array_equal(rows[: len(prompt)], inside[f"prefill.L{layer}.engram_hash_ids"])
        for step in range(4):
            assert_array_equal(rows[len(prompt) + step][None], inside[f"decode{step}.L{layer}.engram_hash_ids"])


# ---- nano ----------------------------------------------------------------------------------------------------------


@cache
def nano_choices() -> list[tuple[str, int, int, int, float]]:
    """(run, place, our choice, golden choice, recorded gap) of every golden place, fed with the golden tokens."""
    found = []
    for run in json.loads((FOLDER / "nano/golden.json").read_text())["runs"]:
        owner = run["owner_keys"]
        # Runs that the published hand-off did not change are recorded once.
        greedy, gaps = owner["greedy_ids"], owner["top2_margins"]
        with nano().session(context=1024) as session:
            first = session.prefill(run["prompt_ids"])
            assert first is not None
            rows = np.concatenate([first, *(session.step([token]) for token in greedy[:-1])])
        found += [(run["name"], i, int(rows[i].argmax()), greedy[i], gaps[i]) for i in range(len(greedy))]
    return found


def test_nano_teacher_forced() -> None:
    """The same token in 95 % of the places; where another, the reference was nearly undecided."""
    choices = nano_choices()
    differing = [choice for choice in choices if choice[2] != choice[3]]
    assert len(choices) == 5 * 64
    assert len(differing) <= 0.05 * len(choices), differing
    assert all(gap < 1.5 for *_, gap in differing), differing
