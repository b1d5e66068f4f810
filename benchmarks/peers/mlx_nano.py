"""The nano model without Engram in mlx-lm, and here: prefill and decode rates on the processor.

    python benchmarks/peers/mlx_nano.py --with ds4v41 [--json OUT]
    python benchmarks/peers/mlx_nano.py --with mlx --nano FOLDER [--json OUT]     (in an environment with mlx-lm)

mlx-lm 0.32.2 (on mlx-cpu 0.32.4) knows the architecture. The peer is no dependency of the project, so the two run in
environments of their own, one after the other; FOLDER is `src/ds4v41/data/nano`. Both read a copy of the model whose
Engram layers are left out, greedy, the same prompt of random tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

Measured = tuple[float, list[float], list[int]]
"""Seconds of the prefill, seconds of each step, the tokens that came."""


def without_engram(nano: Path, out: Path) -> Path:
    """A copy of the model that has no Engram layer."""
    config = json.loads((nano / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(nano / name, out / name)
    data = (nano / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = {k: v for k, v in json.loads(data[8 : 8 + size]).items() if ".engram." not in k}
    pieces, at = [], 0
    for name, entry in sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])[0]):
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        pieces.append(data[8 + size + begin : 8 + size + end])
        entry["data_offsets"] = [at, at + end - begin]
        at += end - begin
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (out / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(pieces))
    return out


def with_mlx(path: Path, prompt: list[int], n: int) -> Measured:
    """Greedy, by mlx-lm."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(path)
    mx.eval(model(mx.array([prompt[:8]])))
    cache = make_prompt_cache(model)
    begin = time.perf_counter()
    token = int(mx.argmax(model(mx.array([prompt]), cache=cache)[0, -1]).item())
    prefill = time.perf_counter() - begin
    tokens, steps = [token], []
    for _ in range(n):
        begin = time.perf_counter()
        token = int(mx.argmax(model(mx.array([[token]]), cache=cache)[0, -1]).item())
        steps.append(time.perf_counter() - begin)
        tokens.append(token)
    return prefill, steps, tokens


def with_ds4v41(path: Path, prompt: list[int], n: int) -> Measured:
    """Greedy, by this library."""
    import ds4v41

    with ds4v41.Model.open(path) as model:
        with model.session(64) as session:
            session.prefill(prompt[:8])
        with model.session(len(prompt) + n + 8) as session:
            begin = time.perf_counter()
            token = int(np.argmax(session.prefill(prompt)[-1]))
            prefill = time.perf_counter() - begin
            tokens, steps = [token], []
            for _ in range(n):
                begin = time.perf_counter()
                token = int(np.argmax(session.step([token])[-1]))
                steps.append(time.perf_counter() - begin)
                tokens.append(token)
    return prefill, steps, tokens


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="engine", choices=("ds4v41", "mlx"), required=True)
    parser.add_argument("--nano", type=Path, default=Path(__file__).parents[2] / "src" / "ds4v41" / "data" / "nano")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompt = np.random.default_rng(3).integers(10, 3000, args.prompt).tolist()
    engines: dict[str, Callable[[Path, list[int], int], Measured]] = {"mlx": with_mlx, "ds4v41": with_ds4v41}
    with tempfile.TemporaryDirectory() as folder:
        prefill, steps, tokens = engines[args.engine](without_engram(args.nano, Path(folder)), prompt, args.steps)
    result = {
        "engine": args.engine,
        "prompt": args.prompt,
        "prefill_tok_s": args.prompt / prefill,
        "decode_tok_s": 1 / statistics.median(steps),
        "load": os.getloadavg()[0],
        "first_tokens": tokens[:16],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
