"""GGUF files for tests: right by default, with every key and tensor open to change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ds4v41.checkpoint.config import ModelConfig
from ds4v41.checkpoint.convert_plan import PlannedTensor, plan_tensors
from ds4v41.checkpoint.gguf_dialect import (
    BOOL,
    I32,
    STRING,
    U32,
    Record,
    config_records,
    drafter_records,
    engram_records,
)
from ds4v41.checkpoint.gguf_writer import pack_header, pack_tensor

GOLDEN = Path(__file__).parents[1] / "golden"

Records = dict[str, Record]


def raw_config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text())
    return found


class Sample:
    """A GGUF file in the making: change `records` and `tensors`, then write. The data are a hole of the right size."""

    def __init__(self, name: str = "tiny/fp8fp4", kind: str = "model") -> None:
        raw = raw_config(name)
        self.config = ModelConfig.from_hf(raw, name)
        planned, _ = plan_tensors(self.config, kind, "q4", None, None)
        self.tensors: list[PlannedTensor] = list(planned)
        self.alignment = 16_384
        self.cut = 0
        """Bytes missing at the end of the file; negative: bytes too many."""
        listed = model_records(raw, self.config) if kind == "model" else drafter_file_records(self.config)
        self.records: Records = {record.key: record for record in listed}

    def header(self) -> bytes:
        entries = [pack_tensor(t.name, t.shape, t.type, t.offset) for t in self.tensors]
        return pack_header(list(self.records.values()), entries, len(entries), self.alignment)

    def set(self, key: str, value: Any, kind: int | None = None) -> None:
        old = self.records[key]
        self.records[key] = replace(old, value=value, kind=old.kind if kind is None else kind)

    def file_bytes(self) -> int:
        end = max(t.offset + t.padded_bytes for t in self.tensors)
        return len(self.header()) + end - self.cut

    def write(self, path: Path) -> Path:
        with open(path, "wb") as file:
            file.write(self.header())
            file.truncate(self.file_bytes())
        return path


def model_records(raw: dict[str, Any], config: ModelConfig) -> list[Record]:
    vocab = config.vocab_size
    token_map = np.arange(vocab) % config.engram_compressed_vocab_size
    return [
        Record("general.architecture", STRING, "deepseek41"),
        Record("general.alignment", U32, 16_384),
        Record("deepseek41.config", STRING, json.dumps(raw, sort_keys=True, separators=(",", ":"))),
        *engram_records(config, token_map),
        Record("tokenizer.ggml.model", STRING, "gpt2"),
        Record("tokenizer.ggml.pre", STRING, "joyai-llm"),
        Record("tokenizer.ggml.tokens", STRING, [f"token{i:09d}" for i in range(vocab)], True),
        Record("tokenizer.ggml.token_type", I32, [1] * vocab, True),
        Record("tokenizer.ggml.merges", STRING, [f"token {i:09d}" for i in range(vocab)], True),
        Record("tokenizer.ggml.bos_token_id", U32, config.bos_token_id),
        Record("tokenizer.ggml.eos_token_id", U32, config.eos_token_id),
        Record("tokenizer.ggml.add_bos_token", BOOL, True),
        *config_records(config),
    ]


def drafter_file_records(config: ModelConfig) -> list[Record]:
    return [
        Record("general.architecture", STRING, "deepseek41-dspark"),
        Record("general.alignment", U32, 16_384),
        *drafter_records(config),
        Record("deepseek41.dspark.quantization", STRING, "Q4_K routed experts"),
    ]
