"""From an opened checkpoint to the extension's model: every tensor of the table finds its slot.

Matrices are handed over as they lie in the mapped file; only short vectors are expanded to float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _ext
from .checkpoint import Checkpoint, ModelConfig, Tensor, TensorSpec, tensor_table
from .errors import CheckpointError

_PLAIN = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_BLOCKS = {"Q8_0": "q8_0", "Q4_K": "q4_k", "MXFP4": "mxfp4", "Q2_K": "q2_k", "IQ2_XXS": "iq2_xxs"}
_VECTOR_ROLES = frozenset({"norm", "sink", "router_bias"})
_VECTOR_ENDINGS = ("_base", "_scale")


def is_vector(spec: TensorSpec) -> bool:
    """A short one, which is expanded to float32 when a model is opened."""
    return spec.role in _VECTOR_ROLES or spec.name.endswith(_VECTOR_ENDINGS)


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """The sizes that the extension wants, by its own names (`csrc/engine/shape.h`)."""
    layers = range(config.num_hidden_layers)
    sources = list(config.kv_source_layer_ids)
    kv_sources = [config.kv_source_of(layer) for layer in layers]
    index_sources = [config.index_source_of(layer) for layer in layers]
    engram = {layer: i for i, layer in enumerate(config.engram_layer_ids)}
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "rope_dim": config.qk_rope_head_dim,
        "q_rank": config.q_lora_rank,
        "o_rank": config.o_lora_rank,
        "o_groups": config.o_groups,
        "n_experts": config.n_routed_experts,
        "top_k": config.num_experts_per_tok,
        "expert_dim": config.moe_intermediate_size,
        "route_scale": config.routed_scaling_factor,
        "swiglu_limit": config.swiglu_limit,
        "norm_eps": config.rms_norm_eps,
        "window": config.sliding_window,
        "index_heads": config.index_n_heads,
        "index_dim": config.index_head_dim,
        "index_topk": config.index_topk,
        "candidate_source": -1 if config.candidate_source_layer_id is None else config.candidate_source_layer_id,
        "candidate_blocks": config.candidate_topk_blocks,
        "candidate_block_size": config.candidate_block_size,
        "n_streams": config.hc_mult,
        "sinkhorn_iters": config.hc_sinkhorn_iters,
        "hc_eps": config.hc_eps,
        "engram_columns": config.n_engram_columns,
        "engram_dim": config.engram_head_dim,
        "max_context": config.max_position_embeddings,
        "rope_base": config.rope_theta,
        "compress_rope_base": config.compress_rope_theta,
        "yarn_factor": config.rope_scaling_factor,
        "yarn_beta_fast": config.rope_scaling_beta_fast,
        "yarn_beta_slow": config.rope_scaling_beta_slow,
        "yarn_original": float(config.rope_scaling_original_max_position_embeddings),
        "ratio": list(config.compress_ratios),
        "kv_source": [-1 if source is None else sources.index(source) for source in kv_sources],
        "index_source": [-1 if source is None else source for source in index_sources],
        "engram_index": [engram.get(layer, -1) for layer in layers],
        "source_layer": sources,
    }


def default_activations(config: ModelConfig, dialect: str) -> str:
    """fp8 for an official fp8/fp4 checkpoint (what its reference does), bf16 for everything else."""
    return "fp8" if dialect == "official" and config.quant_method == "fp8" else "bf16"


def expand(tensor: Tensor) -> NDArray[np.float32]:
    """A plain float tensor as float32, flat."""
    raw = tensor.view()
    if tensor.dtype == "F32":
        return np.frombuffer(raw.tobytes(), dtype="<f4").astype(np.float32)
    if tensor.dtype == "F16":
        return np.frombuffer(raw.tobytes(), dtype="<f2").astype(np.float32)
    if tensor.dtype == "BF16":
        return (np.frombuffer(raw.tobytes(), dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    raise CheckpointError(f"{tensor.file}: {tensor.name} is stored as {tensor.dtype}; expected BF16, F16 or F32")


def build(
    checkpoint: Checkpoint, activations: str, isa: str, threads: int, engram: _ext.Engram | None = None
) -> _ext.Model:
    """Make the extension's model; without `engram` the tables of the checkpoint are opened with default options.

    Raises CheckpointError when a tensor has a format that the engine does not have."""
    config = checkpoint.config
    builder = _ext.ModelBuilder(shape_of(config), activations)
    for spec in tensor_table(config):
        _place(builder, checkpoint, spec)
    from .engram import EngramOptions, hash_of, open_engram  # which needs the memory plan, which needs this module

    engram = open_engram(checkpoint, EngramOptions()) if engram is None else engram
    if engram is not None:
        builder.hash(hash_of(checkpoint))
        builder.engram(engram)
    model = builder.build(isa, threads)
    _ext.give_back_memory()  # what reading headers and the tokenizer took
    return model


def build_drafter(checkpoint: Checkpoint, target: _ext.Model) -> _ext.Drafter:
    """Make the extension's drafter for `target`. `checkpoint` holds the `mtp.*` tensors, in either dialect."""
    config = checkpoint.config
    builder = _ext.DrafterBuilder(
        target,
        block=config.dspark_block_size,
        noise=config.dspark_noise_token_id,
        markov_rank=config.dspark_markov_rank,
        target_layers=list(config.dspark_target_layer_ids),
        n_stages=config.num_nextn_predict_layers,
        n_experts=config.dspark_n_routed_experts,
        top_k=config.dspark_num_experts_per_tok,
    )
    for spec in tensor_table(config, ("drafter",)):
        _place(builder, checkpoint, spec)
    return builder.build()


