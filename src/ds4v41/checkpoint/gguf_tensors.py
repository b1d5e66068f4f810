"""Tensors of a GGUF header against the tensor table: names, shapes, types, order; and their binding to the file."""

from __future__ import annotations

from collections.abc import Sequence

from .config import ModelConfig
from .gguf_dialect import engram_row_bytes
from .gguf_header import GgufHeader, TensorInfo
from .spec import TensorSpec, stacked_table
from .tensors import FileSegment, Tensor

_PLAIN = frozenset({"F32", "F16", "BF16"})
_MATRIX = _PLAIN | {"Q8_0", "Q4_K", "MXFP4"}
_TYPES: dict[str, frozenset[str]] = {
    "embed": _PLAIN,
    "head": _PLAIN | {"Q8_0"},
    "linear": _MATRIX,
    "shared": _MATRIX,
    "grouped": _MATRIX,
    "dense": _PLAIN | {"Q8_0"},
    "expert": _MATRIX | {"Q2_K", "IQ2_XXS"},
    "engram_table": frozenset({"I8"}),
}


def allowed_types(role: str) -> frozenset[str]:
    """Tensor types that the dialect may use for a role of the tensor table."""
    return _TYPES.get(role, _PLAIN)


def stored_shape(spec: TensorSpec, config: ModelConfig) -> tuple[int, ...]:
    """Shape in a GGUF file, outermost first. Engram rows count bytes, everything else elements."""
    if spec.role == "engram_table":
        return (spec.shape[0], engram_row_bytes(config))
    return spec.shape


def bind_tensors(
    header: GgufHeader, config: ModelConfig, parts: Sequence[str], problems: list[str]
) -> dict[str, Tensor]:
    """The tensors of `parts` by official name. Appends every fault to `problems`; faulty tensors are left out."""
    found = {info.name: info for info in header.tensors}
    specs = stacked_table(config, parts)
    mapped_end = _mapped_end(header, specs, found)
    segment = FileSegment(header.path, header.data_start, mapped_end, header.stat)
    tensors: dict[str, Tensor] = {}
    damaged = _named_in(header.problems)
    for spec in specs:
        info = found.pop(spec.gguf_name, None)
        if info is None:
            if not spec.optional and spec.gguf_name not in damaged:
                shape = list(stored_shape(spec, config))
                types = " or ".join(sorted(allowed_types(spec.role)))
                problems.append(f"{header.path}: missing tensor {spec.gguf_name}: expected {types} {shape}")
            continue
        if fault := _fault(spec, info, config, mapped_end):
            problems.append(f"{header.path}: byte {info.header_offset}: tensor {info.name!r}: {fault}")
            continue
        on_disk = spec.role == "engram_table"
        tensors[spec.name] = Tensor(
            name=spec.name,
            dtype=info.type_name,
            shape=stored_shape(spec, config),
            file=header.path,
            offset=info.offset,
            nbytes=info.nbytes,
            segment=None if on_disk else segment,
        )
    problems += [_unexpected(header, info) for info in found.values()]
    problems += _mixed_types(header, tensors)
    return tensors


def _mapped_end(header: GgufHeader, specs: Sequence[TensorSpec], found: dict[str, TensorInfo]) -> int:
    """End of the part that may be mapped: the first Engram table, or the end of the data."""
    tables = [found[s.gguf_name].offset for s in specs if s.role == "engram_table" and s.gguf_name in found]
    return min([header.data_end, *tables])


def _named_in(problems: Sequence[str]) -> frozenset[str]:
    """Names of tensors that the header parser has already reported, so that they are not reported as missing too."""
    return frozenset(p.split("tensor '", 1)[1].split("'", 1)[0] for p in problems if "tensor '" in p)


def _fault(spec: TensorSpec, info: TensorInfo, config: ModelConfig, mapped_end: int) -> str:
    allowed = allowed_types(spec.role)
    expected = stored_shape(spec, config)
    if info.type_name not in allowed:
        return f"expected type {' or '.join(sorted(allowed))}, found {info.type_name}"
    if _significant(info.shape) != _significant(expected):
        return f"expected shape {list(expected)} (outermost first), found {list(info.shape)}"
    if spec.role != "engram_table" and info.offset + info.nbytes > mapped_end:
        return f"lies at byte {info.offset}, behind the Engram table at {mapped_end}; the tables must come last"
    return ""


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Leading ones do not count: some writers drop them."""
    i = 0
    while i < len(shape) - 1 and shape[i] == 1:
        i += 1
    return shape[i:]


def _unexpected(header: GgufHeader, info: TensorInfo) -> str:
    return (
        f"{header.path}: byte {info.header_offset}: unexpected tensor {info.name!r} {info.type_name} "
        f"{list(info.shape)}: a model of this configuration has none of this name"
    )


def _mixed_types(header: GgufHeader, tensors: dict[str, Tensor]) -> list[str]:
    """Gate and up projection of the experts are read together and must be of one type."""
    problems = []
    for name, tensor in tensors.items():
        if not name.endswith(".experts.w1.weight"):
            continue
        up = tensors.get(name.replace(".w1.", ".w3."))
        if up is not None and up.dtype != tensor.dtype:
            problems.append(
                f"{header.path}: byte {up.offset}: {up.name} is {up.dtype}, {tensor.name} is {tensor.dtype}: gate and "
                "up must be of one type"
            )
    return problems
