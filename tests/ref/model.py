"""The whole text model, row by row rules only: a prefill of any length and a step are the same function.

Nothing here is packed or fast. The state keeps every window row and every compressed row since position 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import attend, compress, engram, hc, head, index, moe, rope, select
from .checkpoint import Checkpoint
from .formats import F32, Mode, f32, quantise_q8, store
from .linear import grouped_linear, linear
from .norm import rms_norm

Record = Callable[[str, np.ndarray], None]
Rope = tuple[F32, F32]


@dataclass
class LayerState:
    """What one layer keeps. Sources of compressed rows fill the last four."""

    window: F32  # [positions, hd]
    compressed: F32  # [entries, hd]
    keys: F32  # [entries, index dim]
    open_values: F32  # [0..ratio-1, hd] tokens of the group that is not complete
    open_gates: F32


@dataclass
class State:
    """A session: tokens so far and what each layer keeps."""

    layers: list[LayerState]
    ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def position(self) -> int:
        return len(self.ids)


@dataclass
class Step:
    """What the layers of one call share: rows at positions first..first+n-1, and the newest selection."""

    mode: Mode
    positions: NDArray[np.int64]
    ids: NDArray[np.int64]  # all tokens from position 0 to the last row
    record: Record
    source: int = -1  # newest layer that makes compressed rows
    selected: NDArray[np.int32] | None = None  # [n, k] entries of `source`
    candidates: NDArray[np.bool_] | None = None


class Model:
    """A checkpoint folder run in one mode; `token_map` [vocabulary] gives the compressed ids for Engram."""

    def __init__(self, folder: Path, mode: Mode, token_map: NDArray[np.int64]) -> None:
        self.weights = Checkpoint(folder)
        self.config = self.weights.config
        self.mode: Mode = mode
        self.token_map = token_map
        c = self.config
        self.eps = float(c["rms_norm_eps"])
        self.plans = dict(
            zip(
                c["engram_layer_ids"],
                engram.hash_plans(
                    c["engram_layer_ids"],
                    int(token_map.max()) + 1,
                    c["engram_vocab_size"],
                    c["engram_max_ngram_size"],
                    c["engram_n_heads"],
                ),
                strict=True,
            )
        )
        self.tables = {layer: self.weights.engram_table(layer) for layer in c["engram_layer_ids"]}
        rotary = c["qk_rope_head_dim"]
        self.plain_freq = rope.frequencies(rotary, c["rope_theta"], None)
        self.yarn_freq = rope.frequencies(rotary, c["compress_rope_theta"], c.yarn)
        self.layers = [Layer(self, number) for number in range(c.n_layers)]

    def new_state(self) -> State:
        """An empty session."""
        c = self.config
        hd, dim = c["head_dim"], c["index_head_dim"]
        empty = [np.zeros((0, width), np.float32) for width in (hd, hd, dim, hd, hd)]
        return State([LayerState(*empty) for _ in range(c.n_layers)])

    def forward(
        self,
        tokens: NDArray[np.integer],
        state: State,
        *,
        given: Mapping[str, np.ndarray] | None = None,
        record: Record = lambda name, value: None,
    ) -> F32:
        """Logits [n, vocabulary] of n new tokens; `state` moves on.

        `record(name, value)` sees intermediates under names such as "L2.attn_in". With `given`, each layer starts from
        given["L<l-1>.stream_out"], given["L<l-1>.pre_mix_out"] and, where it has Engram, given["L<l>.engram_out"].
        """
        c, w = self.config, self.weights
        first = state.position
        state.ids = np.concatenate([state.ids, np.asarray(tokens, dtype=np.int64)])
        step = Step(self.mode, np.arange(first, state.position), state.ids, record)
        embedding = store(w.values("embed.weight")[step.ids[first:]], self.mode)
        stream = np.repeat(embedding[:, None], c["hc_mult"], axis=1)
        mix = np.zeros(stream.shape[:2], dtype=np.float32)
        mix[:, 0] = 1
        kept = []
        for number, layer in enumerate(self.layers):
            if given is not None and number > 0:
                stream, mix = given[f"L{number - 1}.stream_out"], given[f"L{number - 1}.pre_mix_out"]
            stream = self._engram(number, stream, step)
            if given is not None and number in self.plans:
                stream = given[f"L{number}.engram_out"]
            if number in c["dspark_target_layer_ids"]:
                kept.append(store(stream.mean(axis=1, dtype=np.float64), self.mode))
            stream, mix = layer.run(stream, mix, step, state)
        record("main_hidden", np.concatenate(kept, axis=1))
        hidden = hc.collapse(stream, mix, self.mode)
        record("final_norm_out", rms_norm(hidden, w.values("norm.weight"), self.eps, self.mode))
        return head.logits(hidden, w.values("norm.weight"), w.values("head.weight"), self.eps, self.mode)

    def _engram(self, number: int, stream: F32, step: Step) -> F32:
        """The stream after the layer's Engram, or as it is when the layer has none."""
        if number not in self.plans:
            return stream
        w, name = self.weights, f"layers.{number}.engram"
        pad = int(self.token_map[self.config["engram_pad_token_id"]])
        rows = engram.hash_rows(self.token_map[step.ids], self.plans[number], pad)[step.positions]
        step.record(f"L{number}.engram_hash_ids", rows)
        read = self.tables[number][rows].reshape(len(rows), -1)
        q_weight, k_weight = w.values(f"{name}.q_weight"), w.values(f"{name}.k_weight")
        out = engram.engram(stream, read, w.weight(f"{name}.wkv"), q_weight, k_weight, self.eps, self.mode)
        step.record(f"L{number}.engram_out", out)
        return out


