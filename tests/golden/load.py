"""Reads the golden `.safetensors` files as numpy arrays, with small float types decoded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.ref.formats import bf16_decode, e4m3_decode, e8m0_decode

FOLDER = Path(__file__).resolve().parent
MODES = ("fp32", "bf16", "fp8fp4")

_RAW_TYPES: dict[str, Any] = {
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "F32": np.float32,
    "I32": np.int32,
    "I64": np.int64,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_DECODERS: dict[str, Any] = {"BF16": bf16_decode, "F8_E4M3": e4m3_decode, "F8_E8M0": e8m0_decode}


class TensorFile(Mapping[str, np.ndarray]):
    """One file: `file[name]` is the decoded tensor (bf16, e4m3, e8m0 as float32), `file.raw(name)` its stored form."""

    def __init__(self, path: Path) -> None:
        blob = path.read_bytes()
        header_bytes = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + header_bytes])
        header.pop("__metadata__", None)
        self._entries: dict[str, dict[str, Any]] = header
        self._data = memoryview(blob)[8 + header_bytes :]

    def dtype(self, name: str) -> str:
        """The stored type as the file spells it, such as BF16."""
        return str(self._entries[name]["dtype"])

    def raw(self, name: str) -> np.ndarray:
        """The stored codes, without decoding."""
        entry = self._entries[name]
        start, end = entry["data_offsets"]
        return np.frombuffer(self._data[start:end], dtype=_RAW_TYPES[entry["dtype"]]).reshape(entry["shape"])

    def __getitem__(self, name: str) -> np.ndarray:
        raw = self.raw(name)
        decode = _DECODERS.get(self.dtype(name))
        return raw if decode is None else decode(raw)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def unit(name: str) -> TensorFile:
    """Vectors of single operations: units/<name>.safetensors."""
    return TensorFile(FOLDER / "units" / f"{name}.safetensors")


def runs(mode: str) -> TensorFile:
    """Whole runs of the tiny model in a mode of `MODES`."""
    return TensorFile(FOLDER / "tiny" / mode / "runs.safetensors")


def intermediates(mode: str) -> TensorFile:
    """Everything inside the tiny model for prompt p40 in a mode of `MODES`."""
    return TensorFile(FOLDER / "tiny" / mode / "intermediates.safetensors")


def checkpoint_folder(mode: str) -> Path:
    """The checkpoint a mode runs: fp32 is the bf16 one, promoted."""
    return FOLDER / "tiny" / ("fp8fp4" if mode == "fp8fp4" else "bf16")


def token_map() -> np.ndarray:
    """Compressed id of each token of the tiny tokenizer, [512] int64."""
    return np.asarray(json.loads((FOLDER / "tiny" / "token_map.json").read_text())["token_map"], dtype=np.int64)
