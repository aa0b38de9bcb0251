"""Captions of an index: read from a file, shown with results, and refused with a reason."""

import json
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browser import serving, wait
from search_parts import find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.data.recover_captions import Description, read_captions, write_captions
from tvr_lightning.errors import MissingAssetError, UserError
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.indexing import index


@pytest.fixture
def videos(gallery, tmp_path):
    return shutil.copytree(gallery, tmp_path / "videos")


@pytest.fixture
def said(tmp_path):
    """A captions file that names a video by its path, one by its name without suffix, and a missing one."""
    rows = [
        Description("below/clip6.mp4", 1, 1.0, 2.0, "Then it jumps."),
        Description("below/clip6.mp4", 0, 0.0, 1.0, "A Dog runs over grass"),
        Description("clip0", 0, 0.0, 3.0, "a dogged rider"),
        Description("elsewhere", 0, 0.0, 3.0, "a dog"),
    ]
    write_captions(tmp_path / "said.parquet", rows)
    return tmp_path / "said.parquet"


def captions(out):
    with Searcher(out) as searcher:
        found = find(searcher, "a").results
    return {result.path.rpartition("/")[2]: result.captions for result in found if result.captions}


def test_a_file_says_what_videos_show(videos, said, tmp_path, sources):
    out = tmp_path / "index"
    report = index([videos], out, sources[1:], progress=False, captions=said)
    assert report.captioned == 2
    assert "2 videos have captions" in report.lines()
    assert captions(out) == {"clip6.mp4": ["A Dog runs over grass", "Then it jumps."], "clip0.mp4": ["a dogged rider"]}
    write_clip(videos / "elsewhere.mp4", 30)
    write_clip(videos / "clip0.mp4", 31)
    assert index([], out, progress=False).captioned == 3, "the file is remembered; new and changed videos get theirs"
    said.unlink()
    report = index([], out, progress=False)
    assert report.captioned == 3
    assert any("said.parquet: the captions file is missing" in problem for problem in report.problems)


def test_the_command_line_shows_captions(videos, said, tmp_path, checkpoints, capsys):
    out = str(tmp_path / "index")
    options = ["--out", out, "--ckpt_path", str(checkpoints["clip4clip"]), "--captions", str(said)]
    assert main(["index", str(videos), *options]) == 0
    assert "2 videos have captions" in capsys.readouterr().out
    assert main(["search", "a", "--index", out, "--folder", "below"]) == 0
    assert "A Dog runs over grass\n" in capsys.readouterr().out
    assert main(["search", "a", "--index", out, "--folder", "below", "--json"]) == 0
    (result,) = (each for each in json.loads(capsys.readouterr().out)["results"] if each["captions"])
    assert result["captions"] == ["A Dog runs over grass", "Then it jumps."]


def test_the_api_returns_captions(videos, said, tmp_path, sources):
    pytest.importorskip("fastapi", reason="the extra `search` is not installed")
    from starlette.testclient import TestClient

    from tvr_lightning.search.server import ServerOptions, create_app

    out = tmp_path / "index"
    index([videos], out, sources[1:], progress=False, captions=said)
    with Searcher(out) as searcher:
        client = TestClient(create_app(searcher, ServerOptions()), base_url="http://127.0.0.1")
        found = client.get("/api/search", params={"query": "a"}).json()["results"]
        assert {r["path"]: r["captions"] for r in found}["clip0.mp4"] == ["a dogged rider"]


