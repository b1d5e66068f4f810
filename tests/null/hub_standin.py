"""A hub on 127.0.0.1: the real one's headers, byte ranges, a storage host behind a redirect, faults on demand."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PACE_BYTES = 1 << 16


@dataclass
class Hub:
    """What the stand-in holds and how it misbehaves; `asked` records (method, path, Range, Authorization)."""

    files: dict[str, bytes] = field(default_factory=dict)
    """"owner/repository/resolve/revision/name" -> content."""
    plain: set[str] = field(default_factory=set)
    """Paths of files without a SHA-256: their ETag is the git digest."""
    cut_after: list[int] = field(default_factory=list)
    """The next answers end after so many bytes, the connection is closed."""
    refuse: list[int] = field(default_factory=list)
    """The next downloads get these status codes."""
    damage: set[str] = field(default_factory=set)
    """Paths whose content arrives with one bit flipped."""
    no_ranges: bool = False
    pace: float = 0.0
    """Seconds to wait after every 64 KiB."""
    asked: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    endpoint: str = ""

    def downloads(self) -> list[tuple[str, str | None]]:
        """(path, Range) of everything that was read from storage."""
        return [(path, wanted) for method, path, wanted, _ in self.asked if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _note(self) -> None:
        self.hub.asked.append((self.command, self.path, self.headers["Range"], self.headers["Authorization"]))

    def do_HEAD(self) -> None:
        self._note()
        path = self.path.lstrip("/")
        data = self.hub.files.get(path)
        if data is None:
            self._empty(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        if path in self.hub.plain:
            etag = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            self._empty(200, {"ETag": f'"{etag}"', "X-Repo-Commit": "c" * 40}, len(data))
            return
        # Large files: the digest is in the header, the bytes are at another host.
        other = f"http://localhost:{self.server.server_address[1]}/storage/{path}"
        etag = hashlib.sha256(data).hexdigest()
        self._empty(
            302,
            {
                "Location": other,
                "X-Linked-ETag": f'"{etag}"',
                "X-Linked-Size": str(len(data)),
                "X-Repo-Commit": "c" * 40,
            },
        )

    def _empty(self, status: int, headers: dict[str, str], length: int = 0) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def do_GET(self) -> None:
        self._note()
        if self.hub.refuse and "/resolve/" in self.path:
            self._empty(self.hub.refuse.pop(0), {})
            return
        path = self.path.lstrip("/").removeprefix("storage/")
        data = self.hub.files.get(path)
        if data is None:  # the client library asks for this and that
            self._empty(404, {})
            return
        if path in self.hub.damage:
            data = bytes([data[0] ^ 1]) + data[1:]
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        if wanted and not self.hub.no_ranges:
            begin = int(wanted[1])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            data = data[begin:]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self._send(data)

    def _send(self, data: bytes) -> None:
        cut = self.hub.cut_after.pop(0) if self.hub.cut_after else len(data)
        try:
            for at in range(0, min(cut, len(data)), PACE_BYTES):
                self.wfile.write(data[at : min(at + PACE_BYTES, cut)])
                self.wfile.flush()
                if self.hub.pace:
                    threading.Event().wait(self.hub.pace)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client was killed
        if cut < len(data):
            self.close_connection = True


@contextmanager
def standin() -> Iterator[Hub]:
    """A running hub."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
