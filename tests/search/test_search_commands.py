"""`tvr index` and `tvr search` on the command line: output, captions, strange file names, refused options."""

import csv
import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from search_parts import client_of, find, find_file, write_clip

from tvr_lightning.cli import main
from tvr_lightning.data.recover_captions import Description, write_captions
from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.indexing import index
from tvr_lightning.search.results import clock, printable
from tvr_lightning.search.segments import Segments

DEMO = Path(__file__).parents[2] / "benchmarks" / "demo_search.py"
NOT_UTF8, CONTROL = os.fsdecode(b"caf\xe9/caf\xe9.mp4"), "b\x1b[31m\x9b1m[red].mp4"


def test_results_are_printed_as_text_and_as_json(indexed, gallery, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(gallery.parent)

    def search(*words):
        assert main(["search", *map(str, words), "--index", str(indexed), "--device", "cpu"]) == 0
        return capsys.readouterr().out

    answer = json.loads(search("a", "red", "square", "--top", "2", "--rerank", "clip4clip", "--json"))
    assert (answer["query"], answer["rerank"], len(answer["results"])) == ("a red square", "clip4clip", 2)
    assert {Path(result["path"]).parents[-1] for result in answer["results"]} == {Path("/")}
    printed = search("a red square", "--top", "2")
    assert "best at 0:0" in printed
    assert re.search(r"^  1\. -?\d\.\d{4}  \S+$", printed, re.M), "one number"
    assert not re.search("cosine|candidate|relevance", printed)
    assert f"  {gallery.name}/" in printed, "relative to the working folder"
    Image.new("RGB", (90, 60), "red").save(tmp_path / "red.png")
    assert json.loads(search("--video", gallery / "clip1.mp4", "--json"))["query"] == "clip1.mp4"
    both = search("a red square", "--image", tmp_path / "red.png", "--json")
    assert json.loads(both)["query"] == "a red square, red.png"
    assert [clock(seconds) for seconds in (0.04, 59.96, 3723.4)] == ["0:00.0", "1:00.0", "1:02:03.4"]


def test_every_real_clip_is_indexed_and_finds_itself(test_data, tmp_path, ckpt, capsys):
    """A clip of every container (the WebM file is long enough to be cut), and their captions as the bank of queries."""
    clips, folder, out, bank = test_data / "clips", tmp_path / "clips", tmp_path / "index", tmp_path / "bank.txt"
    folder.mkdir()
    for suffix in (".mp4", ".avi", ".mkv", ".webm"):
        shutil.copy(min((clips / "videos").glob(f"*{suffix}"), key=lambda path: path.stat().st_size), folder)
    with (clips / "captions.csv").open(encoding="utf-8", newline="") as file:
        bank.write_text("\n".join(row["caption1"] for row in csv.DictReader(file)), encoding="utf-8")
    assert main(["index", str(folder), "--out", str(out), "--bank", str(bank), *ckpt]) == 0
    with Searcher(out) as searcher:
        rows = searcher.table.videos()
        assert {row.path.name for row in rows} == {path.name for path in folder.iterdir()}
        assert searcher.table.skipped() == []
        spans = {row.id: searcher.table.spans(row.id) for row in rows}
        assert set(searcher.table.keys()) == {span.key for found in spans.values() for span in found}
        assert all(len(spans[row.id]) == 1 for row in rows if row.duration <= 20)
        for row in rows:
            features, times = searcher.table.features([spans[row.id][0].key], "clip4clip")[spans[row.id][0].key]
            assert features.frame_mask.any()
            assert 0 <= float(times.max()) < row.duration
            assert searcher.table.thumbnail(row.id, 0.0)[:3] == b"\xff\xd8\xff"
            best = find_file(searcher, row.path, top=3).results[0]
            assert best.path == str(row.path)
            assert best.score == pytest.approx(1.0, abs=1e-4)
    capsys.readouterr()
    assert main(["index", str(folder), "--out", str(out)]) == 0
    assert "0 videos added, 4 kept, 0 removed; 4 in the index" in capsys.readouterr().out


ROWS = [
    Description("below/clip6.mp4", 1, 1.0, 2.0, "Then it jumps."),
    Description("below/clip6.mp4", 0, 0.0, 1.0, "A Dog runs over grass"),
    Description("clip0", 0, 0.0, 3.0, "a dogged rider"),
    Description("elsewhere", 0, 0.0, 3.0, "a dog"),
]
"""Captions of a video named by its path, of one named without suffix, and of a missing one."""


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


NEW = "index {gallery} --out {out}"
OLD = "index --out {indexed}"
TEXT_ONLY = "rerank, normalize, and min_relevance apply only to text queries"
CLIP = "search --video {gallery}/clip1.mp4 --index {indexed}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            NEW + " {ckpt} --frames 9 --architecture x --weights none",
            "--weights, --architecture, --frames cannot be combined with --ckpt_path",
        ),
        (NEW + " {ckpt} --segments none --segment_length 30", "none does not cut videos"),
        (NEW + " --weights nowhere.pt", "--ckpt_path FILE"),
        (NEW + " --weights openia", "openia"),
        (NEW + " --weights none --architecture ViT-nothing", "ViT-nothing"),
        (NEW, "--ckpt_path FILE"),
        ("index {broken} --out {out} {ckpt}", "no video could be read: {broken}/fake.mp4"),
        ("index --out {out} {ckpt}", "No videos are given"),
        (OLD + " --frames 4 --sampling head", "--frames, --sampling cannot be used, since {indexed} records the"),
        ("search --index {indexed}", "No query is given"),
        (CLIP + " --rerank gare", TEXT_ONLY),
        (CLIP + " --normalize sinkhorn", TEXT_ONLY),
        (CLIP + " --min_relevance 0.5", TEXT_ONLY),
        (CLIP + " --image {gallery}/clip1.mp4", "either --video or --image"),
    ],
)
def test_bad_commands_leave_nothing(tmp_path, indexed, gallery, ckpt, user_state, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    names = {name: tmp_path / name for name in ("new", "old", "broken")}
    names |= {"indexed": indexed, "gallery": gallery, "ckpt": " ".join(ckpt)}
    for name in ("broken", "old"):
        names[name].mkdir()
    (names["broken"] / "fake.mp4").write_text("<html>I am an mp4</html>")
    remembered = list(user_state.rglob("*.json"))
    for out in ("new", "old") if "{out}" in words else ("new",):
        assert main(words.format_map(names | {"out": names[out]}).split()) == 2
        printed = capsys.readouterr()
        (line,) = (each for each in printed.err.splitlines() if "weights are RANDOM" not in each)
        assert message.format_map(names) in line
        assert not any(other in line for other in ("recipes/", "tvr fit", "encoder.weights"))
        assert "tvr search" not in printed.out
    assert not names["new"].exists()
    assert list(names["old"].iterdir()) == []
    assert list(user_state.rglob("*.json")) == remembered


def test_strange_names_are_found_served_and_printed_without_control_characters(tmp_path, sources, gallery, capsys):
    videos, out = tmp_path / "videos", tmp_path / "index"
    (videos / NOT_UTF8).parent.mkdir(parents=True)
    shutil.copy(gallery / "clip1.mp4", videos / NOT_UTF8)
    write_clip(videos / CONTROL, 2, frames=24)
    assert index([videos], out, sources[1:], progress=True, segments=Segments("windows", 3.0)).total == 2
    assert index([], out, progress=False).kept == 2
    capsys.readouterr()
    assert main(["search", "a", "--index", str(out)]) == 0
    text = capsys.readouterr().out
    assert "caf\\udce9/caf\\udce9.mp4" in text
    assert "b\\x1b[31m\\x9b1m[red].mp4" in text
    assert main(["search", "a", "--index", str(out), "--json"]) == 0
    printed = capsys.readouterr().out
    assert {Path(result["path"]).name for result in json.loads(printed)["results"]} == {Path(NOT_UTF8).name, CONTROL}
    assert not {"\x1b", "\x9b", "\udce9"} & {*text, *printed}
    assert printable("a\x1b[0m\r\nb\x7f\u3000é👩\u200d🚀") == "a\\x1b[0m\\r\\nb\\x7f\u3000é👩\u200d🚀"
    with Searcher(out) as searcher:
        assert {Path(result.path).name for result in find(searcher, "a").results} == {Path(NOT_UTF8).name, CONTROL}
        client = client_of(searcher)
        found = client.get("/api/search", params={"query": "a"}).json()["results"]
        assert {result["path"] for result in found} == {"caf\\udce9/caf\\udce9.mp4", printable(CONTROL)}
        assert {each["folder"] for each in client.get("/api/index").json()["folders"]} == {".", "caf\\udce9"}
        assert client.get("/api/videos").json()["count"] == 2
        for result in found:
            for address in ("file", "image", "about"):
                assert client.get(f"/api/videos/{result['id']}/{address}").status_code == 200
            similar = client.get("/api/search", params={"like": result["id"]}).json()
            assert similar["query"] == result["path"].rpartition("/")[2]


@pytest.mark.slow
def test_the_demo_search_finds_the_video_of_its_first_example(finished_run, msrvtt, tmp_path, monkeypatch, capsys):
    """The last step of `make demo`."""
    run = shutil.copytree(finished_run, tmp_path / "runs" / "clip4clip-msrvtt" / "version_0")

    def demo():
        folders = [DEMO, "--runs", tmp_path / "runs", "--videos", msrvtt / "msrvtt", "--out", tmp_path / "index"]
        monkeypatch.setattr(sys, "argv", [*map(str, folders)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(DEMO), run_name="__main__")
        return ended.value.code, capsys.readouterr().out

    status, printed = demo()
    assert status == 0
    ranks = pd.read_parquet(run / "ranks.parquet")
    first = ranks[(ranks.direction == "text-to-video") & (ranks["rank"] == 1)]
    assert re.findall(r'^tvr search "(.*)"$', printed, re.MULTILINE) == first["query"][:3].tolist()
    answers = re.findall(r"^  1\. .*/(\w+)\.mp4$", printed, re.MULTILINE)
    assert answers == first["video"][:3].tolist()
    assert f"The video of this caption is {answers[0]}: rank 1\n" in printed
    wrong = ranks.assign(rank=1)
    wrong["video"] = wrong["video"].iloc[::-1].to_numpy()
    wrong.to_parquet(run / "ranks.parquet")
    assert demo()[0] == 1, "a wrong example is an error"
