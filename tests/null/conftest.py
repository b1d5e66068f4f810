"""Official folders for several tests: `single` and `sharded` stay as they are, `one` and `many` are copies to spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.null.folder_sample import SMALL

from ds4v41.synth import tiny_config, write_official


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "m"
    write_official(folder, tiny_config(**SMALL), seed=1, storage="fp8fp4")
    return folder


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "m"
    write_official(folder, tiny_config(**SMALL), seed=1, storage="fp8fp4", shard_bytes=300_000)
    return folder


@pytest.fixture
def one(single: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(single, tmp_path / "m"))


@pytest.fixture
def many(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "m"))
