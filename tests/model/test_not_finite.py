"""NaN and infinity in weights: named by check=True, and never a silent result without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import ds4v41
from ds4v41.checkpoint import open_checkpoint

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "tiny"


def damaged(tmp_path: Path, name: str, value: bytes) -> Path:
    """The tiny bf16 checkpoint with the first value of one tensor replaced."""
    folder = tmp_path / "m"
    shutil.copytree(GOLDEN / "bf16", folder, ignore=shutil.ignore_patterns("runs*", "inter*"))
    tensor = open_checkpoint(folder).tensors[name]
    with open(tensor.file, "r+b") as file:
        file.seek(tensor.offset)
        file.write(value)
    return folder


@pytest.mark.parametrize("activations", ["bf16", "fp8", "fp32"])
@pytest.mark.parametrize(
    "name",
    ["layers.0.attn_norm.weight", "layers.3.ffn.shared_experts.w1.weight", "layers.7.attn.wo_b.weight", "norm.weight"],
)
def test_a_nan_is_an_error_and_the_session_stays(tmp_path: Path, name: str, activations: str) -> None:
    folder = damaged(tmp_path, name, np.array([0x7FC0], np.uint16).tobytes())
    with pytest.raises(ds4v41.CheckpointError, match=name):
        ds4v41.Model.open(folder, check=True)
    with ds4v41.Model.open(folder, activations=activations, threads=1) as model, model.session() as session:
        with pytest.raises(ds4v41.NumericsError):
            session.generate([1, 2, 3], max_tokens=2, temperature=0).finish()
        if name != "norm.weight":  # the last norm acts on the logits alone: the sampler sees them
            last = name.startswith("layers.7")  # of whose rows only the last one is computed
            with pytest.raises(ds4v41.NumericsError, match="position 2" if last else "position 0"):
                session.prefill([1, 2, 3], logits=None)
            assert session.position == 0
