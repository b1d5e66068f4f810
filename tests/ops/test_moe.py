"""Router and experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from tests.golden.compare import assert_bf16_close, relative
from tests.golden.load import unit
from tests.ref import linear, moe
from tests.ref.formats import F32, Mode, bf16_round, f32

from .support import (
    ISAS,
    MODES,
    OPS,
    Stored,
    backend,
    inside,
    random_stored,
    same_bits,
    same_on_all_backends,
    same_on_all_isas,
    small_shape,
    stored_plain,
    tiny_checkpoint,
    tiny_matrix,
    values_of,
)
from .tolerance import (
    EXPERTS,
    GOLDEN_FP32,
    GOLDEN_LAYER_FP32,
    GOLDEN_TWO_STEPS,
    ROUTING,
    UNIT,
    assert_rows_close,
    assert_within,
    expert_bound,
    product_bound,
)

SEEDS = st.integers(0, 2**32 - 1)
Trio = tuple[Stored, Stored, Stored]

# ---------------------------------------------------------------- router


def by_id(ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Golden and reference choices come best first, ours in ascending order."""
    order = np.argsort(ids, axis=1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("images", [False, True])
def test_golden_gate(images: bool, isa: str) -> None:
    """With images, rows of a span are routed with their own bias."""
    v = unit("gate")
    k, scale = v["params_topk_scale"]
    run = backend(small_shape(hidden=64, n_experts=12, top_k=int(k), route_scale=float(scale)), "bf16", isa)
    gate = stored_plain(v["weight"]).argument()
    ids, weights = run.route(v["x"], gate, v["bias"])
    if images:
        other_ids, other_weights = run.route(v["x"], gate, v["bias_vl"])
        span = v["image_mask"][:, None]
        ids, weights = np.where(span, other_ids, ids), np.where(span, other_weights, weights)
    want_ids, want_weights = by_id(v["indices_vl" if images else "indices"], v["weights_vl" if images else "weights"])
    assert_array_equal(ids, want_ids)
    assert_allclose(weights, want_weights, rtol=GOLDEN_FP32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", range(8))
def test_golden_router_of_every_layer(layer: int, mode: str, isa: str) -> None:
    v, bias = inside(mode), tiny_checkpoint(mode)[f"layers.{layer}.ffn.gate.bias"]
    gate = tiny_matrix(mode, f"layers.{layer}.ffn.gate").argument()
    for phase in ("prefill", "decode0", "decode3"):
        start = f"{phase}.L{layer}."
        ids, weights = backend(small_shape(), mode, isa).route(v[start + "ffn_in"], gate, bias)
        want_ids, want_weights = by_id(v[start + "router_indices"], v[start + "router_weights"])
        assert_array_equal(ids, want_ids)
        assert_allclose(weights, want_weights, rtol=ROUTING)


@given(
    n=st.integers(1, 6),
    experts=st.integers(1, 40),
    hidden=st.integers(1, 200),
    data=st.data(),
    kind=st.sampled_from(["bf16", "f32"]),
    seed=SEEDS,
)
def test_router_as_the_reference(n: int, experts: int, hidden: int, data: st.DataObject, kind: str, seed: int) -> None:
    k = data.draw(st.integers(1, experts))
    rng = np.random.default_rng(seed)
    gate = random_stored(kind, experts, hidden, rng)
    x, bias = f32(rng.normal(size=(n, hidden)) * hidden**-0.5), f32(rng.normal(size=experts) * 0.3)
    shape = small_shape(hidden=hidden, n_experts=experts, top_k=k)
    ids, weights = same_on_all_isas(lambda isa: backend(shape, "bf16", isa).route(x, gate.argument(), bias))
    scores = np.sqrt(np.logaddexp(0, x.astype(np.float64) @ gate.values.T.astype(np.float64)))
    slack = ROUTING + product_bound(x, gate.values).max(axis=1)
    for row, chosen in enumerate(ids):
        assert (np.diff(chosen) > 0).all()
        rest = np.setdiff1d(np.arange(experts), chosen)
        ranked = scores[row] + bias
        assert not len(rest) or ranked[chosen].min() >= ranked[rest].max() - 2 * slack[row]
        picked = scores[row, chosen]
        assert_allclose(weights[row], picked / (picked.sum() + 1e-20) * 1.5, rtol=2 * slack[row])


def test_equal_scores_go_to_the_lower_expert() -> None:
    gate = stored_plain(np.ones((9, 8), np.float32))
    shape = small_shape(hidden=8, n_experts=9, top_k=4)
    for isa in ISAS:
        bias = f32([0, 0, 0.5, 0, 0, 0, 0.5, 0, 0])
        ids, weights = backend(shape, "bf16", isa).route(np.ones((2, 8), np.float32), gate.argument(), bias)
        assert_array_equal(ids, [[0, 1, 2, 6]] * 2)
        assert_allclose(weights, 1.5 / 4, rtol=ROUTING)


def test_bias_decides_but_does_not_weigh() -> None:
    gate = stored_plain(f32([[4], [0], [-4]]))
    shape = small_shape(hidden=1, n_experts=3, top_k=2)
    ids, weights = backend(shape, "bf16").route(f32([[1]]), gate.argument(), f32([-100, 0, 100]))
    assert_array_equal(ids, [[1, 2]])
    score = np.sqrt(np.logaddexp(0, [0, -4]))
    assert_allclose(weights[0], score / score.sum() * 1.5, rtol=ROUTING)


@pytest.mark.parametrize("logit", [-1000.0, -60.0, 0.0, 60.0, 1e6])
def test_logits_of_any_size(logit: float) -> None:
    """Scores of nearly nothing or very much still share out the whole weight (none below e^-87, where all are 0)."""
    gate = stored_plain(f32([[logit]] * 4), "f32")
    shape = small_shape(hidden=1, n_experts=4, top_k=2)
    for isa in ISAS:
        ids, weights = backend(shape, "bf16", isa).route(f32([[1]]), gate.argument(), np.zeros(4, np.float32))
        assert_array_equal(ids, [[0, 1]])
        assert_allclose(weights, 0 if logit < -87 else 0.75, rtol=ROUTING)


def test_rows_that_are_not_numbers_still_name_experts() -> None:
    """The ids index weights, so they must be valid whatever the scores are."""
    gate = random_stored("f32", 6, 4, np.random.default_rng(1))
    shape = small_shape(hidden=4, n_experts=6, top_k=3)
    for isa in ISAS:
        x, bias = np.full((1, 4), np.nan, np.float32), np.zeros(6, np.float32)
        ids, _ = backend(shape, "bf16", isa).route(x, gate.argument(), bias)
        assert sorted(set(ids[0])) == [0, 1, 2]


# ---------------------------------------------------------------- experts


def arguments(experts: list[Trio], shared: Trio) -> tuple[list[tuple[Any, ...]], tuple[Any, ...]]:
    """Experts as `Backend.moe` takes them: (gate, down, up) each."""
    packed = [tuple(m.argument() for m in e) for e in [*experts, shared]]
    return packed[:-1], packed[-1]


def reference(e: Trio) -> moe.Expert:
    kinds: dict[str, Any] = {"fp8_block": "fp8", "fp8_row": "fp8", "fp4_row": "fp4"}
    return moe.Expert(*(linear.Weight(m.values, kinds.get(m.kind, "bf16")) for m in e))


def zero_expert(hidden: int, width: int) -> Trio:
    wide, tall = np.zeros((width, hidden), np.float32), np.zeros((hidden, width), np.float32)
    return stored_plain(wide), stored_plain(tall), stored_plain(wide)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("routed", [False, True])
def test_golden_expert(routed: bool, isa: str) -> None:
    """Clipped at 10; as the shared expert without a weight, or as a routed one whose weight comes before w2."""
    v = unit("expert")
    golden, zero = (stored_plain(v["w1"]), stored_plain(v["w2"]), stored_plain(v["w3"])), zero_expert(64, 96)
    run = backend(small_shape(hidden=64, expert_dim=96, n_experts=1, top_k=1), "bf16", isa)
    ids = np.zeros((len(v["x"]), 1), np.int32)
    experts, shared = arguments([golden if routed else zero], zero if routed else golden)
    got = run.moe(v["x"], ids, v["routing_weight"], experts, shared)
    assert_bf16_close(got, v["out_weighted" if routed else "out_unweighted"], steps=GOLDEN_TWO_STEPS)


@pytest.mark.parametrize("phase", ["prefill", "decode0"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", [0, 3, 7])
def test_golden_experts_of_a_layer(layer: int, mode: str, phase: str) -> None:
    """16 experts and the shared one in their stored types: bf16, or fp4 and fp8 with quantised activations."""
    v = inside(mode)

    def trio(name: str) -> Trio:
        w1, w2, w3 = (tiny_matrix(mode, f"layers.{layer}.ffn.{name}.w{i}") for i in (1, 2, 3))
        return w1, w2, w3

    experts, shared = arguments([trio(f"experts.{e}") for e in range(16)], trio("shared_experts"))
    start = f"{phase}.L{layer}."
    ids, weights = by_id(v[start + "router_indices"], v[start + "router_weights"])
    x = v[start + "ffn_in"]
    x = OPS.fake_q8(ISAS[0], x) if mode == "fp8" else x
    run = (x, ids, weights, experts, shared)
    (got,) = same_on_all_isas(lambda isa: backend(small_shape(), mode, isa).moe(*run))
    if mode == "fp32":
        assert relative(got, v[start + "ffn_out"]) < GOLDEN_LAYER_FP32
    else:
        assert_bf16_close(got, v[start + "ffn_out"], steps=GOLDEN_TWO_STEPS)


class Case:
    """Random experts of one type, a shared expert, and rows with their choices."""

    def __init__(
        self, n: int, hidden: int, width: int, experts: int, k: int, kinds: tuple[str, str], seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.shape = small_shape(hidden=hidden, expert_dim=width, n_experts=experts, top_k=k)

        def trio(kind: str) -> Trio:
            sizes = [(width, hidden), (hidden, width), (width, hidden)]
            w1, w2, w3 = (random_stored(kind, *size, rng) for size in sizes)
            return w1, w2, w3

        self.experts, self.shared = [trio(kinds[0]) for _ in range(experts)], trio(kinds[1])
        # Of a size that makes gate and up about 5, so that the limit of 10 is reached now and then.
        spread = max(1e-3, *(float(np.abs(e[0].values).mean()) for e in (self.experts[0], self.shared)))
        self.x = bf16_round(values_of("normal", (n, hidden), rng) * np.float32(5 / spread * hidden**-0.5))
        self.ids = np.stack([np.sort(rng.choice(experts, k, replace=False)) for _ in range(n)]).astype(np.int32)
        self.weights = f32(rng.uniform(0.05, 1, (n, k)))

    def run(self, b: Any, rows: slice = slice(None), quantise: bool = False) -> F32:
        x = self.x[rows]
        x = OPS.fake_q8(ISAS[0], x) if quantise else x
        return np.asarray(b.moe(x, self.ids[rows], self.weights[rows], *arguments(self.experts, self.shared)))

    def want(self, mode: Mode) -> F32:
        trios = [reference(e) for e in self.experts]
        limit = float(self.shape["swiglu_limit"])
        return moe.moe(self.x, self.ids, self.weights, trios, reference(self.shared), limit, mode)

    def bound(self) -> np.ndarray:
        """Error bound in fp32, [n, D]: that of each expert, and of the sum over them."""
        limit = float(self.shape["swiglu_limit"])
        total = np.zeros(self.x.shape)
        for e, trio in enumerate([*self.experts, self.shared]):
            routed = e < len(self.experts)
            weight = (self.weights * (self.ids == e)).sum(axis=1) if routed else np.ones(len(self.x))
            w1, w2, w3 = (m.values for m in trio)
            total += expert_bound(self.x, w1, w2, w3, limit, weight)
            out = moe.expert(self.x, reference(trio), limit, "fp32", f32(weight))
            total += (self.ids.shape[1] + 1) * UNIT * np.abs(out)
        return total


KINDS = ["f32", "f16", "bf16", "fp8_block", "fp8_row", "fp4_row", "q8_0", "mxfp4"]


@given(
    n=st.integers(1, 9),
    hidden=st.sampled_from([32, 64, 160]),
    width=st.sampled_from([32, 96, 128]),
    experts=st.integers(1, 7),
    k=st.integers(1, 7),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    mode=st.sampled_from(["fp32", "bf16"]),
    seed=SEEDS,
)
def test_experts_of_every_type(
    n: int, hidden: int, width: int, experts: int, k: int, kinds: tuple[str, str], mode: Mode, seed: int
) -> None:
    case = Case(n, hidden, width, experts, min(k, experts), kinds, seed)
    (got,) = same_on_all_isas(lambda isa: case.run(backend(case.shape, mode, isa)))
    if mode == "fp32":
        assert_within(got, case.want(mode).astype(np.float64), case.bound())
    else:
        assert_rows_close(got, case.want(mode), EXPERTS[mode])


@given(n=st.integers(1, 6), hidden=st.integers(1, 90), width=st.integers(1, 90), k=st.integers(1, 3), seed=SEEDS)
def test_ragged_sizes(n: int, hidden: int, width: int, k: int, seed: int) -> None:
    case = Case(n, hidden, width, 3, k, ("bf16", "fp8_block"), seed)
    (got,) = same_on_all_isas(lambda isa: case.run(backend(case.shape, "fp32", isa)))
    assert_within(got, case.want("fp32").astype(np.float64), case.bound())


@given(
    n=st.integers(1, 6),
    hidden=st.sampled_from([64, 160]),
    width=st.sampled_from([64, 128]),
    kinds=st.tuples(st.sampled_from(["fp4_row", "fp8_row", "fp8_block"]), st.sampled_from(["fp8_block", "fp4_row"])),
    seed=SEEDS,
)
def test_quantised_activations(n: int, hidden: int, width: int, kinds: tuple[str, str], seed: int) -> None:
    """Release precision: the input and the inner activation go through the quantiser, the latter after its weight."""
    case = Case(n, hidden, width, 4, 2, kinds, seed)
    (got,) = same_on_all_isas(lambda isa: case.run(backend(case.shape, "fp8", isa), quantise=True))
    assert_rows_close(got, case.want("fp8"), EXPERTS["fp8"])


@pytest.mark.parametrize("kind", ["q4_k", "q2_k", "iq2_xxs"])
def test_blocks_of_256(kind: str) -> None:
    case = Case(3, 256, 512, 3, 2, (kind, "q8_0"), 8)
    (got,) = same_on_all_isas(lambda isa: case.run(backend(case.shape, "bf16", isa)))
    assert_rows_close(got, case.want("bf16"), EXPERTS["bf16"])


def test_many_rows_for_one_expert() -> None:
    """150 rows that all choose expert 1: more than a batch, and experts without work between."""
    case = Case(150, 32, 64, 5, 2, ("bf16", "bf16"), 11)
    case.ids[:] = [1, 4]
    (got,) = same_on_all_isas(lambda isa: case.run(backend(case.shape, "bf16", isa)))
    assert_rows_close(got, case.want("bf16"), EXPERTS["bf16"])
    run = backend(case.shape, "bf16")
    for i in (0, 63, 64, 127, 128, 149):
        same_bits(case.run(run, slice(i, i + 1)), got[i : i + 1])


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("n", [1, 7])
def test_same_bits_on_all_backends(n: int, mode: str) -> None:
    case = Case(n, 96, 160, 6, 3, ("fp4_row", "fp8_block"), n)
    same_on_all_backends(case.shape, mode, lambda b: case.run(b, quantise=mode == "fp8"))
    gate = random_stored("bf16", 6, 96, np.random.default_rng(n))
    bias = np.zeros(6, np.float32)
    same_on_all_backends(case.shape, mode, lambda b: b.route(case.x, gate.argument(), bias))


def test_a_row_does_not_depend_on_its_batch() -> None:
    case = Case(12, 64, 96, 5, 2, ("q8_0", "bf16"), 12)
    run = backend(case.shape, "bf16")
    whole = case.run(run)
    for i in range(12):
        same_bits(case.run(run, slice(i, i + 1)), whole[i : i + 1])
    same_bits(np.concatenate([case.run(run, slice(0, 5)), case.run(run, slice(5, 12))]), whole)


def test_experts_add_up_in_ascending_order() -> None:
    """1e8, -1e8, 1 and the shared expert's 0.5: any other order loses the 1 or the 0.5."""
    shape = small_shape(hidden=1, expert_dim=1, n_experts=3, top_k=3, swiglu_limit=1000.0)
    one = stored_plain(f32([[1]]), "f32")

    def trio(factor: float) -> Trio:
        return stored_plain(f32([[100]]), "f32"), stored_plain(f32([[factor / 100]]), "f32"), one

    experts, shared = arguments([trio(1e8), trio(-1e8), trio(1)], trio(0.5))
    for isa in ISAS:
        run = backend(shape, "fp32", isa)
        got = run.moe(f32([[1]]), np.arange(3, dtype=np.int32)[None], np.ones((1, 3), np.float32), experts, shared)
        assert got[0, 0] == pytest.approx(1.5)


SILU_MINUS_20 = -20 / (1 + np.exp(20))


@pytest.mark.parametrize(
    ("gate", "up", "want"),
    [(20, 20, 100), (20, -20, -100), (-20, 3, 3 * SILU_MINUS_20), (-20, -20, -10 * SILU_MINUS_20)],
)
def test_gate_is_clipped_from_above_only(gate: float, up: float, want: float) -> None:
    """Gate -20 stays, gate 20 becomes 10; up is clipped on both sides."""
    shape = small_shape(hidden=1, expert_dim=1, n_experts=1, top_k=1)
    zero = tuple(m.argument() for m in zero_expert(1, 1))
    expert = tuple(stored_plain(f32([[w]]), "f32").argument() for w in (gate, 1, up))
    for isa in ISAS:
        got = backend(shape, "fp32", isa).moe(f32([[1]]), np.zeros((1, 1), np.int32), f32([[1]]), [expert], zero)
        assert_allclose(got, want, rtol=1e-4)
