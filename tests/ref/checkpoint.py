"""Reads an official checkpoint folder into float32 weights that keep their stored kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.load import TensorFile

from .formats import F32, dequantise_blocks, e2m1_decode, unpack_nibbles
from .linear import Weight
from .moe import Expert
from .rope import Yarn


class Config(dict[str, Any]):
    """The text part of config.json: `config["hidden_size"]`, plus what has to be worked out."""

    @property
    def n_layers(self) -> int:
        return int(self["num_hidden_layers"])

    @property
    def yarn(self) -> Yarn:
        scaling = self["rope_scaling"]
        return Yarn(
            scaling["factor"], scaling["original_max_position_embeddings"], scaling["beta_fast"], scaling["beta_slow"]
        )


class Checkpoint:
    """Tensors of a folder by their official names."""

    def __init__(self, folder: Path, extra: Path | None = None) -> None:
        self.config = Config(json.loads((folder / "config.json").read_text())["text_config"])
        self._where: dict[str, TensorFile] = {}
        for path in [*sorted(folder.glob("model*.safetensors")), *([extra] if extra else [])]:
            file = TensorFile(path)
            self._where.update(dict.fromkeys(file, file))

    def values(self, name: str) -> F32:
        """A plain tensor as float32."""
        return self._where[name][name]

    def weight(self, name: str) -> Weight:
        """The matrix `<name>.weight`, dequantised with `<name>.scale` where there is one."""
        full = f"{name}.weight"
        kind = self._where[full].dtype(full)
        if kind == "I8":
            packed = self._where[full].raw(full).view(np.uint8)
            codes = e2m1_decode(unpack_nibbles(packed))
            return Weight(dequantise_blocks(codes, self.values(f"{name}.scale"), (1, 32)), "fp4")
        if kind == "F8_E4M3":
            return Weight(dequantise_blocks(self.values(full), self.values(f"{name}.scale"), (32, 32)), "fp8")
        return Weight(self.values(full), "bf16")

    def engram_table(self, layer: int) -> F32:
        """A whole Engram table [rows, row width]."""
        name = f"layers.{layer}.engram.embed"
        return dequantise_blocks(self.values(f"{name}.weight"), self.values(f"{name}.scale"), (1, 32))

    def expert(self, name: str) -> Expert:
        """The three matrices under `name`."""
        return Expert(*(self.weight(f"{name}.{part}") for part in ("w1", "w2", "w3")))
