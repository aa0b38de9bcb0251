"""Uploads: so many are decoded at once and no more, others are answered meanwhile, and no file stays."""

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from browser import serving
from search_parts import write_clip

pytest.importorskip("fastapi", reason="the extra `search` is not installed")
pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
pytest.importorskip("httpx", reason="httpx drives the application in tests")
from starlette.testclient import TestClient

from tvr_lightning.search import Searcher, SearchError
from tvr_lightning.search.limits import UPLOADS, upload_folder
from tvr_lightning.search.server import ServerOptions, create_app

KILLED = """
import sys
from tvr_lightning.search.limits import upload_folder
with upload_folder() as folder:
    (folder / "example").write_bytes(b"a clip")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def searcher(indexed):
    with Searcher(indexed) as made:
        yield made


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A clip that takes a while to decode."""
    return write_clip(tmp_path_factory.mktemp("long") / "long.mp4", 3, frames=4000).read_bytes()


@pytest.fixture
def uploads(tmp_path, monkeypatch):
    """Folder of this test's temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def ask(address, method, path, body=None):
    connection = http.client.HTTPConnection(address, timeout=300)
    connection.request(method, path, body)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, content


def until(condition, seconds=60):
    """Wait for a condition; says whether it came."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def decoders():
    return sum(thread.name.startswith("tvr-decode") for thread in threading.enumerate())


def test_more_uploads_than_wait_are_refused_and_others_are_answered(searcher, clip, uploads):
    before = decoders()
    app = create_app(searcher, ServerOptions(max_decoding=1, max_undecoded=1))
    with serving(app) as made, ThreadPoolExecutor(8) as pool:
        address = made.removeprefix("http://").rstrip("/")
        sent = [pool.submit(ask, address, "POST", "/api/examples", clip) for _ in range(8)]
        assert until(lambda: app.state.decoding.inside == 2)
        for path in ("/health", "/api/search?query=a"):
            assert ask(address, "GET", path)[0] == 200
            assert app.state.decoding.inside, f"{path} was answered while clips are decoded"
        answers = [each.result() for each in sent]
        assert decoders() - before <= 1
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 2
    headers, said = next((headers, said) for status, headers, said in answers if status == 503)
    assert int(headers["Retry-After"]) > 0
    assert "2 uploads are in progress or pending. Try again" in said
    assert not list(uploads.iterdir())


def test_a_full_queue_refuses_before_the_body_comes(searcher, uploads):
    app = create_app(searcher, ServerOptions(max_decoding=1, max_undecoded=0))
    with app.state.decoding.enter(), serving(app) as made:
        port = int(made.rpartition(":")[2].strip("/"))
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"POST /api/examples HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999\r\n\r\n")
            assert b" 503 " in line.recv(4096).partition(b"\r\n")[0]
        assert ask(f"127.0.0.1:{port}", "GET", "/api/search?query=a")[0] == 200


def test_clients_that_leave_and_clips_that_break_leave_no_files(searcher, clip, uploads):
    app = create_app(searcher, ServerOptions(max_decoding=1, max_undecoded=9))
    head = f"POST /api/examples HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(clip)}\r\n\r\n".encode()
    with serving(app) as made:
        port = int(made.rpartition(":")[2].strip("/"))
        for body in (clip, clip, clip, clip[: len(clip) // 2]):
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(head + body)
                assert until(lambda: list(uploads.iterdir()))
        assert until(lambda: not app.state.decoding.inside and not list(uploads.iterdir()))
        assert ask(f"127.0.0.1:{port}", "POST", "/api/examples", clip[: len(clip) // 2])[0] == 422
        assert not list(uploads.iterdir())


def test_files_of_a_killed_server_are_removed_by_the_next(searcher, uploads, ended):
    command = [sys.executable, "-c", KILLED]
    process = ended(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    left = process.stdout.readline().strip()
    os.utime(left, (0, 0))
    create_app(searcher, ServerOptions())
    assert [path.name for path in Path(left).iterdir()] == ["example"], "a server that lives keeps its files"
    process.kill()
    process.wait()
    (uploads / f"{UPLOADS}link").symlink_to(left)
    with upload_folder() as young:
        create_app(searcher, ServerOptions())
        assert young.is_dir()
    assert [path.name for path in uploads.iterdir()] == [f"{UPLOADS}link"]


@pytest.mark.parametrize("options", [{"max_decoding": 0}, {"max_undecoded": -1}])
def test_bounds_of_decoding(options):
    with pytest.raises(SearchError, match="max_decoding must be at least 1"):
        ServerOptions(**options)


def test_an_option_out_of_range_is_said_before_anything_is_read(searcher, uploads):
    client = TestClient(create_app(searcher, ServerOptions()), base_url="http://127.0.0.1")
    assert client.post("/api/examples", params={"kind": "sound"}, content=b"x").status_code == 422
    with pytest.raises(SearchError, match="at least 1"):
        searcher.search_video(uploads / "nothing.mp4", top=0)
