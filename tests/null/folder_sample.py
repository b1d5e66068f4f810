"""Small official folders for the tests of their reader, and editing what is in them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4v41.checkpoint.safetensors import open_folder
from ds4v41.errors import CheckpointError

SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "compress_ratios": (0, 2, 1),
    "kv_source_layer_ids": (1, 2),
    "index_source_layer_ids": (1, 2),
    "candidate_source_layer_id": 2,
    "engram_layer_ids": (1,),
    "engram_vocab_size": 50,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": (1, 2),
    "dspark_n_routed_experts": 2,
}


def problems_of(path: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        open_folder(path, **options)
    return caught.value.problems or (str(caught.value),)


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def join(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@contextlib.contextmanager
def header_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Edit the header of a folder's only file."""
    header, data = split(folder / "model.safetensors")
    yield header
    join(folder / "model.safetensors", header, data)