class Layer:
    """One layer: attention and experts, each between a collapse and an expansion."""

    def __init__(self, model: Model, number: int) -> None:
        self.model, self.number = model, number
        c, w = model.config, model.weights
        self.config, self.weights, self.eps = c, w, model.eps
        self.name = f"layers.{number}"
        self.ratio = int(c["compress_ratios"][number])
        self.freq = model.yarn_freq if self.ratio else model.plain_freq
        ffn = f"{self.name}.ffn"
        self.experts = [w.expert(f"{ffn}.experts.{i}") for i in range(c["n_routed_experts"])]
        self.shared = w.expert(f"{ffn}.shared_experts")

    def run(self, stream: F32, mix: F32, step: Step, state: State) -> tuple[F32, F32]:
        """Stream [n, C, D] and mix [n, C] -> those of the next layer; `mix` comes from the layer before."""
        mode = step.mode
        a = self._coefficients("attn", stream, step)
        x = self._sub_layer_input("attn", stream, mix, step)
        y = self.attention(x, step, state)
        self._record(step, "attn_out", y)
        stream = hc.expand(y, stream, a.post, a.comb, mode)
        f = self._coefficients("ffn", stream, step)
        x = self._sub_layer_input("ffn", stream, a.pre, step)
        y = self.feed_forward(x, step)
        self._record(step, "ffn_out", y)
        stream = hc.expand(y, stream, f.post, f.comb, mode)
        self._record(step, "stream_out", stream)
        self._record(step, "pre_mix_out", f.pre)
        return stream, f.pre

    def _record(self, step: Step, name: str, value: np.ndarray) -> None:
        step.record(f"L{self.number}.{name}", value)

    def _coefficients(self, part: str, stream: F32, step: Step) -> hc.Coefficients:
        fn, scale, base = (self.weights.values(f"{self.name}.hc_{part}_{s}") for s in ("fn", "scale", "base"))
        c = self.config
        got = hc.coefficients(
            stream, fn, scale, base, eps=self.eps, iterations=c["hc_sinkhorn_iters"], hc_eps=c["hc_eps"]
        )
        for key, value in got._asdict().items():
            self._record(step, f"hc_{part}_{key}", value)
        return got

    def _sub_layer_input(self, part: str, stream: F32, mix: F32, step: Step) -> F32:
        weight = self.weights.values(f"{self.name}.{part}_norm.weight")
        x = rms_norm(hc.collapse(stream, mix, step.mode), weight, self.eps, step.mode)
        self._record(step, f"{part}_in", x)
        return x

    def feed_forward(self, x: F32, step: Step) -> F32:
        """Router and experts: x [n, D] -> [n, D]."""
        c, w, gate = self.config, self.weights, f"{self.name}.ffn.gate"
        weight, bias = w.values(f"{gate}.weight"), w.values(f"{gate}.bias")
        chosen, routing = moe.route(x, weight, bias, c["num_experts_per_tok"], c["routed_scaling_factor"])
        self._record(step, "router_indices", chosen)
        self._record(step, "router_weights", routing)
        return moe.moe(x, chosen, routing, self.experts, self.shared, c["swiglu_limit"], step.mode)

    def attention(self, x: F32, step: Step, state: State) -> F32:
        """Window and selected compressed rows: x [n, D] -> [n, D]."""
        c, w, mode, own = self.config, self.weights, step.mode, state.layers[self.number]
        attn = f"{self.name}.attn"
        turn = rope.angles(step.positions, self.freq)
        q_latent = linear(x, w.weight(f"{attn}.wq_a"), mode)
        q_latent = rms_norm(q_latent, w.values(f"{attn}.q_norm.weight"), self.eps, mode)
        q = linear(q_latent, w.weight(f"{attn}.wq_b"), mode).reshape(len(x), c["num_attention_heads"], -1)
        q = rope.rotate_tail(q, *turn, mode)
        row = linear(x, w.weight(f"{attn}.wkv"), mode)
        row = rms_norm(row, w.values(f"{attn}.kv_norm.weight"), self.eps, mode)
        row = quantise_q8(rope.rotate_tail(row, *turn, mode)).values
        own.window = np.concatenate([own.window, row])
        rows, kv = window_rows(step.positions, c["sliding_window"]), own.window
        if self.ratio:
            selected = self._selection(x, q_latent, turn, step, state)
            shifted = np.where(selected < 0, -1, selected + len(kv))
            rows = np.concatenate([rows, shifted], axis=1)
            kv = np.concatenate([kv, state.layers[step.source].compressed])
        scale = c["head_dim"] ** -0.5
        out = attend.attend(q, kv, rows, w.values(f"{attn}.attn_sink"), scale, mode)
        self._record(step, "attn_q", q)
        self._record(step, "attn_o", out)
        out = rope.rotate_tail(out, *turn, mode, inverse=True).reshape(len(x), -1)
        out = grouped_linear(out, w.weight(f"{attn}.wo_a"), c["o_groups"], mode)
        return linear(out, w.weight(f"{attn}.wo_b"), mode)

    def _selection(self, x: F32, q_latent: F32, turn: Rope, step: Step, state: State) -> NDArray[np.int32]:
        """Entries [n, k] of the newest source that these rows read; made here or taken over from an earlier layer."""
        if self.number in self.config["kv_source_layer_ids"]:
            step.source = self.number
            self._compress(x, step, state.layers[self.number])
        if self.number in self.config["index_source_layer_ids"]:
            step.selected = self._select(x, q_latent, turn, step, state.layers[step.source])
        assert step.selected is not None, "a ratio layer comes after the first index source"
        return step.selected

    def _compress(self, x: F32, step: Step, own: LayerState) -> None:
        """Add the entries that these rows complete, and their index keys."""
        w, mode, comp = self.weights, step.mode, f"{self.name}.attn.compressor"
        norm = w.values(f"{comp}.norm.weight")
        if self.ratio == 1:
            latent = compress.latent_ratio1(x, w.weight(f"{comp}.wkv"), norm, self.eps, mode)
        else:
            values, gates = compress.pool_inputs(x, w.weight(f"{comp}.wkv"), w.weight(f"{comp}.wgate"))
            values = np.concatenate([own.open_values, values])
            gates = np.concatenate([own.open_gates, gates])
            whole = len(values) // self.ratio * self.ratio
            groups = [v[:whole].reshape(-1, self.ratio, v.shape[1]) for v in (values, gates)]
            latent = compress.pool(groups[0], groups[1], norm, self.eps, mode)
            own.open_values, own.open_gates = values[whole:], gates[whole:]
        entries = np.arange(len(own.compressed), len(own.compressed) + len(latent))
        turn = rope.angles(entries * self.ratio, self.freq)
        indexer = f"{self.name}.attn.indexer"
        k_norm = w.values(f"{indexer}.k_norm.weight")
        keys = index.index_keys(latent, w.weight(f"{indexer}.wk"), k_norm, *turn, self.eps, mode)
        own.keys = np.concatenate([own.keys, keys])
        own.compressed = np.concatenate([own.compressed, compress.compressed_rows(latent, *turn, mode)])
        self._record(step, "index_k", own.keys)
        self._record(step, "compress_kv", own.compressed)

    def _select(self, x: F32, q_latent: F32, turn: Rope, step: Step, source: LayerState) -> NDArray[np.int32]:
        """Score the source's keys and choose the best visible entries, within the candidates where there are some."""
        c, w, mode, indexer = self.config, self.weights, step.mode, f"{self.name}.attn.indexer"
        heads, dim = c["index_n_heads"], c["index_head_dim"]
        q = index.index_queries(q_latent, w.weight(f"{indexer}.wq_b"), heads, *turn, mode)
        weights = index.head_weights(x, w.weight(f"{indexer}.weights_proj"), heads, dim, mode)
        visible = (step.positions + 1) // self.ratio
        scores = index.mask_invisible(index.index_scores(q, source.keys, weights, mode), visible)
        for name, value in (("q", q), ("weights", weights), ("scores", scores)):
            self._record(step, f"index_{name}", value)
        if self.number == c["candidate_source_layer_id"]:
            blocks, size = c["candidate_topk_blocks"], c["candidate_block_size"]
            step.candidates = select.candidate_mask(scores, visible, blocks, size)
            self._record(step, "candidate_mask", step.candidates)
        elif step.candidates is not None:
            scores = f32(np.where(step.candidates, scores, -np.inf))
        selected = select.top_k(scores, c["index_topk"])
        self._record(step, "selected", selected)
        return selected


def window_rows(positions: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """Positions max(0, p - window + 1)..p of each query p, filled up with -1: [n, window]."""
    rows = np.maximum(positions - window + 1, 0)[:, None] + np.arange(window)
    return np.where(rows > positions[:, None], -1, rows)
