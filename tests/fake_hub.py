"""A server that answers huggingface_hub as the hub does, over directories on disk.

Repositories are the directories ``root/owner/name`` at one commit, the branch ``main`` and the tag
``v1``, which one with a file named ``.untagged`` lacks. One with a file named ``.gated`` lists its
files and hands out none.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["FakeHub", "serve_hub"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """The running server: its address, and what was asked of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bytes_sent = 0
        self.fetched: list[str] = []
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, send_body: bool) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._api(match[1], match[2] or "revision", match[3] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3], send_body)
        else:
            self._error(404, "EntryNotFound")

    def _api(self, repo: str, what: str, revision: str) -> None:
        directory = self.hub.root / repo
        if not directory.is_dir():
            return self._error(404, "RepoNotFound")
        tags = () if (directory / ".untagged").exists() else ("v1",)
        if revision not in ("main", COMMIT, *tags):
            return self._error(404, "RevisionNotFound")
        files = [f for f in sorted(directory.iterdir()) if f.name not in (".gated", ".untagged")]
        if what == "tree":
            listing = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                for f in files
            ]
            return self._json(listing)
        siblings = [{"rfilename": f.name, "size": f.stat().st_size} for f in files]
        return self._json({"id": repo, "sha": COMMIT, "siblings": siblings, "tags": []})

    def _file(self, repo: str, revision: str, name: str, send_body: bool) -> None:
        file = self.hub.root / repo / name
        if (file.parent / ".gated").exists():
            return self._error(403, "GatedRepo")
        if not file.is_file():
            return self._error(404, "EntryNotFound")
        content = file.read_bytes()
        status, size = 200, len(content)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), int(match[2] or size - 1)
            content, status = content[first : last + 1], 206
        self.send_response(status)
        self.send_header("ETag", f'"{size:x}{abs(hash((repo, name))):x}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{size}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if send_body:
            self.wfile.write(content)
            self.hub.bytes_sent += len(content)
            self.hub.fetched.append(f"{repo}/{name}")

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "no")
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serve_hub(root: Path) -> Iterator[FakeHub]:
    """Serve the repositories below ``root`` while the context lasts."""
    hub = FakeHub(root)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
