"""The one tensor table: every tensor a checkpoint may hold, with its shape as a formula of the configuration.

All readers and writers use it, for both dialects. A name is the official one (`layers.3.attn.wq_a.weight`); beside it
stands the name that the GGUF dialect uses. The order is the GGUF writing order: globals, then layer by layer, and the
Engram tables last, so that they can stay outside of the mapped part of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..errors import OptionError
from .config import ModelConfig

GROUP = 32
"""Edge of an fp8 weight block; run of elements that share a scale in an fp4 row or an Engram row."""

PARTS = ("main", "drafter", "engram", "vision")

_PLAIN = frozenset({"BF16", "F16", "F32"})
# Official storage types by role; roles that are not listed take plain floats only.
_TYPES: dict[str, frozenset[str]] = {
    "linear": _PLAIN | {"F8_E4M3"},
    "shared": _PLAIN | {"F8_E4M3"},
    "grouped": _PLAIN | {"F8_E4M3"},
    "expert": _PLAIN | {"I8"},
    "engram_table": frozenset({"F8_E4M3"}),
}
_SCALES = {
    "linear": "block32x32",
    "shared": "block32x32",
    "grouped": "block32x32",
    "expert": "row32",
    "engram_table": "row32",
}
ROLES = frozenset(
    {
        "embed",  # vocabulary row table
        "head",  # vocabulary projection, f32 arithmetic
        "norm",  # RMSNorm weight, also the two Engram norms
        "hc",  # hyper-connection mixer: fn, base, scale
        "sink",  # attention sink logits
        "linear",  # may be fp8 with a scale per block; its input is then quantised
        "shared",  # shared expert, otherwise as linear
        "grouped",  # wo_a: o_groups matrices below each other; fp8 expands to bf16, input not quantised
        "dense",  # compressor, index keys and head weights, draft heads: never quantised
        "router",  # scores of the experts, f32 arithmetic
        "router_bias",
        "expert",  # routed expert; fp4 packs two codes a byte
        "engram_table",  # rows on disk, never mapped
        "vision",
    }
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor must look like. `shape` is logical, [rows, columns], whatever the storage packs."""

    name: str
    gguf_name: str
    shape: tuple[int, ...]
    role: str
    types: frozenset[str]
    """Official storage types allowed."""
    scale: str
    """What scale tensor accompanies the quantised types: "none", "block32x32" or "row32"."""
    part: str
    optional: bool = False

    def storage_shape(self, dtype: str) -> tuple[int, ...]:
        """Shape in the file: fp4 codes in I8 halve the last axis."""
        if dtype == "I8" and "I8" in self.types:
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape

    def needs_scale(self, dtype: str) -> bool:
        """Does a tensor stored as `dtype` come with a scale tensor beside it?"""
        return self.scale != "none" and dtype in ("F8_E4M3", "I8")

    @property
    def scale_name(self) -> str:
        """Official name of the scale tensor (`...wq_a.scale` beside `...wq_a.weight`)."""
        return self.name.removesuffix(".weight") + ".scale"

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scale tensor (F8_E8M0); blocks at the edges may be ragged."""
        if self.scale == "none":
            raise ValueError(f"{self.name} has no scale")
        *outer, rows, columns = self.shape
        rows = -(-rows // GROUP) if self.scale == "block32x32" else rows
        return (*outer, rows, -(-columns // GROUP))

    @property
    def n_elements(self) -> int:
        """Logical elements."""
        return prod(self.shape)


def tensor_table(config: ModelConfig, parts: Sequence[str] = ("main",)) -> list[TensorSpec]:
    """Every tensor of the given parts, routed experts one by one as the official files hold them.

    Parts: "main" (embedding, head, layers), "drafter" (`mtp.*`), "engram" (the row tables alone) and "vision" (image
    tower, aligner, span vectors). The router's image bias `gate.bias_vl` belongs to main and drafter and is optional.
    """
    return [expert for spec in stacked_table(config, parts) for expert in _unstack(spec)]


def stacked_table(config: ModelConfig, parts: Sequence[str] = ("main",)) -> list[TensorSpec]:
    """As `tensor_table`, with the routed experts of a layer and role as one tensor [n_experts, rows, columns].

    A stacked name has no expert number: `layers.3.ffn.experts.w1.weight`. The GGUF dialect stores them so.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise OptionError(f"unknown parts {unknown} of a checkpoint: choose from {', '.join(PARTS)}")
    table: list[TensorSpec] = []
    if "main" in parts:
        table += _main(config)
    if "drafter" in parts:
        for stage in range(config.num_nextn_predict_layers):
            table += _draft_stage(config, stage)
    if "vision" in parts:
        table += _vision(config)
    if "engram" in parts:
        table += _engram_tables(config)
    return table


