"""Drafter: the DSpark weights that belong to a model, from the model's own folder or from a file of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from . import _ext
from .admission import KnownCosts
from .checkpoint import Checkpoint, ModelConfig
from .checkpoint.gguf_drafter import open_drafter
from .checkpoint.lineage import lineage
from .checkpoint.safetensors import open_folder
from .checks import path_of
from .errors import CheckpointError, StateError
from .machine import human
from .weights import build_drafter

if TYPE_CHECKING:
    from .model import Model

# What a drafter takes over from its target: two checkpoints that differ here do not belong together.
_SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "moe_intermediate_size", "num_attention_heads", "head_dim",
    "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "sliding_window", "hc_mult", "rope_theta",
    "num_nextn_predict_layers", "dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids",
    "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok",
)  # fmt: skip


class Drafter:
    """The drafter of one model. Make it with `Drafter.open`, give it to `Model.session(drafter=)`.

    It guesses tokens that the model then checks several at a time; it never changes which tokens come out (E2).
    """

    def __init__(self, model: Model, checkpoint: Checkpoint, ext: _ext.Drafter) -> None:
        self._model, self._checkpoint, self._ext = model, checkpoint, ext
        self.costs = KnownCosts()

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None, model: Model) -> Self:
        """Open the drafter of `model`.

        path: a DSpark GGUF file, an official folder, or None for the `mtp` tensors of the model's own folder.
        Raises CheckpointError with every problem found: tensors that are missing or have another shape, and numbers
        that differ from the model's.
        """
        where = None if path is None else path_of("drafter", path)
        config = model.config
        if not config.num_nextn_predict_layers:
            raise CheckpointError(f"{model.path}: this model's configuration has no drafter (no mtp stages)")
        checkpoint = _own(model) if where is None else _other(where, config)
        _check_lineage(checkpoint, model)
        return cls(model, checkpoint, build_drafter(checkpoint, model._handle()))

    @property
    def model(self) -> Model:
        """The model it drafts for."""
        return self._model

    @property
    def path(self) -> Path:
        """Where it was opened from."""
        return self._checkpoint.path

    @property
    def block_size(self) -> int:
        """Most drafts of one cycle."""
        return int(self._ext.block)

    @property
    def n_stages(self) -> int:
        """Layers of the drafter."""
        return int(self._ext.n_stages)

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights, beside the model's."""
        return sum(t.nbytes for name, t in self._checkpoint.tensors.items() if name.startswith("mtp."))

    @property
    def session_bytes(self) -> int:
        """Activations and captured rows of one session, beside its windows."""
        return int(self._ext.session_bytes)

    @property
    def working_bytes(self) -> int:
        """What the drafter's operations take in one session beside them, at most."""
        return int(self._ext.working_bytes)

    def _handle(self) -> _ext.Drafter:
        self._model._handle()  # refuses a closed model
        return self._ext

    def check_for(self, model: Model) -> None:
        """Raises StateError unless this drafter was opened for `model`."""
        if self._model is not model:
            raise StateError(f"this drafter was opened for another model ({self._model!r}); open it for this one")

    def __repr__(self) -> str:
        return (
            f"<Drafter of {self._model.path.name}: {self.n_stages} stages, block {self.block_size}, "
            f"{human(self.weight_bytes)}>"
        )


def _check_lineage(drafter: Checkpoint, model: Model) -> None:
    """CheckpointError when both say which weights they were made from, and it is not the same."""
    made_with = drafter.target_lineage
    if made_with is None:
        return
    own = lineage(model.config, model.checkpoint.tensors)
    if own is not None and own != made_with:
        raise CheckpointError(
            f"{drafter.path}: this drafter was made with other weights ({made_with[:12]}) than {model.path} "
            f"({own[:12]}): its guesses would seldom hold. Use the drafter of this model: `ds4v41 convert drafter "
            "OFFICIAL_DIR OUT.gguf` makes one from the folder that the model was made from"
        )


def _own(model: Model) -> Checkpoint:
    if model.checkpoint.dialect != "official":
        raise CheckpointError(
            f"{model.path}: a GGUF model does not hold its drafter; give the path of the DSpark GGUF file that was "
            "made with it (`ds4v41 convert drafter OFFICIAL_DIR OUT.gguf` makes one)"
        )
    return open_folder(model.path, parts=("drafter",))


def _other(path: Path, config: ModelConfig) -> Checkpoint:
    if not os.path.isdir(path) and path.suffix != ".safetensors":
        return open_drafter(path, config)
    checkpoint = open_folder(path, parts=("drafter",))
    checkpoint.target_lineage = lineage(checkpoint.config, checkpoint.tensors)
    pairs: list[tuple[str, Any, Any]] = [(n, getattr(checkpoint.config, n), getattr(config, n)) for n in _SHARED]
    problems = [f"{name} is {found}, the model has {wanted}" for name, found, wanted in pairs if found != wanted]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise CheckpointError(f"{path}: this drafter belongs to another model:{listed}", problems)
    return checkpoint
