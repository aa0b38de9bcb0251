"""File names that are not UTF-8 or contain control characters, and options that do not apply."""

import json
import os
import shutil
from pathlib import Path

import pytest
from search_parts import find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index
from tvr_lightning.search.results import printable
from tvr_lightning.search.segments import Segments

NOT_UTF8, CONTROL = os.fsdecode(b"caf\xe9/caf\xe9.mp4"), "b\x1b[31m\x9b1m[red].mp4"


@pytest.fixture
def strange(tmp_path, sources, gallery):
    """An index of a file in a folder that is not UTF-8, and of a long video with control characters."""
    (tmp_path / "videos" / NOT_UTF8).parent.mkdir(parents=True)
    shutil.copy(gallery / "clip1.mp4", tmp_path / "videos" / NOT_UTF8)
    write_clip(tmp_path / "videos" / CONTROL, 2, frames=24)
    rule = Segments("windows", 3.0)
    report = index([tmp_path / "videos"], tmp_path / "index", sources[1:], progress=True, segments=rule)
    assert report.total == 2
    assert index([], tmp_path / "index", progress=False).kept == 2
    return tmp_path / "index"


def test_strange_names_are_found_and_printed_without_control_characters(strange, capsys):
    with Searcher(strange) as searcher:
        assert {Path(result.path).name for result in find(searcher, "a").results} == {Path(NOT_UTF8).name, CONTROL}
    assert main(["search", "a", "--index", str(strange)]) == 0
    shown = capsys.readouterr().out
    assert "caf\\udce9/caf\\udce9.mp4" in shown
    assert "b\\x1b[31m\\x9b1m[red].mp4" in shown
    assert main(["search", "a", "--index", str(strange), "--json"]) == 0
    printed = capsys.readouterr().out
    assert {Path(result["path"]).name for result in json.loads(printed)["results"]} == {Path(NOT_UTF8).name, CONTROL}
    assert not {"\x1b", "\x9b", "\udce9"} & {*shown, *printed}


def test_strange_names_are_served(strange):
    pytest.importorskip("fastapi", reason="the extra `search` is not installed")
    from starlette.testclient import TestClient

    from tvr_lightning.search.server import ServerOptions, create_app

    with Searcher(strange) as searcher:
        client = TestClient(create_app(searcher, ServerOptions()), base_url="http://127.0.0.1")
        found = client.get("/api/search", params={"query": "a"}).json()["results"]
        assert {result["path"] for result in found} == {"caf\\udce9/caf\\udce9.mp4", printable(CONTROL)}
        assert {each["folder"] for each in client.get("/api/index").json()["folders"]} == {".", "caf\\udce9"}
        assert client.get("/api/videos").json()["count"] == 2
        for result in found:
            for address in ("file", "picture", "about"):
                assert client.get(f"/api/videos/{result['id']}/{address}").status_code == 200
            similar = client.get("/api/search", params={"like": result["id"]}).json()
            assert similar["query"] == result["path"].rpartition("/")[2]


def test_printable_escapes_what_a_terminal_obeys():
    assert printable("a\x1b[0m\r\nb\x7f\u3000é👩\u200d🚀") == "a\\x1b[0m\\r\\nb\\x7f\u3000é👩\u200d🚀"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--frames", "99", "--architecture", "x"], "--architecture, --frames cannot be combined with --ckpt_path"),
        (["--weights", "none"], "--weights cannot be combined with --ckpt_path"),
        (["--segments", "none", "--segment_length", "30"], "none does not cut videos"),
    ],
)
def test_index_refuses_options_that_do_not_apply_to_a_checkpoint(
    gallery, checkpoints, tmp_path, capsys, options, message
):
    command = ["index", str(gallery), "--out", str(tmp_path / "index"), "--ckpt_path", str(checkpoints["clip4clip"])]
    assert main([*command, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "index").exists()


def test_an_index_refuses_options_of_its_encoder(indexed, capsys):
    for option in (["--frames", "4"], ["--sampling", "head"]):
        assert main(["index", "--out", str(indexed), *option]) == 2
        error = capsys.readouterr().err
        assert (
            f"{option[0]} cannot be used, since {indexed} records the options of its methods. Use a new folder."
            in error
        )
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize("option", [["--rerank", "gare"], ["--normalize", "sinkhorn"], ["--min_relevance", "0.5"]])
def test_search_refuses_options_that_do_not_apply_to_an_example(indexed, gallery, capsys, option):
    command = ["search", "--video", str(gallery / "clip1.mp4"), "--index", str(indexed), "--device", "cpu"]
    assert main([*command, *option]) == 2
    error = capsys.readouterr().err
    assert "rerank, normalize, and min_relevance apply only to text queries" in error


def test_weights_are_found_from_any_working_folder(gallery, checkpoints, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(checkpoints["clip4clip"], tmp_path / "method.ckpt")
    monkeypatch.chdir(tmp_path)
    assert main(["index", str(gallery), "--out", "index", "--ckpt_path", "method.ckpt"]) == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["search", "a", "--index", "../index", "--top", "1"]) == 0
