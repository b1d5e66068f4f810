"""What a wheel and a source archive hold: all that is tracked and belongs there, and nothing else.

Usage: python tests/package_files.py FILE...
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTENSION = re.compile(r"ds4v41/_ext\.[\w-]+\.so")
LEFT_OUT = ("tests/golden/", ".ci/")  # of the source archive


def tracked() -> list[str]:
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.split()


def wheel_problems(names: Iterable[str], repository: Iterable[str]) -> list[str]:
    """Of a wheel: the package as it is tracked, one extension, and what pip writes."""
    names = set(names)
    extensions = {n for n in names if EXTENSION.fullmatch(n)}
    metadata = {n for n in names if re.match(r"ds4v41-[^/]+\.dist-info/", n)}
    package = {n.removeprefix("src/") for n in repository if n.startswith("src/ds4v41/")}
    problems = [] if len(extensions) == 1 else [f"expected one extension, found {sorted(extensions)}"]
    problems += [f"stray: {n}" for n in sorted(names - extensions - metadata - package)]
    problems += [f"missing: {n}" for n in sorted(package - names)]
    if not any(n.endswith("/licenses/LICENSE") for n in metadata):
        problems.append("missing: LICENSE")
    return problems


def sdist_problems(names: Iterable[str], repository: Iterable[str]) -> list[str]:
    """Of a source archive: what is tracked but for LEFT_OUT, and PKG-INFO."""
    names = {n.partition("/")[2] for n in names} - {"PKG-INFO", ""}
    wanted = {n for n in repository if not n.startswith(LEFT_OUT)}
    return [f"stray: {n}" for n in sorted(names - wanted)] + [f"missing: {n}" for n in sorted(wanted - names)]


def problems_of(path: Path) -> list[str]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel_problems([n for n in wheel.namelist() if not n.endswith("/")], tracked())
    with tarfile.open(path) as archive:
        return sdist_problems([m.name for m in archive.getmembers() if not m.isdir()], tracked())


def main(paths: list[str]) -> int:
    bad = False
    for path in map(Path, paths):
        problems = problems_of(path)
        bad = bad or bool(problems)
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {'; '.join(problems) or 'holds what it should'}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
