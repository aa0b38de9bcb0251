"""A local server with the interface of the Hugging Face Hub: downloads in ranges, and pushes of models."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """Serves repositories, which are contents by file name; a client with the token "good" may push."""

    daemon_threads = True

    def __init__(self, repositories):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.private, self.full = repositories, set(), False
        self.breaks_off, self.breaks_once = set(), set()  # files whose downloads end halfway, always or once
        self.asked = []  # method, path, range

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        path, range_ = self.path.partition("?")[0], self.headers.get("Range")
        self.server.asked.append((self.command, path, range_))
        parts = re.sub("^/(api/)?(models/|datasets/)?", "", path).split("/")
        files, file = self.server.repositories.get("/".join(parts[:2])), parts[-1]
        if files is None:
            return self.send({}, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, 404)
        if path.startswith("/api/"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            return self.send({"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": siblings})
        if file not in files:
            return self.send({}, {"X-Error-Code": "EntryNotFound"}, 404)
        content = files[file]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        start = int((range_ or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if range_:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = self.command == "GET"
        broken = file in self.server.breaks_off or (body and file in self.server.breaks_once)
        if body:
            self.server.breaks_once.discard(file)
        return self.send(content[start:], headers, 206 if range_ else 200, broken)

    do_HEAD = do_GET  # noqa: N815  http.server's name

    def do_POST(self):
        hub, body = self.server, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = self.path.partition("?")[0].strip("/").split("/")
        if "Bearer good" not in self.headers.get("Authorization", ""):
            return self.send({"error": "Invalid token"}, status=401)
        if parts[-2:] == ["repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'user'}/{asked['name']}"
            hub.repositories[name] = {}
            if asked.get("private") or asked.get("visibility") == "private":
                hub.private.add(name)
            return self.send({"url": f"{hub.address}/{name}", "id": name, "name": name})
        if parts[-1] == "validate-yaml":
            return self.send({"errors": [], "warnings": []})
        if "preupload" in parts:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return self.send({"files": [file | {"shouldIgnore": False} for file in files]})
        if hub.full:
            return self.send({"error": "storage limit reached"}, status=400)
        name = "/".join(parts[2:4])
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                hub.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.send({"commitUrl": f"{hub.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "success": True})

    def do_DELETE(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        del self.server.repositories[f"{asked.get('organization') or 'user'}/{asked['name']}"]
        self.send({})

    def send(self, content, headers=None, status=200, broken=False):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if broken else content)
            if broken:
                self.wfile.flush()
                self.connection.close()
                self.close_connection = True


@contextmanager
def serving(repository, files):
    """Serve one repository, whose files are in a folder or a dictionary."""
    if isinstance(files, Path):
        files = {path.name: path.read_bytes() for path in sorted(files.iterdir())}
    hub = Hub({repository: files})
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