def official_names(config: ModelConfig, types: str | None = None) -> list[str]:
    """Every name that a complete official folder holds, scales included.

    `types` is "quantised" or "plain" (bf16 weights; only the Engram tables have scales); by default what the
    configuration says. Image biases of the router are there only with an image tower.
    """
    quantised = config.quant_method is not None if types is None else types == "quantised"
    names: list[str] = []
    for spec in tensor_table(config, PARTS):
        if spec.optional and not config.vision_layers:
            continue
        names.append(spec.name)
        if spec.scale != "none" and (quantised or spec.role == "engram_table"):
            names.append(spec.scale_name)
    return names


def is_stacked(spec: TensorSpec) -> bool:
    """Is this the one tensor of all routed experts of a layer and role?"""
    return spec.role == "expert" and len(spec.shape) == 3


def expert_specs(stacked: TensorSpec) -> list[TensorSpec]:
    """The official tensors that a stacked one is made of, in expert order."""
    return list(_unstack(stacked))


def _unstack(spec: TensorSpec) -> Iterator[TensorSpec]:
    if not is_stacked(spec):
        yield spec
        return
    prefix, suffix = spec.name.split("experts.")
    for i_expert in range(spec.shape[0]):
        yield replace(spec, name=f"{prefix}experts.{i_expert}.{suffix}", shape=spec.shape[1:])


class _Scope:
    """Makes specs of one part under one pair of name prefixes."""

    def __init__(self, part: str, official: str = "", gguf: str = "") -> None:
        self._part, self._official, self._gguf = part, official, gguf

    def __call__(self, name: str, gguf_name: str, role: str, *shape: int, optional: bool = False) -> TensorSpec:
        return TensorSpec(
            name=self._official + name,
            gguf_name=self._gguf + gguf_name,
            shape=shape,
            role=role,
            types=_TYPES.get(role, _PLAIN),
            scale=_SCALES.get(role, "none"),
            part=self._part,
            optional=optional,
        )


