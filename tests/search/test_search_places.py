"""An index from an untrusted user: which files it serves and reads, and where it sends queries."""

import re
import secrets
import shlex
import shutil
from contextlib import closing
from pathlib import Path

import lancedb
import pytest
from search_parts import LOCAL, client_of, write_clip
from starlette.testclient import TestClient

from tvr_lightning.cli import main
from tvr_lightning.data.recover_captions import Description, write_captions
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.indexing import index
from tvr_lightning.search.table import TABLE, IndexTable, encoded_path


def asking(searcher, *videos):
    """A function that requests the file of a video by name from a server of the index."""
    client, ids = client_of(searcher, videos=videos), {row.path.name: row.id for row in searcher.table.videos()}
    return lambda name: client.get(f"/api/videos/{ids[name]}/file")


def status(folder, name, *videos):
    with Searcher(folder) as searcher:
        return asking(searcher, *videos)(name).status_code


@pytest.fixture
def foreign(small_index, tmp_path):
    """Copy an index, as if from an untrusted user, with facts and an identity of their choice."""

    def copy(folder=small_index, identity=None, **facts):
        copied = shutil.copytree(folder, tmp_path / f"foreign-{secrets.token_hex(4)}")
        with closing(IndexTable(copied)) as table:
            for name, value in {**facts, "identity": identity or secrets.token_hex(16)}.items():
                table.set_fact(name, value)
        return copied

    return copy


def point(folder, name, path):
    """Replace the path of a video in the index by another file."""
    table = lancedb.connect(folder).open_table(TABLE)
    table.update(where=f"path LIKE '%/{name}'", values={"path": encoded_path(path)})


def test_an_untrusted_index_serves_only_videos_in_folders_that_the_user_names(foreign, gallery, tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("SECRET KEY")
    folder = foreign(roots=["/"])
    point(folder, "clip0.mp4", secret)
    with Searcher(folder) as searcher:
        ask = asking(searcher)
        for name in ("id_rsa", "clip1.mp4"):
            assert ask(name).status_code == 400
            assert f"{name} is not a video in a folder that may be served" in ask(name).json()["detail"]
        ask = asking(searcher, tmp_path / "gone")
        assert ask("clip1.mp4").status_code == 400
        assert str(tmp_path) not in ask("clip1.mp4").text
        ask = asking(searcher, gallery)
        assert ask("clip1.mp4").content == (gallery / "clip1.mp4").read_bytes()
        assert ask("id_rsa").status_code == 400
        ask = asking(searcher, gallery, tmp_path)
        assert "is not a video" in ask("id_rsa").json()["detail"], "only videos of the named folders"
        assert "SECRET" not in ask("id_rsa").text


def test_links_out_of_a_served_folder_are_refused(foreign, tmp_path):
    shown = tmp_path / "shown"
    outside = write_clip(tmp_path / "outside.mp4", 2)
    inside = write_clip(shown / "inside.mp4", 1)
    (shown / "out.mp4").symlink_to(outside)
    (shown / "linked").symlink_to(tmp_path)
    (shown / "again.mp4").symlink_to(inside)
    folder = foreign(roots=["/"])
    for number, path in enumerate((shown / "out.mp4", shown / "linked" / "outside.mp4", shown / "again.mp4")):
        point(folder, f"clip{number}.mp4", path)
    with Searcher(folder) as searcher:
        ask = asking(searcher, shown)
        assert [ask(name).status_code for name in ("out.mp4", "outside.mp4", "again.mp4")] == [400, 400, 200]


def test_the_users_own_index_is_served_even_after_a_move(foreign, small_index, tmp_path, user_state):
    moved = shutil.copytree(small_index, tmp_path / "moved")
    assert status(moved, "clip1.mp4") == 200
    with closing(IndexTable(moved)) as table:
        identity = table.fact("identity")
    forged = foreign(moved, identity, roots=["/"])
    point(forged, "clip0.mp4", write_clip(tmp_path / "private.mp4", 3))
    with Searcher(forged) as searcher:
        ask = asking(searcher)
        assert [ask(name).status_code for name in ("private.mp4", "clip1.mp4")] == [400, 200]
    (user_state / "evil.json").write_text('{"videos": ["/"]}')
    assert status(foreign(moved, "../../evil"), "clip1.mp4") == 400, "an identity is not a path"


def test_without_a_state_directory_folders_must_be_named_again(small_index, gallery, tmp_path, monkeypatch):
    out = shutil.copytree(small_index, tmp_path / "index")
    (tmp_path / "state").write_text("no folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    report = index([gallery], out, progress=False)
    assert any("not remembered, so tvr serve will need --videos" in line for line in report.problems)
    assert status(out, "clip1.mp4", gallery) == 200


def test_folders_and_captions_that_only_the_index_names_are_not_read(foreign, gallery, tmp_path):
    private = tmp_path / "private.parquet"
    write_captions(private, [Description("clip0", 0, 0, 1, "a secret")])
    folder = foreign(roots=[str(gallery)], captions=str(private))
    with pytest.raises(SearchError, match="which you have not named here") as refused:
        index([], folder, progress=False)
    (command,) = re.findall(r"tvr (index .*)$", str(refused.value))
    assert main(shlex.split(command)) == 0, "the advice works"
    report = index([], folder, progress=False)
    assert (report.kept, report.captioned) == (8, 0)
    assert any("private.parquet: a captions file that you have not named" in line for line in report.problems)
    assert index([gallery], folder, progress=False, captions=private).captioned == 1
    assert index([], folder, progress=False).captioned == 1


def test_served_folders_and_the_reranker_come_from_the_command_line(foreign, gallery, tmp_path, monkeypatch, capsys):
    folder, answers = foreign(roots=["/"]), []
    with closing(IndexTable(folder)) as table:
        video = table.videos()[0]

    def run(server, sockets):
        client = TestClient(server.config.app, base_url=LOCAL)
        addresses = (f"videos/{video.id}/file", "search?query=a", "index")
        answers.append([client.get(f"/api/{address}") for address in addresses])

    monkeypatch.setattr("uvicorn.Server.run", run)
    serve, reranker = ["serve", "--index", str(folder), "--port", "0"], "search_parts.by_size"
    assert main([*serve, "--videos", str(tmp_path), "--videos", str(gallery), "--rerank", reranker]) == 0
    assert "Not served: the videos in /," in capsys.readouterr().err
    file, found, facts = answers[0]
    assert file.content == video.path.read_bytes()
    assert (found.json()["rerank"], facts.json()["scorers"]) == (reranker, ["clip4clip", reranker])
    sizes = [Path("/", result["path"]).stat().st_size for result in found.json()["results"]]
    assert len(sizes) == 8
    assert sizes == sorted(sizes)
    assert main(serve) == 0
    assert answers[1][0].status_code == 400