def test_the_page_shows_captions(videos, said, tmp_path, sources, browser):
    pytest.importorskip("uvicorn", reason="the extra `search` is not installed")
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    from tvr_lightning.search.server import ServerOptions, create_app

    out = tmp_path / "index"
    index([videos], out, sources[1:], progress=False, captions=said)
    with Searcher(out) as searcher, serving(create_app(searcher, ServerOptions())) as address:
        browser.get(address)
        wait(browser, lambda b: "8 videos" in b.find_element(By.ID, "state").text)
        browser.find_element(By.ID, "query").send_keys("a", Keys.ENTER)
        wait(browser, lambda b: len(b.find_elements(By.CSS_SELECTOR, "#answers li")) == 8)
        texts = "return [...document.querySelectorAll('#answers .said')].map(each => each.textContent)"
        wait(browser, lambda b: "A Dog runs over grass · Then it jumps." in b.execute_script(texts))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("said.csv", 'note,video_id,segment,caption\n,clip0,1,"then, it ""barks"""\n,clip0,0,a dog\n,clip1,0,\n'),
        ("said.CSV", '\ufeffvideo_id,segment,caption\r\nclip0,0,a dog\r\nclip0,1,"then, it ""barks"""\r\n'),
        (
            "said.jsonl",
            '{"video_id": "clip0", "segment": 1, "caption": "then, it \\"barks\\""}\n\n'
            '{"video_id": "clip0", "segment": 0, "caption": "a dog", "by": "me"}\n',
        ),
    ],
)
def test_captions_may_be_csv_or_json_lines(gallery, checkpoints, tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    out = str(tmp_path / "index")
    options = ["--out", out, "--ckpt_path", str(checkpoints["clip4clip"])]
    assert main(["index", str(gallery), *options, "--captions", str(tmp_path / name)]) == 0
    assert captions(out) == {"clip0.mp4": ["a dog", 'then, it "barks"']}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "video_id,caption\nclip0,a dog\n", "row 2: the key 'segment' is missing"),
        ("a.csv", "", "contains no descriptions"),
        (
            "a.csv",
            "video_id,segment,caption\nclip0,0,a dog\nclip1,first,a cat\n",
            "row 3, column segment: 'first' is not a whole",
        ),
        ("a.csv", "video_id,segment,caption\nclip0,0,a dog, a cat\n", "row 2: 4 fields, but the header has 3"),
        ("a.csv", "video_id,segment,caption\nclip0,0\n", "row 2: 2 fields, but the header has 3"),
        ("a.csv", "video_id,segment,caption\n,0,a dog\n", "row 2, column video_id: there is no value"),
        ("a.csv", 'video_id,segment,caption\nclip0,0,"a dog\n', "line 2: not CSV"),
        ("a.csv", b"video_id,segment,caption\nclip0,0,\xff\n", "not UTF-8 text"),
        ("a.csv", "video_id,segment,caption\nclip0,0,a\nclip0,0,b\n", "segment 0 of clip0 is described more than once"),
        ("a.jsonl", '{"video_id": "clip0", "segment": 0, "caption": "a"}\n{"video_id"\n', "line 2: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: expected dict, found list"),
        ("a.jsonl", '{"video_id": "clip0", "segment": 0.5, "caption": "a"}\n', "line 1, column segment: 0.5"),
        (
            "a.jsonl",
            '{"video_id": "clip0", "segment": 0, "caption": 3}\n',
            "line 1, column caption: expected str, found int",
        ),
        ("a.jsonl", '{"video_id": "clip0", "segment": 0}\n', "line 1: the key 'caption' is missing"),
        ("a.jsonl", b"\xff\n", "not UTF-8 text"),
    ],
)
def test_errors_of_text_captions_name_file_row_and_column(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=re.escape(message)) as error:
        read_captions(path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "options",
    [
        ["--weights", "nowhere.pt"],
        ["--weights", "openia"],
        ["--weights", "none", "--captions", "nowhere.csv"],
        ["--weights", "none", "--architecture", "ViT-nothing"],
    ],
)
def test_index_advises_what_it_has(gallery, tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    assert main(["index", str(gallery), *options]) == (2 if "--captions" in options else 1)
    said = capsys.readouterr().err
    assert "nowhere" in said or "openia" in said or "ViT-nothing" in said
    for other in ("recipes/", "tvr fit", "encoder.weights", "Traceback"):
        assert other not in said
    if options[1] == "nowhere.pt":
        assert "--ckpt_path FILE" in said
        assert "--weights FILE" in said
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("spoil", "error", "said_of"),
    [
        (lambda path: path.unlink(), MissingAssetError, "no captions file"),
        (lambda path: path.write_text("no parquet"), UserError, "not a parquet file"),
        (lambda path: pq.write_table(pa.table({"video": ["clip0"]}), path), UserError, "the key 'video_id' is missing"),
        (
            lambda path: write_captions(path, [Description("video7010", 0, 0, 1, "a cat")]),
            SearchError,
            "describes none of the index's videos, but others, such as video7010",
        ),
    ],
)
def test_captions_that_cannot_be_used(gallery, tmp_path, sources, said, spoil, error, said_of):
    spoil(said)
    with pytest.raises(error, match=said_of):
        index([gallery], tmp_path / "index", sources[1:], progress=False, captions=said)