def _main(config: ModelConfig) -> Iterable[TensorSpec]:
    t = _Scope("main")
    yield t("embed.weight", "token_embd.weight", "embed", config.vocab_size, config.hidden_size)
    yield t("norm.weight", "output_norm.weight", "norm", config.hidden_size)
    yield t("head.weight", "output.weight", "head", config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        scope = _Scope("main", f"layers.{layer}.", f"blk.{layer}.")
        yield from _mixers_and_attention(config, scope)
        if layer in config.kv_source_layer_ids:
            yield from _compressor(config, scope, gated=config.compress_ratios[layer] > 1)
        if layer in config.index_source_layer_ids:
            yield from _index_queries(config, scope)
        yield from _moe(config, scope, config.n_routed_experts)
        if layer in config.engram_layer_ids:
            yield from _engram_layer(config, scope)


def _mixers_and_attention(config: ModelConfig, t: _Scope) -> Iterator[TensorSpec]:
    dim, copies, mix = config.hidden_size, config.hc_mult, config.hc_mix_rows
    for half in ("attn", "ffn"):
        yield t(f"hc_{half}_fn", f"hc_{half}_fn.weight", "hc", mix, copies * dim)
        yield t(f"hc_{half}_base", f"hc_{half}_base.weight", "hc", mix)
        yield t(f"hc_{half}_scale", f"hc_{half}_scale.weight", "hc", 3)
    yield t("attn_norm.weight", "attn_norm.weight", "norm", dim)
    yield t("ffn_norm.weight", "ffn_norm.weight", "norm", dim)
    yield t("attn.attn_sink", "attn_sinks.weight", "sink", config.num_attention_heads)
    yield t("attn.wq_a.weight", "attn_q_a.weight", "linear", config.q_lora_rank, dim)
    yield t("attn.wq_b.weight", "attn_q_b.weight", "linear", config.q_dim, config.q_lora_rank)
    yield t("attn.q_norm.weight", "attn_q_a_norm.weight", "norm", config.q_lora_rank)
    yield t("attn.wkv.weight", "attn_kv.weight", "linear", config.head_dim, dim)
    yield t("attn.kv_norm.weight", "attn_kv_a_norm.weight", "norm", config.head_dim)
    low, groups = config.o_groups * config.o_lora_rank, config.o_groups
    yield t("attn.wo_a.weight", "attn_output_a.weight", "grouped", low, config.q_dim // groups)
    yield t("attn.wo_b.weight", "attn_output_b.weight", "linear", dim, low)


def _compressor(config: ModelConfig, t: _Scope, *, gated: bool) -> Iterator[TensorSpec]:
    dim, head, index = config.hidden_size, config.head_dim, config.index_head_dim
    yield t("attn.compressor.wkv.weight", "attn_compressor_kv.weight", "dense", head, dim)
    yield t("attn.compressor.norm.weight", "attn_compressor_norm.weight", "norm", head)
    yield t("attn.indexer.wk.weight", "indexer.attn_k.weight", "dense", index, head)
    yield t("attn.indexer.k_norm.weight", "indexer.k_norm.weight", "norm", index)
    if gated:
        yield t("attn.compressor.wgate.weight", "attn_compressor_gate.weight", "dense", head, dim)


def _index_queries(config: ModelConfig, t: _Scope) -> Iterator[TensorSpec]:
    heads = config.index_n_heads
    width = heads * config.index_head_dim
    yield t("attn.indexer.wq_b.weight", "indexer.attn_q_b.weight", "linear", width, config.q_lora_rank)
    yield t("attn.indexer.weights_proj.weight", "indexer.proj.weight", "dense", heads, config.hidden_size)


def _moe(config: ModelConfig, t: _Scope, n_experts: int) -> Iterator[TensorSpec]:
    dim, inner = config.hidden_size, config.moe_intermediate_size
    yield t("ffn.gate.weight", "ffn_gate_inp.weight", "router", n_experts, dim)
    yield t("ffn.gate.bias", "exp_probs_b.bias", "router_bias", n_experts)
    yield t("ffn.gate.bias_vl", "exp_probs_b_vl.bias", "router_bias", n_experts, optional=True)
    for w, gguf, rows, columns in (("w1", "gate", inner, dim), ("w3", "up", inner, dim), ("w2", "down", dim, inner)):
        yield t(f"ffn.shared_experts.{w}.weight", f"ffn_{gguf}_shexp.weight", "shared", rows, columns)
        yield t(f"ffn.experts.{w}.weight", f"ffn_{gguf}_exps.weight", "expert", n_experts, rows, columns)


def _engram_layer(config: ModelConfig, t: _Scope) -> Iterator[TensorSpec]:
    dim, copies = config.hidden_size, config.hc_mult
    yield t("engram.q_weight", "engram_q_norm.weight", "norm", copies, dim)
    yield t("engram.k_weight", "engram_k_norm.weight", "norm", copies, dim)
    yield t("engram.wkv.weight", "engram_kv.weight", "linear", (copies + 1) * dim, config.engram_in_dim)


def _engram_tables(config: ModelConfig) -> Iterator[TensorSpec]:
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        t = _Scope("engram", f"layers.{layer}.", f"blk.{layer}.")
        yield t("engram.embed.weight", "engram_embd.weight", "engram_table", rows, config.engram_head_dim)


def _draft_stage(config: ModelConfig, stage: int) -> Iterator[TensorSpec]:
    """The first stage owns the projection of the target's hidden rows, the last one the norm and both heads."""
    t = _Scope("drafter", f"mtp.{stage}.", f"mtp.{stage}.")
    dim, rank, vocab = config.hidden_size, config.dspark_markov_rank, config.vocab_size
    yield from _mixers_and_attention(config, t)
    yield from _moe(config, t, config.dspark_n_routed_experts)
    if stage == 0:
        hidden = len(config.dspark_target_layer_ids) * dim
        yield t("main_proj.weight", "main_proj.weight", "linear", dim, hidden)
        yield t("main_norm.weight", "main_norm.weight", "norm", dim)
    if stage == config.num_nextn_predict_layers - 1:
        yield t("norm.weight", "norm.weight", "norm", dim)
        yield t("markov_head.embed.weight", "markov_head.markov_w1.weight", "dense", vocab, rank)
        yield t("markov_head.head.weight", "markov_head.markov_w2.weight", "dense", vocab, rank)
        yield t("confidence_head.proj.weight", "confidence_head.proj.weight", "dense", 1, dim + rank)


def _vision(config: ModelConfig) -> Iterator[TensorSpec]:
    """Image tower, aligner and span vectors; both dialects use the same names. Nothing without an image tower."""
    if not config.vision_layers:
        return
    dim, inner, out = config.vision_hidden_size, config.vision_intermediate_size, config.hidden_size
    patch, cell = 3 * config.vision_patch_size**2, config.vision_downsample_ratio**2
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (dim, patch),
        "vision.patch_embed.proj.bias": (dim,),
        "vision.norm.weight": (dim,),
    }
    for block in range(config.vision_layers):
        shapes |= {
            f"vision.blocks.{block}.{name}": shape
            for name, shape in {
                "norm1.weight": (dim,),
                "attn.wqkv.weight": (3 * dim, dim),
                "attn.wqkv.bias": (3 * dim,),
                "attn.wo.weight": (dim, dim),
                "attn.wo.bias": (dim,),
                "norm2.weight": (dim,),
                "mlp.w1.weight": (2 * inner, dim),
                "mlp.w2.weight": (dim, inner),
            }.items()
        }
    shapes |= {
        "aligner.w1.weight": (out, cell * dim),
        "aligner.w1.bias": (out,),
        "aligner.w2.weight": (out, out),
        "aligner.w2.bias": (out,),
        "image_start": (out,),
        "image_newline": (out,),
        "image_end": (out,),
    }
    t = _Scope("vision")
    for name, shape in shapes.items():
        yield t(name, name, "vision", *shape)
