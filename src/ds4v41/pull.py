"""Published files by name: what there is, where it is, and getting it (see download.py for how).

    pull("q4", "/models")          # the two published parts, joined as they arrive
    pull("owner/repository:file.gguf", ".")

Names, sizes and digests of the known files are data (`data/published-files.json`); those of other files come from the
hub. Needs the extra `ds4v41[hub]`: huggingface-hub finds the files and knows tokens, mirrors (HF_ENDPOINT) and proxies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .checks import path_of
from .download import Part, Progress, Target, download, file_is_right, need_space
from .errors import OptionError, PullError, shown

PUBLISHED = Path(__file__).parent / "data" / "published-files.json"
NAMES = {
    "q4": "DeepSeek-V4.1-Flash-Q4.gguf",
    "q2": "DeepSeek-V4.1-Flash-Q2.gguf",
    "vision": "DeepSeek-V4.1-Flash-Vision.gguf",
}
DRAFTER = "drafter-source"
_REPO_FILE = re.compile(r"([\w.-]+/[\w.-]+):(.+)")
_TIMEOUT = 30.0
_PASSING = frozenset({403, 408, 425, 429, 500, 502, 503, 504})
"""HTTP answers after which asking again may help (403: a signed address that ran out)."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """One file of a pull."""

    path: Path
    size: int
    downloaded: int
    """Bytes that were downloaded now (with dry_run: that would be)."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"path": str(self.path), "bytes": self.size, "downloaded": self.downloaded}


def pull(
    what: str,
    folder: str | PathLike[str] | None = None,
    *,
    revision: str = "main",
    check: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    published: str | PathLike[str] = PUBLISHED,
    endpoint: str | None = None,
    retry_seconds: float = 1.0,
) -> list[Pulled]:
    """Download "q4", "q2", "vision", "drafter-source" or "REPO:FILE" into `folder`; returns what is there now.

    A file appears under its name only when its size and digest are the published ones; a call that was interrupted or
    killed is gone on with by the next. `check` also reads files that are there already. `endpoint`: another hub.
    Raises OptionError for a name, PullError for everything that goes wrong with the download.
    """
    hub = Hub(endpoint)
    targets = find_targets(what, folder, _read_published(path_of("published", published)), hub, revision)
    tell: Progress = progress or (lambda done, total, title: None)
    for target in targets:
        if os.path.exists(target.path):
            _refuse_wrong(target, check and not dry_run, tell)
    if dry_run:
        return [Pulled(t.path, t.size, 0 if os.path.exists(t.path) else t.size - t.have()) for t in targets]
    where = targets[0].path.parent
    where.mkdir(parents=True, exist_ok=True)
    need_space(targets, shutil.disk_usage(where).free)
    done = []
    for target in targets:
        n = 0 if os.path.exists(target.path) else download(target, hub, tell, retry_seconds)
        done.append(Pulled(target.path, target.size, n))
    return done


def find_targets(
    what: str, folder: str | PathLike[str] | None, published: Mapping[str, Any], hub: Hub, revision: str
) -> list[Target]:
    """The files of a name, with sizes and digests. Raises OptionError for a name that means nothing."""
    if not isinstance(what, str):
        raise OptionError(f"pull: expected text, found {shown(what)}")
    here = path_of("folder", "." if folder is None else folder)
    if what in NAMES:
        return [_published_target(NAMES[what], here, published, hub, revision)]
    if what == DRAFTER:
        source = published["drafter_source"]
        repo = source["repository"]
        where = here if folder is not None else Path(repo.partition("/")[2])
        names = [*source["also"], *source["shards"]]
        return [Target(where / name, (hub.part(repo, name, revision),)) for name in names]
    match = _REPO_FILE.fullmatch(what)
    if match is None:
        raise OptionError(f"pull: expected {', '.join([*NAMES, DRAFTER])} or OWNER/REPOSITORY:FILE, found {what!r}")
    repo, name = match.groups()
    if name.startswith("/") or any(piece in ("", ".", "..") for piece in name.split("/")):
        raise OptionError(f"pull: expected a file's path inside the repository, found {name!r}")
    return [Target(here / name.rpartition("/")[2], (hub.part(repo, name, revision),))]


