"""An index from an untrusted user: which files it serves and reads, and where it sends queries."""

import os
import re
import secrets
import shlex
import shutil
import sqlite3
from contextlib import closing, contextmanager

import pytest
from search_parts import client_of, find, write_clip
from starlette.testclient import TestClient

from tvr_lightning.cli import main
from tvr_lightning.data.recover_captions import Description, write_captions
from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.indexing import index


@contextmanager
def asking(folder, *videos):
    """A client of the served index, and the ids of its videos by file name."""
    with Searcher(folder) as searcher:
        yield client_of(searcher, videos=videos), {row.path.name: row.id for row in searcher.catalog.videos()}


def status(folder, name, *videos):
    with asking(folder, *videos) as (client, ids):
        return client.get(f"/api/videos/{ids[name]}/file").status_code


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


def test_ones_own_index_plays_without_a_question(gallery, tmp_path, sources, user_state):
    out = tmp_path / "index"
    index([gallery], out, sources[1:], progress=False)
    moved = tmp_path / "moved"
    out.rename(moved)
    assert status(moved, "clip1.mp4") == 200
    with closing(Catalog(moved)) as catalog:
        identity = catalog.fact("identity")
    forged = own_copy(moved, tmp_path / "forged", identity, roots=["/"])
    point(forged, "clip0.mp4", write_clip(tmp_path / "private.mp4", 3))
    assert status(forged, "private.mp4") == 400
    assert status(forged, "clip1.mp4") == 200, "named by this user, once"
    (user_state / "evil.json").write_text('{"videos": ["/"]}')
    assert status(own_copy(moved, tmp_path / "evil", "../../evil"), "clip1.mp4") == 400, "an identity is no path"


def test_without_a_state_directory_indexing_says_so_and_serving_asks(gallery, tmp_path, sources, monkeypatch):
    (tmp_path / "state").write_text("no folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    report = index([gallery], tmp_path / "index", sources[1:], progress=False)
    assert any("not remembered, so tvr serve will need --videos" in line for line in report.problems)
    assert status(tmp_path / "index", "clip1.mp4", gallery) == 200


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


@pytest.mark.parametrize("words", [["search", "a", "--index"], ["serve", "--index"], ["index", "--out"]])
def test_queries_go_to_a_host_only_if_the_user_names_it(indexed, gallery, tmp_path, no_network, words, capsys):
    address = "127.0.0.1:6333"
    folder = own_copy(indexed, tmp_path / "index", store=f"qdrant://{address}")
    more = [str(gallery)] if words[0] == "index" else []
    assert main([*words, str(folder), *more]) == 1
    said = capsys.readouterr().err
    assert f"its vectors are stored at qdrant://{address}" in said
    assert f"add --store qdrant://{address}" in said
    assert no_network == []
    assert main([*words, str(folder), *more, "--store", f"qdrant://{address}"]) == 1
    assert no_network, "the user has named it"


def test_the_served_folders_come_from_the_command_line(indexed, gallery, tmp_path, monkeypatch, capsys):
    folder = own_copy(indexed, tmp_path / "index", roots=["/"])
    with closing(Catalog(folder)) as catalog:
        video = catalog.videos()[0]
    answers = []

    def run(server, sockets):
        client = TestClient(server.config.app, base_url="http://127.0.0.1")
        answers.append(client.get(f"/api/videos/{video.id}/file"))

    monkeypatch.setattr("uvicorn.Server.run", run)
    serve = ["serve", "--index", str(folder), "--port", "0"]
    assert main([*serve, "--videos", str(tmp_path), "--videos", str(gallery)]) == 0
    assert "Not served: the videos in /," in capsys.readouterr().err
    assert answers[0].content == video.path.read_bytes()
    assert main(serve) == 0
    assert answers[1].status_code == 400
