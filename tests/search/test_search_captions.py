"""Captions of an index: read from a file, shown with results, and refused with a reason."""

import json
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from search_parts import client_of, find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.data.recover_captions import Description, read_captions, write_captions
from tvr_lightning.errors import MissingAssetError, UserError
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.indexing import index

ROWS = [
    Description("below/clip6.mp4", 1, 1.0, 2.0, "Then it jumps."),
    Description("below/clip6.mp4", 0, 0.0, 1.0, "A Dog runs over grass"),
    Description("clip0", 0, 0.0, 3.0, "a dogged rider"),
    Description("elsewhere", 0, 0.0, 3.0, "a dog"),
]
"""Captions of a video named by its path, of one named without suffix, and of a missing one."""
HEAD = "video_id,segment,caption\n"


def test_captions_are_remembered_and_shown(gallery, tmp_path, ckpt, capsys):
    videos, file, out = shutil.copytree(gallery, tmp_path / "videos"), tmp_path / "said.parquet", tmp_path / "index"
    write_captions(file, ROWS)
    assert main(["index", str(videos), "--out", str(out), *ckpt, "--captions", str(file)]) == 0
    assert "2 videos have captions" in capsys.readouterr().out
    expected = {"below/clip6.mp4": ["A Dog runs over grass", "Then it jumps."], "clip0.mp4": ["a dogged rider"]}
    with Searcher(out) as searcher:
        found = {result.path: result.captions for result in find(searcher, "a").results if result.captions}
        assert found == {f"{videos}/{name}": captions for name, captions in expected.items()}
        served = client_of(searcher).get("/api/search", params={"query": "a"}).json()["results"]
        assert {r["path"]: r["captions"] for r in served if r["captions"]} == expected
    search = ["search", "a", "--index", str(out), "--folder", "below"]
    assert main(search) == 0
    assert "A Dog runs over grass\n" in capsys.readouterr().out
    assert main([*search, "--json"]) == 0
    (result,) = (each for each in json.loads(capsys.readouterr().out)["results"] if each["captions"])
    assert result["captions"] == expected["below/clip6.mp4"]
    write_clip(videos / "elsewhere.mp4", 30)
    write_clip(videos / "clip0.mp4", 31)
    assert index([], out, progress=False).captioned == 3, "new and changed videos get captions of the remembered file"
    file.unlink()
    report = index([], out, progress=False)
    assert report.captioned == 3
    assert any("said.parquet: the captions file is missing" in problem for problem in report.problems)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'note,video_id,segment,caption\n,clip0,1,"then, it ""barks"""\n,clip0,0,a dog\n,clip1,0,\n'),
        ("a.CSV", '\ufeffvideo_id,segment,caption\r\nclip0,0,a dog\r\nclip0,1,"then, it ""barks"""\r\n'),
        (
            "a.jsonl",
            '\ufeff{"video_id": "clip0", "segment": 1, "caption": "then, it \\"barks\\""}\n\n'
            '{"video_id": "clip0", "segment": 0, "caption": "a dog", "by": "me"}\n',
        ),
    ],
)
def test_captions_may_be_csv_or_json_lines(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    assert read_captions(tmp_path / name).descriptions["clip0"] == ["a dog", 'then, it "barks"']


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "video_id,caption\nclip0,a dog\n", "row 2: the key 'segment' is missing"),
        ("a.csv", "", "contains no descriptions"),
        ("a.csv", HEAD + "clip0,0,a dog\nclip1,first,a cat\n", "row 3, column segment: 'first' is not a whole"),
        ("a.csv", HEAD + "clip0,0,a dog, a cat\n", "row 2: 4 fields, but the header has 3"),
        ("a.csv", HEAD + ",0,a dog\n", "row 2, column video_id: there is no value"),
        ("a.csv", HEAD + 'clip0,0,"a dog\n', "line 2: not CSV"),
        ("a.csv", HEAD + "clip0,0,\udcff\n", "not UTF-8 text"),
        ("a.csv", HEAD + "clip0,0,a\nclip0,0,b\n", "segment 0 of clip0 is described more than once"),
        ("a.jsonl", '{"video_id": "clip0", "segment": 0, "caption": "a"}\n{"video_id"\n', "line 2: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: expected dict, found list"),
        ("a.jsonl", '{"video_id": "clip0", "segment": 0.5, "caption": "a"}\n', "line 1, column segment: 0.5"),
        ("a.jsonl", '{"video_id": "clip0", "segment": 0, "caption": 3}\n', "column caption: expected str, found int"),
        ("a.jsonl", '{"video_id": "clip0", "segment": 0}\n', "line 1: the key 'caption' is missing"),
        ("a.jsonl", "\udcff\n", "not UTF-8 text"),
    ],
)
def test_errors_in_captions_name_the_file_row_and_column(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        read_captions(path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda path: None, MissingAssetError, "no captions file"),
        (lambda path: path.write_text("no parquet"), UserError, "not a parquet file"),
        (lambda path: pq.write_table(pa.table({"video": ["clip0"]}), path), UserError, "the key 'video_id' is missing"),
        (
            lambda path: write_captions(path, [Description("video7010", 0, 0, 1, "a cat")]),
            SearchError,
            "describes none of the index's videos, but others, such as video7010",
        ),
    ],
)
def test_unusable_captions_are_refused(gallery, tmp_path, sources, write, error, message):
    path = tmp_path / "said.parquet"
    write(path)
    with pytest.raises(error, match=message):
        index([gallery / "clip0.mp4"], tmp_path / "index", sources[1:], progress=False, captions=path)
