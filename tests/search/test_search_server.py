"""The page and the API: what clients can and cannot get."""

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
from browser import serving
from search_parts import find, write_clip

pytest.importorskip("fastapi", reason="the extra `search` is not installed")
pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
pytest.importorskip("httpx", reason="httpx drives the application in tests")
from starlette.testclient import TestClient

from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import BusyError, SearchError, UnreadableError
from tvr_lightning.search.indexing import index
from tvr_lightning.search.server import ServerOptions, create_app, is_local, serve

LOCAL = "http://127.0.0.1"


@pytest.fixture(scope="module")
def searcher(indexed):
    with Searcher(indexed) as made:
        yield made


@pytest.fixture(scope="module")
def client(searcher):
    return TestClient(create_app(searcher, ServerOptions(max_upload=2**20)), base_url=LOCAL)


def results(response):
    assert response.status_code == 200, response.text
    return response.json()["results"]


def test_a_query_finds_videos_with_their_moments(client, searcher):
    found = results(client.get("/api/search", params={"query": "a red square", "top": 3}))
    expected = find(searcher, "a red square", top=3).results
    assert [r["id"] for r in found] == [r.id for r in expected]
    assert all(len(r["moments"]) == 3 or len(r["moments"]) == 4 for r in found)
    assert all(not r["path"].startswith("/") for r in found), "clients must not learn paths of this machine"


def test_videos_come_in_ranges_of_bytes(client, searcher):
    row = searcher.catalog.videos()[0]
    whole = client.get(f"/api/videos/{row.id}/file")
    assert whole.content == row.path.read_bytes()
    assert whole.headers["content-type"] == "video/mp4"
    part = client.get(f"/api/videos/{row.id}/file", headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, whole.content[10:20])
    beyond = client.get(f"/api/videos/{row.id}/file", headers={"Range": f"bytes={len(whole.content)}-"})
    assert beyond.status_code == 416


def test_thumbnails_of_a_video(client, searcher):
    video = searcher.catalog.videos()[0].id
    picture = client.get(f"/api/videos/{video}/picture", params={"time": 1.0})
    assert picture.content[:3] == b"\xff\xd8\xff"
    assert picture.content == searcher.catalog.thumbnail(video, 1.0)


def test_an_uploaded_clip_finds_itself(client, gallery, searcher):
    clip = gallery / "clip3.mp4"
    kept = client.post("/api/examples", content=clip.read_bytes(), params={"name": "mine.mp4"}).json()
    assert kept["name"] == "mine.mp4"
    found = results(client.get("/api/search", params={"like": kept["id"], "top": 2}))
    assert found[0]["path"] == "clip3.mp4"
    assert found[0]["score"] == pytest.approx(1.0, abs=1e-4)
    others = results(client.get("/api/search", params={"like": found[0]["id"]}))
    assert found[0]["id"] not in [r["id"] for r in others]


@pytest.mark.parametrize(
    ("address", "parameters", "status", "said"),
    [
        ("/api/search", {"query": "  "}, 422, "The query is empty"),
        ("/api/search", {}, 422, "empty"),
        ("/api/search", {"like": "0123456789abcdef"}, 404, "no video"),
        ("/api/search", {"like": "nonsense"}, 422, "like"),
        ("/api/search", {"query": ["a", "b"]}, 400, "query is given more than once"),
        ("/api/search", {"like": ["0123456789abcdef"] * 2}, 400, "like is given more than once"),
        ("/api/search", {"query": "a", "min_relevance": 2}, 422, "min_relevance"),
        ("/api/videos", {"top": 0}, 422, "top"),
        ("/api/videos", {"shortest": 5}, 422, "shortest"),
        ("/api/videos/0123456789abcdef/about", {}, 404, "no video"),
        ("/api/search", {"query": "a", "top": 0}, 422, "top"),
        ("/api/search", {"query": "a", "top": 10**9}, 422, "top"),
        ("/api/search", {"query": "a" * 2001}, 422, "query"),
        ("/api/search", {"query": "a", "rerank": "tcmgc"}, 400, "no scorer"),
        ("/api/search", {"query": "a", "normalize": "yes"}, 422, "normalize"),
        ("/api/search", {"query": "a", "folder": "/etc"}, 400, "must be a path inside an indexed folder"),
        ("/api/videos", {"folder": "../etc"}, 400, "must be a path inside an indexed folder"),
        ("/api/videos/0123456789abcdef/file", {}, 404, "no video"),
        ("/api/videos/0123456789abcdef/picture", {}, 404, "no thumbnails"),
        ("/api/search", {"query": "a", "shortest": 5}, 422, "shortest"),
        ("/api/videos/xyz/file", {}, 422, "video"),
    ],
)
def test_what_cannot_be_served_is_said(client, address, parameters, status, said):
    response = client.get(address, params=parameters)
    assert response.status_code == status
    assert said in response.json()["detail"]


