"""A hub on this machine, as far as huggingface_hub asks: repositories' file lists, and files with ranges."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


@dataclass
class Hub:
    """What the hub has, and what it was asked."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    """Needed for everything."""
    gated: bool = False
    """Files may be listed, but not read, as on the real one."""
    status: int | None = None
    """Answer everything with it."""
    break_at: int | None = None
    """Close the connection of the next file after so many bytes."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range)"""
    url: str = ""

    def downloads(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if hub.status is not None:
                return self._send(hub.status, b"out of order")
            if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            if path.startswith("/api/models/"):
                return self._list(path.removeprefix("/api/models/"))
            repository, _, file = path[1:].partition("/resolve/main/")
            if hub.gated:
                return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return self._file(hub.repositories[repository][file])

        def _list(self, repository: str) -> None:
            files = hub.repositories.get(repository)
            if files is None:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            body = {"_id": "0", "id": repository, "sha": COMMIT, "siblings": siblings}
            return self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def _file(self, content: bytes) -> None:
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            wanted = self.headers.get("Range")
            if wanted is None:
                return self._send(200, content, headers)
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self._send(206, content[start:], headers)

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.break_at is not None and "/resolve/" in self.path:
                body, hub.break_at, self.close_connection = body[: hub.break_at], None, True
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