def _place(builder: _ext.ModelBuilder | _ext.DrafterBuilder, checkpoint: Checkpoint, spec: TensorSpec) -> None:
    tensors = checkpoint.tensors
    tensor = tensors.get(spec.name)
    stacked, expert = _stacked(tensors, spec) if tensor is None else (None, 0)
    if tensor is None and stacked is None:
        if spec.optional:
            return
        raise CheckpointError(f"{checkpoint.path}: the tensor {spec.name} is missing")
    if spec.name.endswith("gate.bias_vl"):
        return  # image positions only
    source = tensor if tensor is not None else stacked
    assert source is not None
    if is_vector(spec):
        builder.vector(spec.name, expand(source))
        return
    data = source.view()
    if stacked is not None:
        data = _expert_part(data, stacked.shape[0], expert)
    scale = None
    if spec.needs_scale(source.dtype) and source.dtype not in _BLOCKS:
        scale = tensors[spec.scale_name].view()
        builder.keep(scale)
    builder.keep(data)
    rows, cols = spec.shape
    builder.matrix(spec.name, _row_format(source, spec), rows, cols, data, scale)


def _stacked(tensors: dict[str, Tensor], spec: TensorSpec) -> tuple[Tensor | None, int]:
    """The stacked tensor that holds this expert (GGUF), and the expert's number."""
    head, found, tail = spec.name.partition(".experts.")
    if not found:
        return None, 0
    number, _, role = tail.partition(".")
    return tensors.get(f"{head}.experts.{role}"), int(number)


def _expert_part(data: NDArray[np.uint8], n_experts: int, expert: int) -> NDArray[np.uint8]:
    size = data.shape[0] // n_experts
    return data[expert * size : (expert + 1) * size]


def _row_format(tensor: Tensor, spec: TensorSpec) -> str:
    if tensor.dtype in _PLAIN:
        return _PLAIN[tensor.dtype]
    if tensor.dtype in _BLOCKS:
        return _BLOCKS[tensor.dtype]
    if tensor.dtype == "F8_E4M3":
        return "fp8_block" if spec.scale == "block32x32" else "fp8_row"
    if tensor.dtype == "I8":
        return "fp4_row"
    raise CheckpointError(f"{tensor.file}: {tensor.name}: the engine has no row format {tensor.dtype}")
