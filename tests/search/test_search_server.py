"""The page and the API: what clients get, and requests, files and clients that the server refuses and survives."""

import io
import itertools
import os
import re
import shlex
import shutil
import socket
import string
import struct
import subprocess
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlsplit

import av
import httpx
import pytest
from browser import serving
from child_processes import until
from fastapi.routing import APIRoute
from PIL import Image, features
from search_parts import LOCAL, app_of, client_of, connect, find, served, write_clip

from tvr_lightning.search.errors import SearchError, UnreadableError
from tvr_lightning.search.server import UPLOADS, ServerOptions, is_local, serve

PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:3,\n/clip2.mp4\n#EXT-X-ENDLIST\n"
HEAD = b"POST /api/examples HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def client(searcher):
    return client_of(searcher, max_upload=2**20)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A clip that takes a while to decode."""
    return write_clip(tmp_path_factory.mktemp("long") / "long.mp4", 3, frames=3000).read_bytes()


@pytest.fixture
def uploads(tmp_path, monkeypatch):
    """Folder of this test's temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def search(client, **parameters):
    response = client.get("/api/search", params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_query_finds_videos_with_their_moments(client, searcher):
    found = search(client, query="a red square", top=3)["results"]
    assert [r["id"] for r in found] == [r.id for r in find(searcher, "a red square", top=3).results]
    assert {len(r["moments"]) for r in found} <= {3, 4}
    assert all(not r["path"].startswith("/") for r in found), "clients must not learn paths of this machine"
    for parameters, note, count in (
        ({"query": "red square " * 50}, "too long", 8),
        ({"query": "a cat", "folder": "nowhere"}, "no videos in this folder", 0),
    ):
        answer = search(client, **parameters)
        assert note in answer["notes"][0]
        assert len(answer["results"]) == count


def test_videos_are_served_in_byte_ranges_and_with_thumbnails(client, searcher):
    row = searcher.table.videos()[0]
    whole = client.get(f"/api/videos/{row.id}/file")
    assert whole.content == row.path.read_bytes()
    assert whole.headers["content-type"] == "video/mp4"
    part = client.get(f"/api/videos/{row.id}/file", headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, whole.content[10:20])
    thumbnail = client.get(f"/api/videos/{row.id}/image", params={"time": 1.0}).content
    assert thumbnail == searcher.table.thumbnail(row.id, 1.0)
    assert thumbnail[:3] == b"\xff\xd8\xff"


def image(kind):
    content = io.BytesIO()
    Image.new("RGB", (80, 60), "red").save(content, kind)
    return content.getvalue()


def damaged_avif():
    """Refer to an image that the file does not contain; empty if Pillow is too old for AVIF."""
    return image("AVIF").replace(b"pitm\0\0\0\0\0\1", b"pitm\0\0\0\0\0\2") if features.check("avif") else b"AVIF"


def test_an_uploaded_clip_or_image_finds_videos(client, gallery):
    clip = (gallery / "clip3.mp4").read_bytes()
    example = client.post("/api/examples", content=clip, params={"name": "mine.mp4"}).json()
    assert example["name"] == "mine.mp4"
    best = search(client, like=example["id"], top=2)["results"][0]
    assert best["path"] == "clip3.mp4"
    assert best["score"] == pytest.approx(1.0, abs=1e-4)
    assert best["id"] not in [r["id"] for r in search(client, like=best["id"])["results"]]
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        example = client.post("/api/examples?kind=image", content=image(kind)).json()
        assert len(search(client, top=3, like=example["id"])["results"]) == 3


@pytest.mark.parametrize(
    ("address", "parameters", "status", "message"),
    [
        ("search", {"query": "  "}, 422, "The query is empty"),
        ("search", {"like": "0123456789abcdef"}, 404, "no video"),
        ("search", {"like": "nonsense"}, 422, "like"),
        ("search", {"query": ["a", "b"]}, 400, "query is given more than once"),
        ("search", {"query": "a", "min_relevance": 2}, 422, "min_relevance"),
        ("search", {"query": "a", "top": 0}, 422, "top"),
        ("search", {"query": "a", "top": 10**9}, 422, "top"),
        ("search", {"query": "a", "normalize": "yes"}, 422, "normalize"),
        ("search", {"query": "a" * 2001}, 422, "query"),
        ("search", {"query": "a", "folder": "/etc"}, 400, "must be a path inside an indexed folder"),
        ("videos", {"top": 0}, 422, "top"),
        ("videos", {"folder": "../etc"}, 400, "must be a path inside an indexed folder"),
        ("videos/0123456789abcdef/about", {}, 404, "no video"),
        ("videos/0123456789abcdef/file", {}, 404, "no video"),
        ("videos/0123456789abcdef/image", {}, 404, "no thumbnails"),
        ("videos/xyz/file", {}, 422, "video"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(client, address, parameters, status, message):
    response = client.get(f"/api/{address}", params=parameters)
    assert response.status_code == status
    assert message in response.json()["detail"]


def api_routes(app):
    """The methods and paths of the API."""
    return {(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods}


def test_every_route_refuses_unknown_parameters(client, searcher):
    video = searcher.table.videos()[0].id
    routes = api_routes(client.app)
    assert len(routes) == 8
    for method, path in routes:
        response = client.request(method, path.replace("{video}", video), params={"query": "a", "shortest": 5})
        assert response.status_code == 422, path
        assert "is not a parameter of this route" in response.json()["detail"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_documentation_shows_a_working_command_for_every_route(searcher, gallery, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")
    shutil.copy(gallery / "clip3.mp4", tmp_path / "clip.mp4")
    (tmp_path / "photo.jpg").write_bytes(image("JPEG"))
    video = searcher.table.videos()[0].id
    called = set()
    with served(searcher) as address:
        for line in re.findall("^curl .*", page, re.MULTILINE):
            words = shlex.split(line.replace("$TVR_SEARCH_TOKEN", "secret"), comments=True)
            url = re.sub("http://.*?/", address, words[-1]).replace("ID", video)
            run = subprocess.run([*words[:-1], "--fail-with-body", "-sS", url], cwd=tmp_path, capture_output=True)
            assert run.returncode == 0, f"{line}: {run.stdout} {run.stderr}"
            path = urlsplit(url).path.replace(video, "{video}")
            called.add(("POST" if "--data-binary" in words else "GET", path))
    assert called == api_routes(app_of(searcher))
    assert (tmp_path / "frame.jpg").read_bytes()[:2] == b"\xff\xd8"


@pytest.mark.parametrize(
    "address",
    [
        "/api/videos/../../../../etc/passwd/file",
        "/api/videos/..%2f..%2f..%2fetc%2fpasswd/file",
        "/api/videos/%2e%2e%2f%2e%2e%2fetc%2fpasswd/file",
        "/api/videos/%2fetc%2fpasswd/file",
        "/%2e%2e/videos.lance",
        "/page/../server.py",
    ],
)
def test_addresses_cannot_leave_the_served_folders(client, address):
    response = client.get(address)
    assert 400 <= response.status_code < 500
    assert "root:" not in response.text


def png(side):
    """A small file whose header declares a square image of any size."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head, rows = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0), zlib.compress(b"\0" * 1_000_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def clip_without_frames():
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        container.add_stream("libx264", rate=4, width=64, height=64, pix_fmt="yuv420p")
        container.start_encoding()
    return content.getvalue()


@pytest.mark.parametrize(
    ("kind", "body", "status", "message"),
    [
        ("clip", b"", 400, "empty"),
        ("clip", b"\0" * (2**20 + 1), 413, "larger"),
        ("clip", (b"\0" * 2**16 for _ in range(40)), 413, "larger"),  # without a Content-Length
        ("clip", PLAYLIST, 422, "cannot be opened as video"),
        ("clip", clip_without_frames(), 422, "the clip "),
        ("image", b"<html>I am a picture</html>", 422, "the image is not in a supported image format"),
        ("image", png(50_000), 422, "the image cannot be read as an image (Image size"),
        ("image", png(9_000), 422, "the image has 9,000 x 9,000 pixels"),
        ("image", image("JPEG")[:300], 422, "the image cannot be read as an image"),
        ("image", damaged_avif(), 422, "the image "),
        ("sound", b"x", 422, "kind"),
    ],
)
def test_unusable_uploads_are_refused_with_the_reason(client, kind, body, status, message):
    response = client.post("/api/examples", params={"kind": kind}, content=body)
    assert response.status_code == status
    assert message in response.json()["detail"]
    assert "/tmp" not in response.text


def test_pages_of_other_origins_are_refused(client):
    foreign = [{"Sec-Fetch-Site": site} for site in ("cross-site", "same-site")]
    foreign += [{"Origin": o} for o in ("http://elsewhere.example", "null", "http://127.0.0.1:1", "nonsense")]
    own = [{"Sec-Fetch-Site": "same-origin"}, {"Origin": LOCAL}]
    for headers in [*foreign, *own]:
        for answer in (
            client.get("/api/search?query=a", headers=headers),
            client.post("/api/examples?kind=image", content=image("PNG"), headers=headers),
        ):
            assert answer.status_code == (200 if headers in own else 403)
            assert headers in own or "other origins" in answer.json()["detail"]


def test_only_this_machine_can_connect_without_a_token(searcher):
    assert client_of(searcher).get("/api/index").status_code == 200
    assert client_of(searcher, base_url="http://attacker.example").get("/api/index").status_code == 400
    assert ServerOptions().required_token() is None
    assert len(ServerOptions(host="0.0.0.0").required_token() or "") >= 32
    assert all(map(is_local, ("127.0.0.1", "::1", "localhost")))
    assert not any(map(is_local, ("0.0.0.0", "10.0.0.1", "host")))


def test_the_token_opens_the_api_and_the_page(searcher):
    client = client_of(searcher, "secret", "http://box:8000", host="0.0.0.0")
    for address in ("/", "/app.js", "/api/index", "/openapi.json", "/?token=wrong", "/api/index?token=secret"):
        assert client.get(address).status_code == 401, address
    assert client.get("/health").status_code == 200
    for token, status in (("secret", 200), ("secret2", 401)):
        assert client.get("/api/index", headers={"Authorization": f"Bearer {token}"}).status_code == status
    opened = client.get("/?token=secret")
    assert (opened.status_code, opened.headers["location"]) == (303, "/")
    cookie = opened.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert cookie.startswith("tvr_token_8000="), "servers on other ports have other cookies"
    assert client.get("/api/index").status_code == 200, "images are requested with the cookie only"
    for token in ("a+b c", "50%25", "x&y=z", "é;ü"):
        client = client_of(searcher, token)
        assert client.get(f"/?token={quote(token)}").status_code == 303
        assert client.get("/api/index").status_code == 200


def test_the_page_loads_nothing_from_other_hosts_and_cannot_be_embedded(client, searcher):
    page, script, style = (client.get(address) for address in ("/", "/app.js", "/app.css"))
    assert "<script src=" in page.text
    assert not any("://" in content.text for content in (page, script, style))
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert page.headers["x-content-type-options"] == "nosniff"
    video = f"/api/videos/{searcher.table.videos()[0].id}"
    for path in ("/", "/app.js", f"{video}/file", f"{video}/image", "/api/videos/x/file"):
        assert client.get(path).headers["Cross-Origin-Resource-Policy"] == "same-origin", path


def test_a_server_on_ipv6_works_and_a_port_in_use_is_an_error(searcher, monkeypatch, capsys):
    client = client_of(searcher, base_url="http://[::1]:8321", host="::1")
    for headers in ({}, {"Origin": "http://[::1]:8321"}):
        assert client.get("/api/search", params={"query": "a"}, headers=headers).status_code == 200
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    serve(searcher, ServerOptions(host="::1", port=0))
    assert re.match(r"Open http://\[::1\]:\d+/  ", capsys.readouterr().out)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SearchError, match="another --port"):
        serve(searcher, ServerOptions(port=taken.getsockname()[1]))


def test_errors_of_the_index_reveal_no_path(indexed, searcher, monkeypatch, capsys):
    def fail(*_):
        raise UnreadableError(f"{indexed}/videos.lance is in trouble")

    monkeypatch.setattr(searcher.table, "listed", fail)
    response = client_of(searcher).get("/api/videos")
    assert response.status_code == 500
    assert str(indexed) not in response.text
    assert str(indexed) in capsys.readouterr().err


def test_too_many_searches_are_refused(searcher, monkeypatch):
    client = client_of(searcher, max_pending=1)
    original, started, gate = searcher.search, threading.Event(), threading.Event()

    def slow(query):
        started.set()
        assert gate.wait(60)
        return original(query)

    monkeypatch.setattr(searcher, "search", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(search, client, query="a")
        assert started.wait(60)
        refused = client.get("/api/search", params={"query": "a"})
        assert client.get("/health").status_code == 200
        gate.set()
        first.result()
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
    assert "1 searches are in progress or pending. Try again" in refused.json()["detail"]
    search(client, query="a")


def test_one_upload_is_decoded_at_a_time_while_other_requests_are_answered(searcher, clip, uploads):
    app = app_of(searcher, max_decoding=1, max_pending=2)
    limit = app.state.uploads
    with serving(app) as address, ThreadPoolExecutor(6) as pool:
        sent = [pool.submit(httpx.post, address + "api/examples", content=clip, timeout=300) for _ in range(6)]
        until(lambda: limit.borrowed_tokens == 2)
        for path in ("health", "api/search?query=a"):
            assert httpx.get(address + path, timeout=300).status_code == 200
            assert limit.borrowed_tokens, f"{path} was answered while clips are decoded"
        answers = [each.result() for each in sent]
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 2
    refused = answers[statuses.index(429)]
    assert int(refused.headers["Retry-After"]) > 0
    assert "2 uploads are in progress or pending. Try again" in refused.text
    assert not list(uploads.iterdir())


def test_large_many_and_slow_uploads_are_refused_before_the_body_has_arrived(searcher, uploads):
    app = app_of(searcher, max_pending=1, upload_seconds=2.0)
    with serving(app) as address, connect(address) as large, connect(address) as slow, connect(address) as second:
        large.sendall(HEAD % 10**12 + b"abc")
        assert b" 413 " in large.recv(4096).partition(b"\r\n")[0]
        until(lambda: not app.state.uploads.borrowed_tokens)
        slow.sendall(HEAD % 9999 + b"abc")
        until(lambda: app.state.uploads.borrowed_tokens == 1)
        second.sendall(HEAD % 9999)
        assert b" 429 " in second.recv(4096).partition(b"\r\n")[0]
        answer = b""
        while b"seconds" not in answer:
            answer += slow.recv(4096)
        assert b" 408 " in answer.partition(b"\r\n")[0]
        assert b"took longer than 2 seconds" in answer
        assert httpx.get(address + "api/search?query=a").status_code == 200


def test_many_parameters_cost_a_client_without_the_token_no_time(searcher):
    names = "&".join(map("".join, itertools.islice(itertools.product(string.ascii_letters, repeat=3), 15_000)))
    with serving(app_of(searcher, "secret")) as address, connect(address) as line:
        began = time.process_time()
        line.sendall(f"GET /api/videos?{names} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert b" 401 " in line.recv(4096).partition(b"\r\n")[0]
        assert time.process_time() - began < 1.0


def test_interrupted_and_truncated_uploads_leave_no_files(searcher, clip, uploads):
    app, half = app_of(searcher, max_decoding=1), clip[: len(clip) // 2]
    with serving(app) as address:
        for body in (clip, clip, half):
            with connect(address) as line:
                line.sendall(HEAD % len(clip) + body)
                until(lambda: list(uploads.iterdir()))
        until(lambda: not app.state.uploads.borrowed_tokens and not list(uploads.iterdir()))
        truncated = httpx.post(address + "api/examples", content=half, timeout=300)
        assert truncated.status_code == 422
        assert "clip" in truncated.json()["detail"]
        assert not list(uploads.iterdir())


def test_old_files_of_a_killed_server_are_removed_by_the_next(searcher, uploads):
    for name in ("old", "young"):
        (uploads / f"{UPLOADS}{name}").mkdir()
        (uploads / f"{UPLOADS}{name}" / "example").write_bytes(b"a clip")
    os.utime(uploads / f"{UPLOADS}old", (0, 0))
    (uploads / f"{UPLOADS}link").symlink_to(uploads)
    app_of(searcher)
    assert {path.name for path in uploads.iterdir()} == {f"{UPLOADS}link", f"{UPLOADS}young"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_request_of_the_schema_is_a_server_error(searcher):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error

    app = app_of(searcher, "secret", host="0.0.0.0", max_upload=2**16)
    headers = {"Authorization": "Bearer secret"}
    statuses, asked = set(), set()
    options = {"deadline": None, "derandomize": True, "phases": [Phase.generate]}
    for found in schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers).get_all_operations():
        operation = found.ok()
        asked.add(operation.path)

        @given(case=operation.as_strategy())
        @settings(max_examples=40, suppress_health_check=list(HealthCheck), **options)
        def ask(case):
            response = case.call(headers=headers)
            statuses.add(response.status_code)
            case.validate_response(response, checks=[not_a_server_error])

        ask()
    assert 200 in statuses
    assert asked == set(app.openapi()["paths"])
