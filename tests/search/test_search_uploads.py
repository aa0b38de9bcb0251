"""Uploads: a limited number is decoded at the same time, other requests are answered, and no file stays."""

import http.client
import os
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from browser import serving
from search_parts import write_clip

pytest.importorskip("fastapi", reason="the extra `search` is not installed")
pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
pytest.importorskip("httpx", reason="httpx drives the application in tests")
from starlette.testclient import TestClient

from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.server import UPLOADS, ServerOptions, create_app


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
    """Wait for a condition, and return whether it became true."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_one_upload_is_decoded_at_a_time_and_others_are_answered(searcher, clip, uploads):
    app = create_app(searcher, ServerOptions(max_decoding=1, max_pending=2))
    with serving(app) as made, ThreadPoolExecutor(8) as pool:
        address = made.removeprefix("http://").rstrip("/")
        sent = [pool.submit(ask, address, "POST", "/api/examples", clip) for _ in range(8)]
        assert until(lambda: app.state.uploads.borrowed_tokens == 2)
        for path in ("/health", "/api/search?query=a"):
            assert ask(address, "GET", path)[0] == 200
            assert app.state.uploads.borrowed_tokens, f"{path} was answered while clips are decoded"
        answers = [each.result() for each in sent]
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 2
    headers, message = next((headers, message) for status, headers, message in answers if status == 429)
    assert int(headers["Retry-After"]) > 0
    assert "2 uploads are in progress or pending. Try again" in message
    assert not list(uploads.iterdir())


def test_too_many_uploads_are_refused_before_the_body_arrives(searcher, uploads):
    app = create_app(searcher, ServerOptions(max_pending=1))
    head = b"POST /api/examples HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999\r\n\r\n"
    with serving(app) as made:
        port = int(made.rpartition(":")[2].strip("/"))
        with (
            socket.create_connection(("127.0.0.1", port)) as first,
            socket.create_connection(("127.0.0.1", port)) as line,
        ):
            first.sendall(head)
            assert until(lambda: app.state.uploads.borrowed_tokens == 1)
            line.sendall(head)
            assert b" 429 " in line.recv(4096).partition(b"\r\n")[0]
        assert ask(f"127.0.0.1:{port}", "GET", "/api/search?query=a")[0] == 200


def test_clients_that_leave_and_clips_that_break_leave_no_files(searcher, clip, uploads):
    app = create_app(searcher, ServerOptions(max_decoding=1))
    head = f"POST /api/examples HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(clip)}\r\n\r\n".encode()
    with serving(app) as made:
        port = int(made.rpartition(":")[2].strip("/"))
        for body in (clip, clip, clip[: len(clip) // 2]):
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(head + body)
                assert until(lambda: list(uploads.iterdir()))
        assert until(lambda: not app.state.uploads.borrowed_tokens and not list(uploads.iterdir()))
        assert ask(f"127.0.0.1:{port}", "POST", "/api/examples", clip[: len(clip) // 2])[0] == 422
        assert not list(uploads.iterdir())


def test_old_files_of_a_killed_server_are_removed_by_the_next(searcher, uploads):
    for name in ("old", "young"):
        (uploads / f"{UPLOADS}{name}").mkdir()
        (uploads / f"{UPLOADS}{name}" / "example").write_bytes(b"a clip")
    os.utime(uploads / f"{UPLOADS}old", (0, 0))
    (uploads / f"{UPLOADS}link").symlink_to(uploads)
    create_app(searcher, ServerOptions())
    assert {path.name for path in uploads.iterdir()} == {f"{UPLOADS}link", f"{UPLOADS}young"}


def test_an_option_out_of_range_is_refused_before_anything_is_read(searcher):
    client = TestClient(create_app(searcher, ServerOptions()), base_url="http://127.0.0.1")
    assert client.post("/api/examples", params={"kind": "sound"}, content=b"x").status_code == 422
