"""Engram: which rows an n-gram reads, and the layer that adds them to the stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from ds4v41 import _ext
from ds4v41.errors import OptionError, TokenError
from tests.golden.compare import assert_bf16_close, relative
from tests.golden.load import runs, token_map, unit
from tests.ref import engram, formats, linear
from tests.ref.formats import F32, U8, Mode, bf16_round

from .support import (
    ISAS,
    MODES,
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
)
from .tolerance import (
    ENGRAM_ROUNDED,
    GOLDEN_LAYER_FP32,
    GOLDEN_TWO_STEPS,
    SMALLEST_NORMAL,
    UNIT,
    assert_norms_within,
    chain,
    gate_bound,
    product_bound,
)

SEEDS = st.integers(0, 2**32 - 1)

# ---------------------------------------------------------------- hash


def hash_model(plans: list[engram.HashPlan], ids: list[int], pad: int, file: Path) -> Any:
    """A model of zeros that has these tables: token t has the compressed id ids[t]."""
    sizes, heads = plans[0].primes.shape
    shape = small_shape(
        vocab=len(ids),
        hidden=32,
        n_layers=len(plans),
        n_experts=1,
        top_k=1,
        engram_columns=sizes * heads,
        ratio=[0] * len(plans),
        kv_source=[-1] * len(plans),
        index_source=[-1] * len(plans),
        engram_index=list(range(len(plans))),
    )
    builder = _ext.ModelBuilder(shape, "bf16")
    for name, rows, cols in matrices(shape):
        builder.matrix(name, "f32", rows, cols, np.zeros(4 * rows * cols, np.uint8), None)
    for name, size in vectors(shape):
        builder.vector(name, np.zeros(size, np.float32))
    builder.hash(
        max_ngram=sizes + 1,
        n_heads=heads,
        token_map=ids,
        pad=pad,
        multipliers=[[int(m) for m in p.multipliers] for p in plans],
        primes=[[int(q) for q in p.primes.ravel()] for p in plans],
        offsets=[[int(o) for o in p.offsets] for p in plans],
    )
    row_bytes = shape["engram_dim"] + 1
    with open(file, "wb") as empty:
        empty.truncate(max(plan.n_rows for plan in plans) * row_bytes)
    tables = [(plan.n_rows, shape["engram_dim"], str(file), 0, row_bytes, "", 0, 0) for plan in plans]
    builder.engram(_ext.Engram(tables))
    return builder.build(ISAS[0], 1)


def matrices(s: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Names and sizes of all matrices of a model without compressed rows. The data is never read here."""
    hidden, streams = s["hidden"], s["n_streams"]
    rows = [("embed.weight", s["vocab"], hidden), ("head.weight", s["vocab"], hidden)]
    heads, low = s["n_heads"] * s["head_dim"], s["o_groups"] * s["o_rank"]
    for layer in range(s["n_layers"]):
        p = f"layers.{layer}."
        rows += [(f"{p}hc_{k}_fn", (2 + streams) * streams, streams * hidden) for k in ("attn", "ffn")]
        rows += [
            (f"{p}attn.wq_a.weight", s["q_rank"], hidden),
            (f"{p}attn.wq_b.weight", heads, s["q_rank"]),
            (f"{p}attn.wkv.weight", s["head_dim"], hidden),
            (f"{p}attn.wo_a.weight", low, heads // s["o_groups"]),
            (f"{p}attn.wo_b.weight", hidden, low),
            (f"{p}engram.wkv.weight", (streams + 1) * hidden, s["engram_columns"] * s["engram_dim"]),
            (f"{p}ffn.gate.weight", s["n_experts"], hidden),
        ]
        for e in [*(f"experts.{i}" for i in range(s["n_experts"])), "shared_experts"]:
            rows += [(f"{p}ffn.{e}.w{i}.weight", s["expert_dim"], hidden) for i in (1, 3)]
            rows.append((f"{p}ffn.{e}.w2.weight", hidden, s["expert_dim"]))
    return rows


def vectors(s: dict[str, Any]) -> list[tuple[str, int]]:
    """Names and sizes of all vectors of such a model."""
    rows = [("norm.weight", s["hidden"])]
    for layer in range(s["n_layers"]):
        p = f"layers.{layer}."
        for k in ("attn", "ffn"):
            rows += [(f"{p}hc_{k}_scale", 3), (f"{p}hc_{k}_base", (2 + s["n_streams"]) * s["n_streams"])]
            rows.append((f"{p}{k}_norm.weight", s["hidden"]))
        rows += [(f"{p}attn.q_norm.weight", s["q_rank"]), (f"{p}attn.kv_norm.weight", s["head_dim"])]
        rows += [(f"{p}attn.attn_sink", s["n_heads"]), (f"{p}ffn.gate.bias", s["n_experts"])]
        rows += [(f"{p}engram.{k}_weight", s["n_streams"] * s["hidden"]) for k in ("q", "k")]
    return rows


def released_plans() -> list[engram.HashPlan]:
    v = unit("engram_released")
    return [
        engram.HashPlan(v["multipliers"][i], v["primes"][i], v["offsets"][i], int(v["row_sums"][i])) for i in range(2)
    ]


@pytest.mark.parametrize("masked", [False, True])
def test_golden_hash_with_released_sizes(masked: bool, tmp_path: Path) -> None:
    """Prefill rows with and without image positions, and three later steps."""
    v = unit("engram_released")
    ids = np.concatenate([v["compressed_ids"], v["decode_compressed_ids"]], axis=1)
    known, tokens = np.unique(ids, return_inverse=True)
    model = hash_model(released_plans(), [int(i) for i in known], 2, tmp_path / "table")
    n = v["compressed_ids"].shape[1]
    for batch, row in enumerate(tokens.reshape(ids.shape).astype(np.int32)):
        for table in range(2):
            if masked:
                got = model.engram_rows(table, row[:n].copy(), (~v["token_mask"][batch]).astype(np.uint8))
                assert_array_equal(got, v["hash_ids_masked"][batch, :, table])
            else:
                got = model.engram_rows(table, row)
                assert_array_equal(got[:n], v["hash_ids"][batch, :, table])
                assert_array_equal(got[n:], v["decode_hash_ids"][batch, :, table])


def tiny_plans() -> list[engram.HashPlan]:
    return engram.hash_plans([1, 4], int(token_map().max()) + 1, 500, 4, 2)


def test_golden_hash_of_the_tiny_model(tmp_path: Path) -> None:
    model = hash_model(tiny_plans(), [int(i) for i in token_map()], int(token_map()[2]), tmp_path / "table")
    golden, v = runs("bf16"), inside("bf16")
    tokens = np.concatenate([golden["p40.input_ids"], golden["p40.greedy_tokens"][:4]]).astype(np.int32)
    for table, layer in enumerate((1, 4)):
        got = model.engram_rows(table, tokens)
        assert_array_equal(got[:40], v[f"prefill.L{layer}.engram_hash_ids"])
        for step in range(4):
            assert_array_equal(got[40 + step : 41 + step], v[f"decode{step}.L{layer}.engram_hash_ids"])


@given(n=st.integers(1, 30), ngram=st.integers(2, 5), heads=st.integers(1, 4), dead=st.floats(0, 1), seed=SEEDS)
def test_hash_as_the_reference(
    tmp_path_factory: pytest.TempPathFactory, n: int, ngram: int, heads: int, dead: float, seed: int
) -> None:
    """Any n-gram size, and any pattern of image positions."""
    rng = np.random.default_rng(seed)
    vocabulary = int(rng.integers(2, 60))
    plans = engram.hash_plans([int(rng.integers(0, 40)) for _ in range(2)], vocabulary, 100, ngram, heads)
    ids = [int(i) for i in rng.integers(0, vocabulary, 40)]
    pad = int(rng.integers(0, vocabulary))
    model = hash_model(plans, ids, pad, tmp_path_factory.getbasetemp() / "table")
    more = n + ngram  # the reference wants rows that are longer than an n-gram; what comes later does not matter
    tokens = rng.integers(0, 40, more).astype(np.int32)
    killed = rng.random(more) < dead
    compressed = np.array(ids, dtype=np.int64)[tokens]
    for table, plan in enumerate(plans):
        got = model.engram_rows(table, tokens[:n].copy(), killed[:n].astype(np.uint8))
        assert_array_equal(got, engram.hash_rows(compressed, plan, pad, ~killed)[:n])
        assert got.min() >= 0 and got.max() < plan.n_rows
        assert_array_equal(model.engram_rows(table, tokens[:n].copy()), engram.hash_rows(compressed, plan, pad)[:n])


def test_hash_refuses_what_it_cannot_look_up(tmp_path: Path) -> None:
    model = hash_model(tiny_plans(), [0, 1, 2], 2, tmp_path / "table")
    for tokens in ([3], [0, -1], [2**31 - 1]):
        with pytest.raises(TokenError, match="out of range"):
            model.engram_rows(0, np.array(tokens, np.int32))
    with pytest.raises(OptionError, match="no table 2"):
        model.engram_rows(2, np.zeros(1, np.int32))
    with pytest.raises(OptionError, match="one byte a token"):
        model.engram_rows(0, np.zeros(2, np.int32), np.zeros(1, np.uint8))


# ---------------------------------------------------------------- layer


def table_rows(codes: U8, scale: U8, ids: np.ndarray) -> U8:
    """Rows [n, columns] as they are read from the table: codes, then scale bytes, one row after the other."""
    return np.ascontiguousarray(np.concatenate([codes[ids], scale[ids]], axis=-1)).reshape(-1)


def flat_weights(q_weight: F32, k_weight: F32) -> tuple[F32, F32]:
    return q_weight.reshape(-1), k_weight.reshape(-1)


@pytest.mark.parametrize("isa", ISAS)
def test_golden_layer(isa: str) -> None:
    """Rows that are alive; the others are passed by the engine, which does not call the operation for them."""
    v = unit("engram_layer")
    rows = table_rows(v.raw("embed.weight"), v["embed.scale"], v["hash_ids"])
    weights = flat_weights(v["q_weight"], v["k_weight"])
    run = backend(small_shape(hidden=64, engram_columns=4), "bf16", isa)
    got = run.engram(rows, *weights, stored_plain(v["wkv.weight"]).argument(), v["x"])
    assert_bf16_close(got, v["out"], steps=GOLDEN_TWO_STEPS)
    alive = v["token_mask"]
    assert_bf16_close(got[alive], v["out_masked"][alive], steps=GOLDEN_TWO_STEPS)
    assert_array_equal(v["out_masked"][~alive], v["x"][~alive])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", [1, 4])
def test_golden_layers_of_the_tiny_model(layer: int, mode: str, isa: str) -> None:
    v, file, name = inside(mode), tiny_checkpoint(mode), f"layers.{layer}.engram"
    weights = flat_weights(file[f"{name}.q_weight"], file[f"{name}.k_weight"])
    wkv, run = tiny_matrix(mode, f"{name}.wkv").argument(), backend(small_shape(), mode, isa)
    for phase in ("prefill", "decode0", "decode2"):
        start = f"{phase}.L{layer}."
        ids = v[start + "engram_hash_ids"]
        rows = table_rows(file.raw(f"{name}.embed.weight"), file.raw(f"{name}.embed.scale"), ids)
        got = run.engram(rows, *weights, wkv, v[start + "engram_in"])
        if mode == "fp32":
            assert relative(got, v[start + "engram_out"]) < GOLDEN_LAYER_FP32
        else:
            assert_bf16_close(got, v[start + "engram_out"], steps=GOLDEN_TWO_STEPS)


class Case:
    """A random layer and the rows that n positions read."""

    def __init__(self, n: int, copies: int, hidden: int, columns: int, kind: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.shape = small_shape(hidden=hidden, n_streams=copies, engram_columns=columns)
        self.wkv: Stored = random_stored(kind, (copies + 1) * hidden, columns * 32, rng)
        codes = rng.integers(0, 256, (n, columns, 32)).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 1
        scale = rng.integers(115, 122, (n, columns, 1)).astype(np.uint8)
        self.packed = np.concatenate([codes, scale], axis=-1)
        values = formats.e4m3_decode(codes) * formats.e8m0_decode(scale)
        self.rows = values.reshape(n, -1)
        self.weights = [bf16_round(rng.normal(size=(copies, hidden))) for _ in range(2)]
        self.stream = bf16_round(rng.normal(size=(n, copies, hidden)))

    def run(self, b: Any, rows: slice = slice(None)) -> F32:
        packed = np.ascontiguousarray(self.packed[rows]).reshape(-1)
        return np.asarray(b.engram(packed, *flat_weights(*self.weights), self.wkv.argument(), self.stream[rows]))

    def want(self, mode: Mode) -> F32:
        weight = linear.Weight(self.wkv.values, "fp8" if self.wkv.kind.startswith("fp8") else "bf16")
        q_weight, k_weight = self.weights
        return engram.engram(self.stream, self.rows, weight, q_weight, k_weight, 1e-20, mode)

    def check(self, got: F32, mode: Mode) -> None:
        """Against the reference: element by element in fp32, in norm where keys and value are rounded."""
        n, copies, hidden = self.stream.shape
        error, stream = got - self.want(mode).astype(np.float64), self.stream.astype(np.float64)
        out = (self.rows.astype(np.float64) @ self.wkv.values.T.astype(np.float64)).reshape(n, copies + 1, hidden)
        key, value = out[:, :copies], np.abs(out[:, copies:])
        if mode != "fp32":
            assert_norms_within(error, np.abs(stream) + value, ENGRAM_ROUNDED)
            return
        bound = product_bound(self.rows, self.wkv.values).reshape(out.shape)
        root = [np.sqrt((v * v).mean(axis=2) + 1e-20) for v in (stream, key)]
        weight = np.abs(self.weights[0].astype(np.float64) * self.weights[1])
        scale = hidden**-0.5 / (root[0] * root[1])
        dot = (stream * self.weights[0] * self.weights[1] * key).sum(axis=2) * scale
        size = (np.abs(stream) * weight * np.abs(key)).sum(axis=2) * scale
        key_error = (np.abs(stream) * weight * bound[:, :copies]).sum(axis=2) * scale
        key_error += size * np.sqrt((bound[:, :copies] ** 2).mean(axis=2)) / root[1]  # it enters the key's norm too
        gate = gate_bound(dot, key_error + (2 * chain(hidden) + 10) * UNIT * size)[:, :, None]
        limit = gate * value + bound[:, copies:] + 3 * UNIT * (np.abs(stream) + value) + SMALLEST_NORMAL
        assert (np.abs(error) <= limit).all(), f"worst {(np.abs(error) / limit).max():.2f} times the bound"


@given(
    n=st.integers(1, 5),
    copies=st.integers(1, 8),
    hidden=st.integers(1, 80),
    columns=st.integers(1, 6),
    kind=st.sampled_from(["bf16", "f32", "fp8_block", "q8_0"]),
    mode=st.sampled_from(["fp32", "bf16"]),
    seed=SEEDS,
)
def test_layer_as_the_reference(
    n: int, copies: int, hidden: int, columns: int, kind: str, mode: Mode, seed: int
) -> None:
    case = Case(n, copies, hidden, columns, kind, seed)
    (got,) = same_on_all_isas(lambda isa: case.run(backend(case.shape, mode, isa)))
    case.check(got, mode)


@given(n=st.integers(1, 4), hidden=st.integers(1, 64), columns=st.integers(1, 6), seed=SEEDS)
def test_layer_in_release_precision(n: int, hidden: int, columns: int, seed: int) -> None:
    case = Case(n, 4, hidden, columns, "fp8_block", seed)
    (got,) = same_on_all_isas(lambda isa: case.run(backend(case.shape, "fp8", isa)))
    case.check(got, "fp8")


def test_zero_stream_has_a_gate_of_nearly_a_half() -> None:
    """The root's floor of 1e-6 keeps the gate at sigmoid(0.001) when nothing matches."""
    case = Case(2, 4, 32, 2, "bf16", 3)
    case.stream[:] = 0
    for isa in ISAS:
        got = case.run(backend(case.shape, "fp32", isa))
        value = (case.rows.astype(np.float64) @ case.wkv.values.T.astype(np.float64))[:, 4 * 32 :]
        np.testing.assert_allclose(got, np.repeat(value[:, None] / (1 + np.exp(-1e-3)), 4, 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("n", [1, 9])
def test_same_bits_on_all_backends(n: int, mode: str) -> None:
    case = Case(n, 4, 72, 6, "fp8_block", n)
    same_on_all_backends(case.shape, mode, case.run)


def test_a_row_does_not_depend_on_its_batch() -> None:
    case = Case(7, 4, 64, 6, "bf16", 7)
    run = backend(case.shape, "bf16")
    whole = case.run(run)
    for i in range(7):
        same_bits(case.run(run, slice(i, i + 1)), whole[i : i + 1])


def test_a_row_does_not_depend_on_the_slice_it_is_in() -> None:
    """More rows than the operation takes at a time (csrc/cpu/slices.h), and a rest."""
    case = Case(192 * 2 + 5, 2, 64, 3, "bf16", 8)
    run = backend(case.shape, "fp8")
    whole = case.run(run)
    for rows in (slice(0, 7), slice(190, 194), slice(383, 389)):
        same_bits(case.run(run, rows), whole[rows])
