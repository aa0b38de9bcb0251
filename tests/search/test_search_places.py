"""An index from an untrusted user: which files it serves and reads, and where it sends queries."""

import os
import re
import secrets
import shlex
import shutil
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import forked
import pytest
from search_parts import find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.data.recover_captions import Description, write_captions
from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.indexing import index


@contextmanager
def asking(folder, *videos):
    """A client of the served index, and the ids of its videos by file name."""
    pytest.importorskip("fastapi", reason="the extra `search` is not installed")
    pytest.importorskip("httpx", reason="httpx drives the application in tests")
    from starlette.testclient import TestClient

    from tvr_lightning.search.server import ServerOptions, create_app

    with Searcher(folder) as searcher:
        app = create_app(searcher, ServerOptions(videos=tuple(videos)))
        ids = {row.path.name: row.id for row in searcher.catalog.videos()}
        yield TestClient(app, base_url="http://127.0.0.1"), ids


def own_copy(indexed, folder, identity=None, **facts):
    """An index from an untrusted user, with facts and an identity of their choice."""
    shutil.copytree(indexed, folder)
    with closing(Catalog(folder)) as catalog:
        for name, value in facts.items():
            catalog.set_fact(name, value)
        catalog.set_fact("identity", identity or secrets.token_hex(16))
    return folder


def point(folder, name, path):
    """Replace the path of a video in the index by another file."""
    with closing(sqlite3.connect(folder / "catalog.sqlite")) as catalog, catalog:
        values = (os.fsencode(path), f"%/{name}")
        catalog.execute("UPDATE videos SET path = ? WHERE CAST(path AS TEXT) LIKE ?", values)


