"""A local server with the interface of the Hugging Face Hub for the files of a dataset, in ranges."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder as those of one dataset repository."""

    daemon_threads = True

    def __init__(self, repository, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repository, self.folder = repository, folder
        self.breaks_off, self.breaks_once = set(), set()  # files whose downloads end halfway, always or once
        self.asked = []  # method, file or path, range

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
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

    def send(self, content, headers, status=200, broken=False):
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
def serving(repository, folder):
    hub = Hub(repository, folder)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
