"""A local server with the interface of the Hugging Face Hub: the files of a dataset, in ranges."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder as those of one dataset repository."""

    daemon_threads = True

    def __init__(self, repository: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repository = repository
        self.folder = folder
        self.breaks_off: set[str] = set()  # files whose every answer ends halfway
        self.breaks_once: set[str] = set()
        self.asked: list[tuple[str, str, str | None]] = []  # method, file or path, range

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        path, range_ = self.path.partition("?")[0], self.headers.get("Range")
        repository, folder = self.server.repository, self.server.folder
        self.server.asked.append((self.command, path, range_))
        if path.startswith(f"/api/datasets/{repository}"):
            files = [{"rfilename": file.name, "size": file.stat().st_size} for file in sorted(folder.iterdir())]
            self.send(json.dumps({"id": repository, "sha": COMMIT, "siblings": files}).encode(), {})
            return
        name = path.removeprefix(f"/datasets/{repository}/resolve/{COMMIT}/")
        if name == path or not (folder / name).is_file():
            self.send(b"not here", {"X-Error-Code": "RepoNotFound"}, 404)
            return
        content = (folder / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int((range_ or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if range_:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = self.command == "GET"
        broken = name in self.server.breaks_off or (body and name in self.server.breaks_once)
        if body:
            self.server.breaks_once.discard(name)
        self.send(content[start:], headers, 206 if range_ else 200, broken)

    do_HEAD = do_GET  # noqa: N815  http.server's name

    def send(self, content: bytes, headers: dict[str, str], status: int = 200, broken: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if broken else content)
            if broken:
                self.wfile.flush()
                self.connection.close()
                self.close_connection = True


@contextmanager
def serving(repository: str, folder: Path) -> Iterator[Hub]:
    hub = Hub(repository, folder)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
