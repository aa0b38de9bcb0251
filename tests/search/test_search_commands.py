"""`tvr index` and `tvr search` on the command line: what they print, strange file names, and refused options."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image
from search_parts import client_of, find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.indexing import index
from tvr_lightning.search.results import clock, printable
from tvr_lightning.search.segments import Segments

NOT_UTF8, CONTROL = os.fsdecode(b"caf\xe9/caf\xe9.mp4"), "b\x1b[31m\x9b1m[red].mp4"


@pytest.fixture
def search(indexed, capsys):
    """Search the index, and return what is printed."""

    def run(*words):
        assert main(["search", *map(str, words), "--index", str(indexed), "--device", "cpu"]) == 0
        return capsys.readouterr().out

    return run


def test_results_are_printed_as_text_and_as_json(search, gallery, monkeypatch):
    answer = json.loads(search("a", "red", "square", "--top", "2", "--rerank", "clip4clip", "--json"))
    assert (answer["query"], answer["rerank"], len(answer["results"])) == ("a red square", "clip4clip", 2)
    said = search("a red square", "--top", "2")
    assert "best at 0:0" in said
    assert re.search(r"^  1\. -?\d\.\d{4}  \S+$", said, re.M), "one number"
    assert not re.search("cosine|candidate|relevance", said)
    assert str(gallery) in said
    monkeypatch.chdir(gallery.parent)
    assert f"  {gallery.name}/" in search("a red square", "--top", "2"), "relative to the working folder"
    assert "clip1.mp4" in search("--video", gallery / "clip1.mp4", "--top", "1")


def test_an_example_is_given_alone_and_with_text(search, gallery, tmp_path):
    picture = tmp_path / "red.png"
    Image.new("RGB", (90, 60), "red").save(picture)
    for option, path in (("--video", gallery / "clip1.mp4"), ("--image", picture)):
        assert json.loads(search(option, path, "--json"))["query"] == path.name
        assert json.loads(search("a red square", option, path, "--json"))["query"] == f"a red square, {path.name}"


ONE = "index {gallery} --out {out}"
CLIP = "search --video {gallery}/clip1.mp4 --index {indexed}"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (
            ONE + " {ckpt} --frames 99 --architecture x",
            2,
            "--architecture, --frames cannot be combined with --ckpt_path",
        ),
        (ONE + " {ckpt} --weights none", 2, "--weights cannot be combined with --ckpt_path"),
        (ONE + " {ckpt} --segments none --segment_length 30", 2, "none does not cut videos"),
        (ONE + " {ckpt} --store elastic", 1, "no vector store"),
        (ONE + " --ckpt_path {nowhere}.ckpt", 2, "no such file"),
        (ONE + " --weights nowhere.pt", 1, "--ckpt_path FILE"),
        (ONE + " --weights openia", 1, "openia"),
        (ONE + " --weights none --captions nowhere.csv", 2, "nowhere.csv"),
        (ONE + " --weights none --architecture ViT-nothing", 1, "ViT-nothing"),
        ("index {broken} --out {out} {ckpt}", 1, "no video could be read: {broken}/fake.mp4"),
        ("index {empty} --out {out} {ckpt}", 1, "no videos in"),
        ("index {nowhere} --out {out} {ckpt}", 2, "no such file or folder"),
        ("index --out {out} {ckpt}", 2, "No videos are given"),
        ("index --out {indexed} --frames 4", 2, "--frames cannot be used, since {indexed} records the options"),
        ("index --out {indexed} --sampling head", 2, "--sampling cannot be used, since {indexed} records the options"),
        ("search --index {indexed}", 2, "No query is given"),
        ("search a --index {empty}", 1, "contains no index"),
        ("search a --index {indexed} --store qdrant://elsewhere", 1, "are stored in lancedb"),
        (CLIP + " --rerank gare", 2, "rerank, normalize, and min_relevance apply only to text queries"),
        (CLIP + " --normalize sinkhorn", 2, "rerank, normalize, and min_relevance apply only to text queries"),
        (CLIP + " --min_relevance 0.5", 2, "rerank, normalize, and min_relevance apply only to text queries"),
        (CLIP + " --image {gallery}/clip1.mp4", 2, "either --video or --image"),
        (CLIP + " --video {gallery}/clip1.mp4", 2, "--video is given more than once"),
        ("serve --index {indexed} --videos {nowhere}", 2, "nowhere: no such folder"),
        ("serve --index {indexed} --port -1", 2, "--port is -1; expected a whole number of at least 0"),
    ],
)
def test_unusable_commands_end_in_one_sentence_and_leave_nothing(
    tmp_path, indexed, gallery, ckpt, user_state, monkeypatch, capsys, words, status, said
):
    monkeypatch.chdir(tmp_path)
    names = {name: tmp_path / name for name in ("new", "old", "broken", "empty", "nowhere")}
    names |= {"indexed": indexed, "gallery": gallery, "ckpt": " ".join(ckpt)}
    for name in ("broken", "empty", "old"):
        names[name].mkdir()
    (names["broken"] / "fake.mp4").write_text("<html>I am an mp4</html>")
    remembered = list(user_state.rglob("*.json"))
    for out in ("new", "old") if "{out}" in words else ("new",):
        assert main(words.format_map(names | {"out": names[out]}).split()) == status
        printed = capsys.readouterr()
        (line,) = (each for each in printed.err.splitlines() if "weights are RANDOM" not in each)
        assert said.format_map(names) in line
        assert not any(other in line for other in ("recipes/", "tvr fit", "encoder.weights"))
        assert "tvr search" not in printed.out
    assert not names["new"].exists()
    assert list(names["old"].iterdir()) == []
    assert list(user_state.rglob("*.json")) == remembered


def test_weights_are_found_from_any_working_folder(gallery, checkpoints, tmp_path, monkeypatch, capsys):
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(checkpoints["clip4clip"], tmp_path / "method.ckpt")
    monkeypatch.chdir(tmp_path)
    assert main(["index", str(gallery), "--out", "index", "--ckpt_path", "method.ckpt"]) == 0
    assert "8 videos added" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["search", "a", "--index", "../index", "--top", "1"]) == 0


@pytest.fixture(scope="module")
def strange(tmp_path_factory, sources, gallery):
    """An index of a file in a folder that is not UTF-8, and of a long video with control characters."""
    folder = tmp_path_factory.mktemp("strange")
    (folder / "videos" / NOT_UTF8).parent.mkdir(parents=True)
    shutil.copy(gallery / "clip1.mp4", folder / "videos" / NOT_UTF8)
    write_clip(folder / "videos" / CONTROL, 2, frames=24)
    rule = Segments("windows", 3.0)
    report = index([folder / "videos"], folder / "index", sources[1:], progress=True, segments=rule)
    assert report.total == 2
    assert index([], folder / "index", progress=False).kept == 2
    return folder / "index"


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
    assert printable("a\x1b[0m\r\nb\x7f\u3000é👩\u200d🚀") == "a\\x1b[0m\\r\\nb\\x7f\u3000é👩\u200d🚀"


def test_strange_names_are_served(strange):
    with Searcher(strange) as searcher:
        client = client_of(searcher)
        found = client.get("/api/search", params={"query": "a"}).json()["results"]
        assert {result["path"] for result in found} == {"caf\\udce9/caf\\udce9.mp4", printable(CONTROL)}
        assert {each["folder"] for each in client.get("/api/index").json()["folders"]} == {".", "caf\\udce9"}
        assert client.get("/api/videos").json()["count"] == 2
        for result in found:
            for address in ("file", "picture", "about"):
                assert client.get(f"/api/videos/{result['id']}/{address}").status_code == 200
            similar = client.get("/api/search", params={"like": result["id"]}).json()
            assert similar["query"] == result["path"].rpartition("/")[2]


@pytest.mark.parametrize(("seconds", "shown"), [(0.04, "0:00.0"), (59.96, "1:00.0"), (3723.4, "1:02:03.4")])
def test_clock(seconds, shown):
    assert clock(seconds) == shown
