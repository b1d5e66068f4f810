"""A model small enough for thousands of steps, with every part that a state depends on, and long contexts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from numpy.typing import NDArray

import ds4v41
from ds4v41.checkpoint import open_checkpoint
from ds4v41.history import classes_of
from ds4v41.memory import weight_bytes
from ds4v41.synth import tiny_config, write_official
from ds4v41.weights import build, default_activations

WINDOW, LAYERS = 8, 5
DECODER = 2  # layers from the last source on
CONE = LAYERS * (WINDOW - 1) + 1  # tokens that a replay runs at most, beside the slack (retain, at most 256)

SHAPE = dict(  # noqa: C408
    vocab_size=320, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
    head_dim=32, qk_rope_head_dim=16, q_lora_rank=32, o_lora_rank=32, o_groups=2, max_position_embeddings=1 << 17,
    sliding_window=WINDOW, n_routed_experts=4, num_experts_per_tok=2, compress_ratios=(0, 2, 2, 1, 1),
    kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 2, 3, 4), index_n_heads=2, index_head_dim=32, index_topk=8,
    candidate_source_layer_id=3, candidate_topk_blocks=4, candidate_block_size=4, engram_layer_ids=(1, 3),
    engram_vocab_size=200, num_nextn_predict_layers=0, dspark_target_layer_ids=(),
)  # fmt: skip


@cache
def folder(seed: int = 1) -> Path:
    path = Path(mkdtemp(prefix="ds4v41-test-")) / f"model{seed}"
    write_official(path, tiny_config(**SHAPE), seed=seed)
    return path


@cache
def model(seed: int = 1, matrix: bool = False) -> ds4v41.Model:
    """matrix: prompts are of the matrix class, emulated where the processor has no instruction for it."""
    if not matrix:
        return ds4v41.Model.open(folder(seed), threads=1)
    checkpoint = open_checkpoint(folder(seed), parts=("main", "engram"))
    activations = default_activations(checkpoint.config, checkpoint.dialect)
    ext = build(checkpoint, activations, "auto", 1)
    return ds4v41.Model(checkpoint, ext, activations, weight_bytes(checkpoint)[0], None, matrix=True)


def session(
    retain: int = 24, chunk: int = 16, context: int = 4096, matrix: bool = False, **options: object
) -> ds4v41.Session:
    return model(matrix=matrix).session(context, retain=retain, chunk=chunk, **options)


def tokens(n: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(5, 320, n).astype(np.int32)


class Reference:
    """What an uninterrupted session gives: logits and live state after any history, remembered."""

    def __init__(self, most: int = 4096, matrix: bool = False) -> None:
        self._session = session(retain=0, chunk=64, context=most, matrix=matrix, decoder="all")
        self._known: dict[bytes, tuple[NDArray[np.float32], bytes]] = {}

    def after(self, history: NDArray[np.int32]) -> tuple[NDArray[np.float32], bytes]:
        key = history.astype("<i4").tobytes()
        if key not in self._known:
            ext = self._session._ext
            ext.truncate(0)
            row = np.zeros((1, 0), np.float32)
            ids, of_matrix = classes_of(history)
            ends = [*(np.flatnonzero(of_matrix[1:] != of_matrix[:-1]) + 1).tolist(), len(ids)]
            at = 0
            while at < len(ids):
                end = min(at + 64, next(e for e in ends if e > at))
                row = np.asarray(ext.run(ids[at:end], "last", matrix=bool(of_matrix[at])))
                at = end
            self._known[key] = (row[0], bytes(ext.live_bytes()))
        return self._known[key]


@cache
def reference(matrix: bool = False) -> Reference:
    return Reference(matrix=matrix)