def test_a_strangers_index_hands_out_no_file_of_this_machine(indexed, gallery, tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("SECRET KEY")
    folder = own_copy(indexed, tmp_path / "index", roots=["/"])
    point(folder, "clip0.mp4", secret)
    with asking(folder) as (client, ids):
        for name in ("id_rsa", "clip1.mp4"):
            answer = client.get(f"/api/videos/{ids[name]}/file")
            assert answer.status_code == 400
            assert f"{name} is not a video in a folder that may be served" in answer.json()["detail"]
        assert client.get("/api/search", params={"query": "a"}).status_code == 200, "searching continues"
    with asking(folder, tmp_path / "gone") as (client, ids):
        answer = client.get(f"/api/videos/{ids['clip1.mp4']}/file")
        assert answer.status_code == 400
        assert str(tmp_path) not in answer.text
    with asking(folder, gallery) as (client, ids):
        assert client.get(f"/api/videos/{ids['clip1.mp4']}/file").content == (gallery / "clip1.mp4").read_bytes()
        assert client.get(f"/api/videos/{ids['id_rsa']}/file").status_code == 400
    with asking(folder, gallery, tmp_path) as (client, ids):
        answer = client.get(f"/api/videos/{ids['id_rsa']}/file")
        assert "is not a video" in answer.json()["detail"], "of named folders, videos alone"
        assert "SECRET" not in answer.text


def test_links_of_a_served_folder_that_lead_out_are_refused(indexed, tmp_path):
    shown = tmp_path / "shown"
    outside = write_clip(tmp_path / "outside.mp4", 2)
    inside = write_clip(shown / "inside.mp4", 1)
    (shown / "out.mp4").symlink_to(outside)
    (shown / "linked").symlink_to(tmp_path)
    (shown / "again.mp4").symlink_to(inside)
    folder = own_copy(indexed, tmp_path / "index", roots=["/"])
    for number, path in enumerate((shown / "out.mp4", shown / "linked" / "outside.mp4", shown / "again.mp4")):
        point(folder, f"clip{number}.mp4", path)
    with asking(folder, shown) as (client, ids):
        statuses = {name: client.get(f"/api/videos/{ids[name]}/file").status_code for name in ids}
    assert [statuses[name] for name in ("out.mp4", "outside.mp4", "again.mp4")] == [400, 400, 200]


def test_ones_own_index_plays_without_a_word(gallery, tmp_path, sources):
    out = tmp_path / "index"
    index([gallery], out, sources[1:], progress=False)
    moved = tmp_path / "moved"
    out.rename(moved)
    with asking(moved) as (client, ids):
        assert client.get(f"/api/videos/{ids['clip1.mp4']}/file").status_code == 200
    with closing(Catalog(moved)) as catalog:
        identity = catalog.fact("identity")
    forged = own_copy(moved, tmp_path / "forged", identity, roots=["/"])
    point(forged, "clip0.mp4", write_clip(tmp_path / "private.mp4", 3))
    with asking(forged) as (client, ids):
        assert client.get(f"/api/videos/{ids['private.mp4']}/file").status_code == 400
        assert client.get(f"/api/videos/{ids['clip1.mp4']}/file").status_code == 200, "named by this user, once"


def test_an_identity_is_no_path(indexed, gallery, tmp_path, user_state):
    (user_state / "evil.json").write_text('{"videos": ["/"]}')
    with asking(own_copy(indexed, tmp_path / "index", "../../evil")) as (client, ids):
        assert client.get(f"/api/videos/{ids['clip1.mp4']}/file").status_code == 400


def test_without_a_state_directory_indexing_says_so_and_serving_asks(gallery, tmp_path, sources, monkeypatch):
    (tmp_path / "state").write_text("no folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    report = index([gallery], tmp_path / "index", sources[1:], progress=False)
    assert any("not remembered, so tvr serve will need --videos" in line for line in report.problems)
    with asking(tmp_path / "index", gallery) as (client, ids):
        assert client.get(f"/api/videos/{ids['clip1.mp4']}/file").status_code == 200


def test_folders_that_an_index_names_are_not_walked_unless_the_user_names_them(indexed, gallery, tmp_path):
    folder = own_copy(indexed, tmp_path / "index", roots=[str(gallery)])
    with pytest.raises(SearchError, match="which you have not named here") as refused:
        index([], folder, progress=False)
    (command,) = re.findall(r"tvr (index .*)$", str(refused.value))
    assert main(shlex.split(command)) == 0, "the advice works"
    assert index([], folder, progress=False).kept == 8


def test_a_captions_file_that_an_index_names_is_not_read(indexed, gallery, tmp_path):
    private = tmp_path / "private.parquet"
    write_captions(private, [Description("clip0", 0, 0, 1, "a secret")])
    folder = own_copy(indexed, tmp_path / "index", captions=str(private))
    report = index([gallery], folder, progress=False)
    assert report.captioned == 0
    assert any("private.parquet: a captions file that you have not named" in line for line in report.problems)
    assert index([gallery], folder, progress=False, captions=private).captioned == 1
    assert index([], folder, progress=False).captioned == 1


class Recorder(BaseHTTPRequestHandler):
    """Record a connection, and serve nothing."""

    called: list[str]

    def do_GET(self):
        self.called.append(self.path)
        self.send_error(404)

    do_PUT = do_GET  # noqa: N815  http.server's names
    do_POST = do_GET  # noqa: N815

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture
def host(monkeypatch):
    """Address of a listening host, and the list of its callers."""
    called: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Listening", (Recorder,), {"called": called}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", called
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("verb", [["search", "a", "--index"], ["serve", "--index"], ["index", "--out"]])
def test_queries_go_to_a_host_only_where_the_user_names_it(indexed, gallery, tmp_path, host, verb, capsys):
    pytest.importorskip("qdrant_client", reason="the extra `search` is not installed")
    address, called = host
    folder = own_copy(indexed, tmp_path / "index", store=f"qdrant://{address}")
    more = [str(gallery)] if verb[0] == "index" else []
    assert main([*verb, str(folder), *more]) == 1
    said = capsys.readouterr().err
    assert f"its vectors are stored at qdrant://{address}" in said
    assert f"add --store qdrant://{address}" in said
    assert called == []
    assert main([*verb, str(folder), *more, "--store", f"qdrant://{address}"]) == 1
    assert called, "the user has named it"


def test_another_store_than_the_indexs_is_refused(indexed, capsys):
    assert main(["search", "a", "--index", str(indexed), "--store", "qdrant://elsewhere"]) == 1
    assert "are stored in lancedb" in capsys.readouterr().err


def test_a_store_that_the_user_gave_once_is_not_asked_for_again(gallery, tmp_path, sources, qdrant):
    out, place = tmp_path / "index", qdrant
    index([gallery], out, sources[1:], place, progress=False)
    with Searcher(out) as searcher:
        assert len(find(searcher, "a").results) == 8
    stranger = own_copy(out, tmp_path / "stranger")
    with pytest.raises(SearchError, match="you did not create this index here"):
        Searcher(stranger)
    with Searcher(stranger, store=place) as searcher:
        assert len(find(searcher, "a").results) == 8


def test_the_served_folders_come_from_the_command_line(indexed, gallery, tmp_path, served):
    folder = own_copy(indexed, tmp_path / "index", roots=["/"])
    address, said = served("--index", str(folder), "--videos", str(tmp_path), "--videos", str(gallery))
    assert "Not served: the videos in /," in said()
    with closing(Catalog(folder)) as catalog:
        video = catalog.videos()[0]
    with urllib.request.urlopen(f"{address}/api/videos/{video.id}/file") as answer:
        assert answer.read() == video.path.read_bytes()
    address, _ = served("--index", str(folder))
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        urllib.request.urlopen(f"{address}/api/videos/{video.id}/file")
    refused.value.close()


def test_a_folder_to_serve_that_is_not_there_is_said(indexed, tmp_path, capsys):
    assert main(["serve", "--index", str(indexed), "--videos", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert Path(indexed).is_dir()


@pytest.fixture
def served(tmp_path, ended):
    """Start `tvr serve` as a separate process, and return its address and its stderr."""
    pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
    running = []

    def start(*options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        folder = tmp_path / str(port)
        folder.mkdir()
        log = folder / "err-0.txt"
        process = ended(forked.started(["serve", "--port", str(port), *options], folder))
        running.append(process)
        address, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/health").close()
                return address, log.read_text
            except OSError:
                assert process.is_alive(), log.read_text()
                assert time.monotonic() < until, "the server did not start"
                time.sleep(0.1)

    yield start
    for process in running:
        process.terminate()
        process.join(60)