def _published_target(name: str, folder: Path, published: Mapping[str, Any], hub: Hub, revision: str) -> Target:
    files, repo = published["files"], published["repository"]
    parts = []
    for part_name in files[name].get("published_as", [name]):
        known, found = files[part_name], hub.part(repo, part_name, revision)
        if found.size != known["bytes"] or found.sha256 not in (None, known["sha256"]):
            raise PullError(
                f"{found.name}: expected {known['bytes']:,} bytes with SHA-256 {known['sha256']}, the hub has "
                f"{found.size:,} bytes with {found.sha256}: the file was replaced; name an older --revision, or use "
                f"pull {repo}:{part_name} to take it as it is"
            )
        parts.append(Part(repo, part_name, revision, known["bytes"], known["sha256"]))
    target = Target(folder / name, tuple(parts), files[name]["sha256"] if len(parts) > 1 else None)
    if target.size != files[name]["bytes"]:
        raise PullError(f"{PUBLISHED.name}: the parts of {name} do not add up to its {files[name]['bytes']:,} bytes")
    return target


def _refuse_wrong(target: Target, check: bool, progress: Progress) -> None:
    """PullError for a file under the final name that is not the published one; it is never touched."""
    size = target.path.stat().st_size
    if size != target.size:
        raise PullError(
            f"{target.path}: this file exists with {size:,} bytes, the published one has {target.size:,}; move it away"
        )
    if check and not file_is_right(target, progress):
        raise PullError(f"{target.path}: its bytes are not the published ones; move it away and pull again")


def _read_published(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_bytes())
    return data


class Hub:
    """The hub: looks files up through huggingface-hub, reads their bytes itself, from any offset."""

    def __init__(self, endpoint: str | None = None) -> None:
        try:
            self._api: Any = import_module("huggingface_hub")
            constants: Any = import_module("huggingface_hub.constants")
        except ImportError as error:
            raise PullError("pull needs huggingface-hub: pip install 'ds4v41[hub]'") from error
        self.endpoint: str = endpoint or constants.ENDPOINT
        self._tls = ssl.create_default_context()

    def part(self, repo: str, file: str, revision: str) -> Part:
        """Size and digest of a file. Raises PullError when there is none, or without a digest to check it by."""
        meta = self._metadata(repo, file, revision, _refuse)
        etag = (meta.etag or "").lower()
        sha256 = etag if re.fullmatch(r"[0-9a-f]{64}", etag) else None
        sha1 = etag if re.fullmatch(r"[0-9a-f]{40}", etag) else None
        if meta.size is None or not (sha256 or sha1):
            raise PullError(f"{repo}:{file}: the hub states no size or digest, so the file could not be checked")
        return Part(repo, file, revision, meta.size, sha256, sha1)

    def stream(self, part: Part, offset: int) -> Any:
        """The bytes from `offset` on; the address is asked for anew each time, because it may run out."""
        location = self._metadata(part.repo, part.file, part.revision, _pass_on).location
        request = urllib.request.Request(location, headers={"Accept-Encoding": "identity"})
        if offset:
            request.add_header("Range", f"bytes={offset}-")
        token = self._api.get_token()
        if token and urlsplit(location).netloc == urlsplit(self.endpoint).netloc:
            request.add_unredirected_header("Authorization", f"Bearer {token}")  # never to another host
        try:
            answer = urllib.request.urlopen(request, timeout=_TIMEOUT, context=self._tls)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in _PASSING:
                raise OSError(f"the server answered {error.code} {error.reason}") from error
            raise PullError(f"{part.name}: the server answered {error.code} {error.reason}") from error
        _check_range(answer, part, offset)
        return answer

    def _metadata(self, repo: str, file: str, revision: str, fail: Callable[[str, Exception], Exception]) -> Any:
        try:
            url = self._api.hf_hub_url(repo, file, revision=revision, endpoint=self.endpoint)
            return self._api.get_hf_file_metadata(url, timeout=_TIMEOUT)
        except Exception as error:  # its classes differ between its versions and their HTTP libraries
            raise fail(f"{repo}:{file} (revision {revision})", error) from error


def _refuse(name: str, error: Exception) -> Exception:
    first = str(error).strip().splitlines() or [type(error).__name__]
    return PullError(f"{name}: cannot be looked up: {first[0]}")


def _pass_on(name: str, error: Exception) -> Exception:
    return OSError(f"{name}: cannot be looked up: {error}")


def _check_range(answer: Any, part: Part, offset: int) -> None:
    """PullError unless the answer begins at `offset` of a file of the right size."""
    if offset == 0 and answer.status == 200:
        length = answer.headers.get("Content-Length")
        if length is None or int(length) == part.size:
            return
        found = f"{length} bytes"
    else:
        found = answer.headers.get("Content-Range") or f"status {answer.status}"
        if answer.status == 206 and found == f"bytes {offset}-{part.size - 1}/{part.size}":
            return
    answer.close()
    raise PullError(f"{part.name}: expected bytes {offset}-{part.size - 1}/{part.size} from the server, found {found}")
