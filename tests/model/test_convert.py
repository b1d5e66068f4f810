"""Conversions of real weights, read back by an independent GGUF reader and independent decoders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from ds4v41 import errors
from ds4v41.checkpoint import Checkpoint, Tensor, open_checkpoint
from ds4v41.checkpoint.convert import convert, convert_drafter
from ds4v41.checkpoint.convert_plan import Plan
from ds4v41.checkpoint.gguf import open_drafter_gguf, open_gguf
from ds4v41.checkpoint.safetensors import open_folder
from ds4v41.checkpoint.spec import TensorSpec
from ds4v41.errors import CheckpointError
from tests.model.convert_values import Bytes, Floats, official_values, rms

try:
    import_module("ds4v41._ext")
except ImportError:  # pragma: no cover
    pytest.skip("the extension is not built", allow_module_level=True)

GOLDEN = Path(__file__).parents[1] / "golden"
NANO = Path(__file__).parents[2] / "src/ds4v41/data/nano"
TINY_TOKENIZER = GOLDEN / "tiny/tokenizer.json"
SOURCES: dict[str, tuple[Path, Path]] = {
    "nano": (NANO, NANO / "tokenizer.json"),
    "tiny-bf16": (GOLDEN / "tiny/bf16", TINY_TOKENIZER),
    "tiny-fp8fp4": (GOLDEN / "tiny/fp8fp4", TINY_TOKENIZER),
}


def file_values(reader: GGUFReader) -> dict[str, tuple[str, Floats, Bytes]]:
    """Name -> type, values, raw bytes, by the `gguf` package alone."""
    found = {}
    for t in reader.tensors:
        raw = np.asarray(t.data)
        name = t.tensor_type.name
        values = np.zeros(0, np.float32) if name == "I8" else dequantize(raw, t.tensor_type)
        found[t.name] = (name, values, raw)
    return found


# ---- whole conversions ----------------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


@dataclass(frozen=True)
class Converted:
    plan: Plan
    drafter_plan: Plan
    path: Path
    drafter_path: Path
    source: Path


@pytest.fixture(scope="module", params=[f"{name} {recipe}" for name in SOURCES for recipe in ("q4", "mxfp4", "f16")])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    name, recipe = request.param.split()
    folder, tokenizer = SOURCES[name]
    out = tmp_path_factory.mktemp("converted")
    plan = convert(folder, out / "m.gguf", recipe, tokenizer=tokenizer, threads=2)
    drafter = convert_drafter(folder, out / "d.gguf", recipe, threads=2)
    return Converted(plan, drafter, out / "m.gguf", out / "d.gguf", folder)


def test_size_and_plan(converted: Converted) -> None:
    for plan, path in ((converted.plan, converted.path), (converted.drafter_plan, converted.drafter_path)):
        assert path.stat().st_size == plan.file_bytes and plan.header == "exact"
        reader = GGUFReader(path)
        found = [(t.name, t.tensor_type.name, t.data_offset, t.n_bytes) for t in reader.tensors]
        assert found == [(t.name, t.type, plan.data_start + t.offset, t.nbytes) for t in plan.tensors]
    assert sorted(p.name for p in converted.path.parent.iterdir()) == ["d.gguf", "m.gguf"]


@pytest.mark.parametrize("part", ["model", "drafter"])
def test_values(converted: Converted, part: str) -> None:
    plan: Plan = converted.plan if part == "model" else converted.drafter_plan
    parts = ("main", "engram") if part == "model" else ("drafter",)
    source = open_folder(converted.source, parts=parts).tensors
    found = file_values(GGUFReader(converted.path if part == "model" else converted.drafter_path))
    for planned in plan.tensors:
        type_name, values, raw = found[planned.name]
        if type_name == "I8":
            check_engram(planned.spec, source, raw)
            continue
        expected = np.stack([official_values(s, source) for s in planned.sources]).reshape(planned.spec.shape)
        check_values(planned.name, type_name, expected, values.reshape(expected.shape), raw, plan.recipe)


def check_engram(spec: TensorSpec, source: dict[str, Tensor], raw: Bytes) -> None:
    codes, scales = source[spec.name], source[spec.scale_name]
    rows = raw.view(np.uint8).reshape(spec.shape[0], -1)
    dim = spec.shape[1]
    assert rows.shape[1] == dim + dim // 32
    assert rows[:, :dim].tobytes() == codes.read() and rows[:, dim:].tobytes() == scales.read()


def check_values(name: str, type_name: str, expected: Floats, values: Floats, raw: Bytes, recipe: str) -> None:
    error = np.abs(values.astype(np.float64) - expected)
    if recipe == "f16" or type_name in ("F32", "BF16"):
        assert type_name in ("F16", "BF16", "F32", "MXFP4")
        assert np.array_equal(values, expected), name
    elif type_name == "F16":
        assert np.array_equal(values, expected.astype(np.float16).astype(np.float32)), name
    elif type_name == "Q8_0":
        blocks = raw.view(np.uint8).reshape(-1, 34)
        step = blocks[:, :2].copy().view(np.float16).astype(np.float64)
        assert np.all(error.reshape(-1, 32) <= 0.5000001 * step), name
    elif type_name == "Q4_K":
        assert rms(error) < 0.075 * rms(expected), name
    else:
        assert type_name == "MXFP4"
        assert rms(error) < 0.14 * rms(expected), name


def test_reader_agrees(converted: Converted) -> None:
    checkpoint = open_gguf(converted.path)
    official = open_folder(converted.source)
    assert checkpoint.config == official.config and not checkpoint.problems
    drafter = open_drafter_gguf(converted.drafter_path, checkpoint.config)
    for opened, plan in ((checkpoint, converted.plan), (drafter, converted.drafter_plan)):
        reader = {t.name: t for t in GGUFReader(plan_path(converted, plan)).tensors}
        for planned in plan.tensors:
            tensor = opened.tensors[planned.spec.name]
            assert tensor.read() == np.asarray(reader[planned.name].data).tobytes()
        opened.check()


def plan_path(converted: Converted, plan: Plan) -> Path:
    return converted.path if plan is converted.plan else converted.drafter_path


def test_fp4_experts_are_lossless_in_mxfp4(tmp_path: Path) -> None:
    plan = convert(NANO, tmp_path / "m.gguf", "mxfp4")
    source = open_folder(NANO).tensors
    found = file_values(GGUFReader(tmp_path / "m.gguf"))
    experts = [t for t in plan.tensors if t.spec.role == "expert"]
    assert len(experts) == 30 and {t.type for t in experts} == {"MXFP4"}
    for planned in experts:
        expected = np.stack([official_values(s, source) for s in planned.sources])
        assert np.array_equal(found[planned.name][1].reshape(expected.shape), expected)


def test_tokenizer_and_token_map(converted: Converted) -> None:
    checkpoint = open_gguf(converted.path)
    tokenizer = NANO / "tokenizer.json" if converted.source == NANO else TINY_TOKENIZER
    raw = json.loads(tokenizer.read_text())
    metadata = checkpoint.tokenizer_metadata
    assert metadata is not None
    assert {t: i for i, t in enumerate(metadata["tokens"])}.items() >= raw["model"]["vocab"].items()
    assert metadata["merges"] == [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]]
    special = {t["id"] for t in raw["added_tokens"] if t["special"]}
    assert {i for i, kind in enumerate(metadata["token_types"]) if kind == 3} == special
    assert metadata["pre"] == ("joyai-llm" if converted.source == NANO else "gpt-2")
    if converted.source != NANO:
        assert checkpoint.token_map == json.loads((GOLDEN / "tiny/token_map.json").read_text())["token_map"]
    own = Checkpoint(Path(), "official", checkpoint.config, {}, tokenizer=tokenizer)
    assert checkpoint.token_map == own.token_map


def test_same_bytes_for_any_thread_count(tmp_path: Path) -> None:
    for n in (1, 3):
        convert(NANO, tmp_path / f"{n}.gguf", "q4", threads=n)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


def test_small_pieces_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(NANO, tmp_path / "a.gguf", "q4")
    monkeypatch.setattr("ds4v41.checkpoint.convert_source.PIECE_BYTES", 10_000)
    convert(NANO, tmp_path / "b.gguf", "q4")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_shards_of_the_drafter_alone(tmp_path: Path) -> None:
    """Only the shards with `mtp` tensors have to be there."""
    raw = (GOLDEN / "tiny/fp8fp4/model.safetensors").read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    header.pop("__metadata__", None)
    drafter = {k: v for k, v in header.items() if k.startswith("mtp.")}
    body, offset, entries = b"", 0, {}
    for name, info in drafter.items():
        first, last = info["data_offsets"]
        body += raw[8 + n + first : 8 + n + last]
        entries[name] = {**info, "data_offsets": [offset, offset + last - first]}
        offset += last - first
    text = json.dumps(entries).encode()
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    index = {k: f"model-0000{2 if k in drafter else 1}-of-00002.safetensors" for k in header}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    shutil.copy(GOLDEN / "tiny/fp8fp4/config.json", tmp_path)
    convert_drafter(tmp_path, tmp_path / "d.gguf")
    convert_drafter(GOLDEN / "tiny/fp8fp4", tmp_path / "whole.gguf")
    config = open_folder(GOLDEN / "tiny/fp8fp4").config
    opened = [open_drafter_gguf(tmp_path / name, config) for name in ("d.gguf", "whole.gguf")]
    assert opened[0].tensors.keys() == opened[1].tensors.keys()
    assert all(t.read() == opened[1].tensors[name].read() for name, t in opened[0].tensors.items())


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / "tiny/fp8fp4" / name, folder / name)
    return folder


def overwrite(folder: Path, name: str, at: int, data: bytes) -> None:
    tensor = open_folder(folder).tensors[name]
    with open(tensor.file, "r+b") as file:
        file.seek(tensor.offset + at)
        file.write(data)


@pytest.mark.parametrize(
    ("name", "at", "data", "text"),
    [
        ("embed.weight", (300 * 128 + 5) * 2, b"\xc0\x7f", "embed.weight: NaN at row 300, column 5"),
        ("head.weight", 6, b"\x80\xff", "head.weight: infinity at row 0, column 3"),
        ("layers.3.attn.wq_b.weight", 96 * 40 + 7, b"\xff", "wq_b.weight: NaN at row 40, column 7"),
        ("layers.3.attn.wq_b.scale", 3 + 1, b"\xff", "wq_b.weight: NaN at row 32, column 32"),
        ("layers.2.ffn.experts.5.w1.scale", 4 * 9 + 2, b"\xff", "experts.5.w1.weight: NaN scale at row 9, column 64"),
        ("layers.4.engram.embed.weight", 32 * 77 + 31, b"\x7f", "embed.weight: NaN at row 77, column 31"),
        ("layers.0.attn.attn_sink", 4, b"\0\0\x80\x7f", "attn_sink: infinity at row 0, column 1"),
    ],
)
def test_values_that_are_not_finite(copy: Path, tmp_path: Path, name: str, at: int, data: bytes, text: str) -> None:
    overwrite(copy, name, at, data)
    with pytest.raises(CheckpointError) as caught:
        convert(copy, tmp_path / "m.gguf", "q4", tokenizer=TINY_TOKENIZER)
    assert text in str(caught.value) and "model.safetensors" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_values_too_large_for_f16(copy: Path, tmp_path: Path) -> None:
    overwrite(copy, "embed.weight", 8, np.array([1e6], np.float32).tobytes()[2:])
    with pytest.raises(CheckpointError, match=r"embed\.weight: value .* is too large for F16 at row 0, column 4"):
        convert(copy, tmp_path / "m.gguf", "q4", tokenizer=TINY_TOKENIZER)
    plan = convert(copy, tmp_path / "m.gguf", "f16", tokenizer=TINY_TOKENIZER)
    assert {t.name: t.type for t in plan.tensors}["token_embd.weight"] == "BF16"


def test_no_tokenizer(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json here"):
        convert(copy, tmp_path / "m.gguf")
    assert convert_drafter(copy, tmp_path / "d.gguf").kind == "drafter"


def test_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(10**9, 0, 10**6)
    monkeypatch.setattr("ds4v41.checkpoint.convert.shutil.disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"bytes are needed, 1,000,000 are free \([\d,]+ short\)"):
        convert(NANO, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []

    def stop(done: int, total: int, name: str) -> None:
        seen.append((done, total, name))
        if len(seen) == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(NANO, tmp_path / "m.gguf", progress=stop)
    assert not list(tmp_path.iterdir())


def test_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    plan = convert(NANO, tmp_path / "m.gguf", progress=lambda *step: seen.append(step))
    done = [d for d, _, _ in seen]
    assert done == sorted(done) and done[-1] == plan.file_bytes and {t for _, t, _ in seen} == {plan.file_bytes}
    assert {name for _, _, name in seen} == {t.name for t in plan.tensors}


def test_kill_leaves_nothing_that_opens(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom ds4v41.checkpoint.convert import convert\nseen = []\n"
        "def kill(*step):\n    seen.append(step)\n    if len(seen) == 60: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"convert({str(NANO)!r}, {str(tmp_path / 'm.gguf')!r}, progress=kill)\n"
    )
    path = os.pathsep.join([str(Path(errors.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf.partial"]
    with pytest.raises(CheckpointError, match="past the end of the file"):
        open_checkpoint(tmp_path / "m.gguf.partial")
    convert(NANO, tmp_path / "m.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"] and open_gguf(tmp_path / "m.gguf").tensors


# ---- the engine on converted files ----------------------------------------------------------------------------------

TEXT = "def parse(path: str) -> dict[str, int]:\n    with open(path) as file:\n        return json.load(file)\n\n\n" * 8


def logits_of(checkpoint: Checkpoint, activations: str, tokens: list[int]) -> Floats:
    """Logits [n, vocab] of one prefill."""
    extension = import_module("ds4v41._ext")
    model = import_module("ds4v41.weights").build(checkpoint, activations, "auto", 1)
    session = extension.Session(model, 1024, 1024, 1024)
    result: Floats = session.run(np.array(tokens, np.int32), "all")
    return result


def nano_tokens() -> list[int]:
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_file(str(NANO / "tokenizer.json")).encode(TEXT, add_special_tokens=False)
    return [0, *encoded.ids]


def perplexity(logits: Floats, tokens: list[int]) -> float:
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(1, keepdims=True)
    chosen = rows[np.arange(len(rows)), tokens[1:]] - np.log(np.exp(rows).sum(1))
    return float(np.exp(-chosen.mean()))


@pytest.mark.parametrize("activations", ["bf16", "fp32"])
@pytest.mark.parametrize("name", SOURCES)
def test_f16_recipe_gives_equal_logits_bits(tmp_path: Path, name: str, activations: str) -> None:
    folder, tokenizer = SOURCES[name]
    convert(folder, tmp_path / "m.gguf", "f16", tokenizer=tokenizer)
    official, converted = open_checkpoint(folder), open_checkpoint(tmp_path / "m.gguf")
    official.tokenizer = tokenizer
    tokens = nano_tokens() if name == "nano" else np.random.default_rng(0).integers(5, 512, 200).tolist()
    assert np.array_equal(
        logits_of(official, activations, tokens).view(np.uint32),
        logits_of(converted, activations, tokens).view(np.uint32),
    )


@pytest.mark.parametrize(("recipe", "limit"), [("q4", 0.03), ("mxfp4", 0.01)])
def test_perplexity_of_the_nano_model(tmp_path: Path, recipe: str, limit: float) -> None:
    convert(NANO, tmp_path / "m.gguf", recipe)
    tokens = nano_tokens()
    official = perplexity(logits_of(open_checkpoint(NANO), "bf16", tokens), tokens)
    converted = perplexity(logits_of(open_checkpoint(tmp_path / "m.gguf"), "bf16", tokens), tokens)
    assert abs(converted / official - 1) < limit, (official, converted)
