"""Official tensors against the tensor table: missing, unexpected, wrong type, wrong shape, wrong scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .config import ModelConfig
from .spec import PARTS, TensorSpec, tensor_table
from .tensors import Tensor

_SIDE_PREFIXES = ("mtp.", "vision.", "aligner.", "image_")


def is_side(name: str) -> bool:
    """Does the tensor belong to the drafter or to image input? Such tensors may be there or not for text."""
    return name.startswith(_SIDE_PREFIXES) or name.endswith(".gate.bias_vl")


def part_of(name: str) -> str:
    """Part of the checkpoint that an official name belongs to, by its prefix."""
    if name.startswith("mtp."):
        return "drafter"
    if name.startswith(_SIDE_PREFIXES):
        return "vision"
    return "engram" if ".engram.embed." in name else "main"


def validate_official(
    config: ModelConfig, tensors: Mapping[str, Tensor], parts: Sequence[str], *, complete: bool = True
) -> list[str]:
    """All problems of the given parts. With complete=False missing tensors are not reported (a file was unreadable).

    Tensors of other parts are not looked at. A name that is in no part at all is a problem, except below the prefixes
    of the drafter and of image input, which later releases may extend.
    """
    problems: list[str] = []
    known: set[str] = set()
    for spec in tensor_table(config, PARTS):
        known.add(spec.name)
        if spec.scale != "none":
            known.add(spec.scale_name)
        if spec.part in parts:
            problems += _check_one(spec, tensors, complete)
    for name, tensor in tensors.items():
        if name not in known and not is_side(name):
            problems.append(
                f"{tensor.file}: byte {tensor.offset}: unexpected tensor {name} {tensor.dtype} {list(tensor.shape)}: "
                "a model of this configuration has none of this name"
            )
    return problems


def _check_one(spec: TensorSpec, tensors: Mapping[str, Tensor], complete: bool) -> list[str]:
    tensor = tensors.get(spec.name)
    if tensor is None:
        expected = f"{' or '.join(sorted(spec.types))} {list(spec.shape)}"
        return [f"missing tensor {spec.name}: expected {expected}"] if complete and not spec.optional else []
    where = f"{tensor.file}: byte {tensor.offset}: {spec.name}"
    if tensor.dtype not in spec.types:
        return [f"{where}: expected type {' or '.join(sorted(spec.types))}, found {tensor.dtype}"]
    problems = []
    shape = spec.storage_shape(tensor.dtype)
    if tensor.shape != shape:
        problems.append(f"{where}: expected {tensor.dtype} shape {list(shape)}, found {list(tensor.shape)}")
    return problems + _check_scale(spec, tensor, tensors, complete)


def _check_scale(spec: TensorSpec, tensor: Tensor, tensors: Mapping[str, Tensor], complete: bool) -> list[str]:
    if spec.scale == "none":
        return []
    scale = tensors.get(spec.scale_name)
    if not spec.needs_scale(tensor.dtype):
        if scale is None:
            return []
        return [
            f"{scale.file}: byte {scale.offset}: unexpected tensor {spec.scale_name}: its weight is {tensor.dtype}, "
            "which has no scale"
        ]
    expected = list(spec.scale_shape)
    if scale is None:
        missing = f"missing tensor {spec.scale_name}: expected F8_E8M0 {expected} beside a weight of {tensor.dtype}"
        return [missing] if complete else []
    if scale.dtype != "F8_E8M0" or scale.shape != spec.scale_shape:
        return [
            f"{scale.file}: byte {scale.offset}: {spec.scale_name}: expected F8_E8M0 {expected}, "
            f"found {scale.dtype} {list(scale.shape)}"
        ]
    return []