@pytest.mark.parametrize(
    "address",
    [
        "/api/videos/../../../../etc/passwd/file",
        "/api/videos/..%2f..%2f..%2fetc%2fpasswd/file",
        "/api/videos/%2e%2e%2f%2e%2e%2fetc%2fpasswd/file",
        "/api/videos/..%252f..%252fetc%252fpasswd/file",
        "/api/videos/%2fetc%2fpasswd/file",
        "/api/videos/....//....//etc/passwd/file",
        "/../catalog.sqlite",
        "/%2e%2e/catalog.sqlite",
        "/page/../server.py",
    ],
)
def test_no_path_leads_out(client, address):
    response = client.get(address)
    assert 400 <= response.status_code < 500
    assert "root:" not in response.text


def test_a_query_longer_than_the_context_is_cut_and_said(client):
    answer = client.get("/api/search", params={"query": "red square " * 50}).json()
    assert "too long" in answer["notes"][0]
    assert answer["results"]


def test_no_results_are_said(client):
    answer = client.get("/api/search", params={"query": "a cat", "folder": "nowhere"}).json()
    assert answer["results"] == []
    assert "no videos in this folder" in answer["notes"][0]


def test_uploads_that_are_no_clips(client, gallery):
    whole = (gallery / "clip1.mp4").read_bytes()
    for content, status, said in (
        (b"", 400, "empty"),
        (b"\0" * (2**20 + 1), 413, "larger"),
        (b"<html>I am an mp4</html>", 422, "video"),
        (whole[: len(whole) // 3], 422, "clip"),
    ):
        response = client.post("/api/examples", content=content, headers={"Content-Type": "video/mp4"})
        assert response.status_code == status, response.text
        assert said in response.json()["detail"]
        assert "/tmp" not in response.text


def test_a_playlist_does_not_decide_what_is_read(client, gallery):
    secret = (gallery / "clip1.mp4").resolve()
    hls = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:3,\n{secret}\n#EXT-X-ENDLIST\n"
    concat = f"ffconcat version 1.0\nfile {secret}\n"
    for playlist in (hls, concat, hls.replace(str(secret), "http://127.0.0.1:9/clip.ts")):
        response = client.post("/api/examples", content=playlist.encode())
        assert response.status_code == 422
        assert "cannot be opened as video" in response.json()["detail"]


def test_an_upload_that_dawdles_ends(searcher):
    app = create_app(searcher, ServerOptions(upload_seconds=0.3))
    with (
        serving(app) as address,
        socket.create_connection(("127.0.0.1", int(address.split(":")[2].strip("/")))) as line,
    ):
        line.sendall(b"POST /api/examples HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999\r\n\r\nabc")
        answer = line.recv(4096)
        while b"seconds" not in answer:
            answer += line.recv(4096)
        line.close()
    assert b" 408 " in answer.partition(b"\r\n")[0]
    assert b"took longer than 0.3 seconds" in answer


def test_pages_of_other_origins_cannot_upload(client, gallery):
    content = (gallery / "clip3.mp4").read_bytes()
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        response = client.post("/api/examples", content=content, headers={"Sec-Fetch-Site": site})
        assert response.status_code == status


def test_a_body_without_length_is_measured_too(client):
    chunks = (b"\0" * 2**16 for _ in range(40))
    assert client.post("/api/examples", content=chunks).status_code == 413


def test_only_this_machine_may_ask_without_a_token(searcher):
    app = create_app(searcher, ServerOptions())
    assert TestClient(app, base_url=LOCAL).get("/api/index").status_code == 200
    assert TestClient(app, base_url="http://attacker.example").get("/api/index").status_code == 400
    assert ServerOptions().required_token() is None
    assert len(ServerOptions(host="0.0.0.0").required_token() or "") >= 32
    assert [is_local(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "host")] == [True] * 3 + [
        False
    ] * 3


def test_the_token_opens_the_api_and_the_page(searcher):
    app = create_app(searcher, ServerOptions(host="0.0.0.0"), "secret")
    client = TestClient(app, base_url="http://box:8000", follow_redirects=False)
    for address in (
        "/",
        "/app.js",
        "/api/index",
        "/openapi.json",
        "/?token=wrong",
        "/api/index?token=secret",
    ):
        assert client.get(address).status_code == 401, address
    assert client.get("/health").status_code == 200
    assert client.get("/api/index", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.get("/api/index", headers={"Authorization": "Bearer secret2"}).status_code == 401
    opened = client.get("/?token=secret")
    assert (opened.status_code, opened.headers["location"]) == (303, "/")
    cookie = opened.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert cookie.startswith("tvr_token_8000="), "servers on other ports have other cookies"
    assert client.get("/api/index").status_code == 200, (
        "the cookie gives access to images, whose requests have no such header"
    )


@pytest.mark.parametrize("token", ["a+b c", "50%25", "x&y=z", "é;ü"])
def test_a_token_with_special_characters_opens_the_page(searcher, token):
    client = TestClient(create_app(searcher, ServerOptions(), token), base_url=LOCAL, follow_redirects=False)
    assert client.get(f"/?token={quote(token)}").status_code == 303
    assert client.get("/api/index").status_code == 200


def test_too_many_searches_get_429(searcher, monkeypatch):
    client = TestClient(create_app(searcher, ServerOptions(max_pending=1)), base_url=LOCAL)
    search, started, gate = searcher.search, threading.Event(), threading.Event()

    def slow(query):
        started.set()
        assert gate.wait(60)
        return search(query)

    monkeypatch.setattr(searcher, "search", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.get, "/api/search", params={"query": "a"})
        assert started.wait(60)
        refused = client.get("/api/search", params={"query": "a"})
        assert client.get("/health").status_code == 200
        gate.set()
        assert first.result().status_code == 200
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
    assert "1 searches are in progress or pending. Try again" in refused.json()["detail"]
    assert client.get("/api/search", params={"query": "a"}).status_code == 200


def test_the_page_needs_nothing_from_elsewhere(client):
    page, script, style = (client.get(address).text for address in ("/", "/app.js", "/app.css"))
    assert "<script src=" in page
    for content in (page, script, style):
        assert "://" not in content
    headers = client.get("/").headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["x-content-type-options"] == "nosniff"


def test_the_schema_names_every_answer(client):
    schema = client.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        "/api/search",
        "/api/videos/{video}/file", "/api/videos/{video}/picture", "/api/index",
        "/health", "/api/examples", "/api/videos", "/api/videos/{video}/about",
    }  # fmt: skip
    assert "429" in schema["paths"]["/api/search"]["get"]["responses"]


def test_a_link_that_later_leads_out_is_not_followed(tmp_path, sources):
    outside, folder = tmp_path / "outside.mp4", tmp_path / "videos"
    write_clip(folder / "inner.mp4", 1)
    write_clip(outside, 2)
    index([folder], tmp_path / "index", sources[1:], progress=False)
    (folder / "inner.mp4").unlink()
    (folder / "inner.mp4").symlink_to(outside)
    with Searcher(tmp_path / "index") as searcher:
        client = TestClient(create_app(searcher, ServerOptions()), base_url=LOCAL)
        response = client.get(f"/api/videos/{searcher.catalog.videos()[0].id}/file")
        assert response.status_code == 400
        assert "not a video in a folder that may be served" in response.json()["detail"]


def test_the_address_of_a_server_on_ipv6_works(searcher, monkeypatch, capsys):
    app = create_app(searcher, ServerOptions(host="::1"))
    client = TestClient(app, base_url="http://[::1]:8321")
    for headers in ({}, {"Origin": "http://[::1]:8321"}):
        assert client.get("/api/search", params={"query": "a"}, headers=headers).status_code == 200
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    serve(searcher, ServerOptions(host="::1", port=0))
    assert re.match(r"Open http://\[::1\]:\d+/  ", capsys.readouterr().out)


@pytest.mark.parametrize(("error", "status"), [(BusyError, 503), (UnreadableError, 500)])
def test_errors_of_the_index_reveal_no_path(indexed, error, status, monkeypatch, capsys):
    def fails(*_):
        raise error(f"{indexed}/catalog.sqlite is in trouble")

    with Searcher(indexed) as searcher:
        client = TestClient(create_app(searcher, ServerOptions()), base_url=LOCAL)
        monkeypatch.setattr(searcher.catalog, "listed", fails)
        response = client.get("/api/videos")
    assert response.status_code == status
    assert str(indexed) not in response.text
    assert str(indexed) in capsys.readouterr().err


def test_a_port_in_use_is_said(searcher):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SearchError, match="another --port"):
            serve(searcher, ServerOptions(port=port))


def test_a_truncated_upload_over_a_socket_costs_nothing(searcher):
    with serving(create_app(searcher, ServerOptions())) as address:
        port = int(address.rpartition(":")[2].strip("/"))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"POST /api/examples HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999\r\n\r\nabc")
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"status": "ok"}
