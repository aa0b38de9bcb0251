"""Captions of an index: read from a file, shown with results, and refused with a reason."""

import re
import shutil

import pytest
from search_parts import client_of, find, write_clip

from tvr_lightning.cli import main
from tvr_lightning.data.recover_captions import Description, read_captions, write_captions
from tvr_lightning.errors import UserError
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


def test_captions_are_remembered_and_shown_or_refused_if_they_are_of_other_videos(gallery, tmp_path, ckpt, capsys):
    videos = shutil.copytree(gallery, tmp_path / "videos", ignore=shutil.ignore_patterns("clip[1-5]*"))
    file, out = tmp_path / "said.parquet", tmp_path / "index"
    write_captions(file, ROWS)
    assert main(["index", str(videos), "--out", str(out), *ckpt, "--captions", str(file)]) == 0
    assert "2 videos have captions" in capsys.readouterr().out
    expected = {"below/clip6.mp4": ["A Dog runs over grass", "Then it jumps."], "clip0.mp4": ["a dogged rider"]}
    with Searcher(out) as searcher:
        found = {result.path: result.captions for result in find(searcher, "a").results if result.captions}
        assert found == {f"{videos}/{name}": captions for name, captions in expected.items()}
        served = client_of(searcher).get("/api/search", params={"query": "a"}).json()["results"]
        assert {r["path"]: r["captions"] for r in served if r["captions"]} == expected
    assert main(["search", "a", "--index", str(out), "--folder", "below"]) == 0
    assert "A Dog runs over grass\n" in capsys.readouterr().out
    write_clip(videos / "elsewhere.mp4", 30)
    write_clip(videos / "clip0.mp4", 31)
    assert index([], out, progress=False).captioned == 3, "new and changed videos get captions of the remembered file"
    file.unlink()
    report = index([], out, progress=False)
    assert report.captioned == 3
    assert any("said.parquet: the captions file is missing" in problem for problem in report.problems)
    write_captions(file, [Description("video7010", 0, 0, 1, "a cat")])
    with pytest.raises(SearchError, match="describes none of the index's videos, but others, such as video7010"):
        index([], out, progress=False, captions=file)


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
        ("a.csv", HEAD + "clip0,0,a dog\nclip1,first,a cat\n", "row 3, column segment: 'first' is not a whole"),
        ("a.csv", HEAD + ",0,a dog\n", "row 2, column video_id: there is no value"),
        ("a.csv", HEAD + "clip0,0,\udcff\n", "not UTF-8 text"),
        ("a.jsonl", '{"video_id": "clip0", "segment": 0, "caption": "a"}\n{"video_id"\n', "line 2: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: expected dict, found list"),
        ("a.jsonl", '{"video_id": "clip0", "segment": 0.5, "caption": "a"}\n', "line 1, column segment: 0.5"),
    ],
)
def test_errors_in_captions_name_the_file_row_and_column(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        read_captions(path)
    assert str(error.value).startswith(f"{path}: ")
