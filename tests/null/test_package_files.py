"""The check of what wheels and source archives hold finds what it is for."""

from __future__ import annotations

from tests.package_files import sdist_problems, wheel_problems

REPOSITORY = ["README.md", "LICENSE", "src/ds4v41/__init__.py", "src/ds4v41/data/a.json", "tests/golden/x", ".ci/run"]
WHEEL = ["ds4v41/__init__.py", "ds4v41/data/a.json", "ds4v41/_ext.cpython-311-x86_64-linux-gnu.so",
         "ds4v41-0.1.0.dist-info/RECORD", "ds4v41-0.1.0.dist-info/licenses/LICENSE"]  # fmt: skip
SDIST = [f"ds4v41-0.1.0/{n}" for n in ("PKG-INFO", *REPOSITORY[:4])]


def test_wheels() -> None:
    assert wheel_problems(WHEEL, REPOSITORY) == []
    assert wheel_problems([*WHEEL, "ds4v41/_ext.new"], REPOSITORY) == ["stray: ds4v41/_ext.new"]
    assert wheel_problems([*WHEEL, "ds4v41/_ext.cpython-312-darwin.so"], REPOSITORY)
    assert wheel_problems([*WHEEL, "tests/conftest.py", "ds4v41.libs/libgomp.so.1"], REPOSITORY) == [
        "stray: ds4v41.libs/libgomp.so.1", "stray: tests/conftest.py"]  # fmt: skip
    for i in (0, 1, 2, 4):
        assert wheel_problems(WHEEL[:i] + WHEEL[i + 1 :], REPOSITORY)


def test_source_archives() -> None:
    assert sdist_problems(SDIST, REPOSITORY) == []
    assert sdist_problems([*SDIST, "ds4v41-0.1.0/build/x.o"], REPOSITORY) == ["stray: build/x.o"]
    assert sdist_problems(SDIST[:-1], REPOSITORY) == ["missing: src/ds4v41/data/a.json"]
