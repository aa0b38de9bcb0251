import io
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from broken_videos import cut_off, scramble, stop_clock, write_video
from rich.console import Console

from tvr_lightning.cli import main
from tvr_lightning.data import MSRVTT, Charades, VideoFolder
from tvr_lightning.data.check import check, print_report, write_report
from tvr_lightning.data.stats import print_stats, stats
from tvr_lightning.encoders.tokenizer import ClipTokenizer

QUIET = {"progress": False}


@pytest.fixture
def healthy(msrvtt: Path, tmp_path: Path) -> Path:
    shutil.copytree(msrvtt / "msrvtt", tmp_path / "msrvtt")
    return tmp_path


@pytest.fixture
def ill(healthy: Path) -> Path:
    """One training video of every illness, and annotations that contradict themselves."""
    data = MSRVTT(root=str(healthy))
    paths = [video.path for video in data.read_split("train").videos]
    paths[0].unlink()
    paths[1].write_bytes(b"")
    paths[2].write_text("not a video")
    write_video(paths[3], 20)
    write_video(paths[4], 2)
    cut_off(paths[5], 0.5)
    stop_clock(write_video(paths[7], 20, sound=2.0, options={"bf": "0"}))
    with (data.folder / "MSRVTT_train.9k.csv").open("a") as file:
        file.write(f"{paths[6].stem}\n{data.read_split('test').videos[0].video_id}\nvideo_nobody\n")
    return healthy


def rendered(show, *arguments) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(*arguments, console)
    return console.file.getvalue()


def test_videos_without_sound_are_warned_of_and_the_exit_status_is_that_of_health(healthy, capsys):
    overlay = Path(__file__).parents[2] / "recipes" / "data" / "msrvtt.yaml"
    recipe = healthy / "here.yaml"
    recipe.write_text(f"data: {{init_args: {{root: {healthy}}}}}\n")
    write_video(MSRVTT(root=str(healthy)).read_split("train").videos[0].path, 40)
    command = ["data", "check", f"--config={overlay}", f"--config={recipe}", "--num_workers=1"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "No problems found. 1 warning: 1 silent." in said
    assert said.count("no audio track") == 1
    MSRVTT(root=str(healthy)).read_split("train").videos[1].path.unlink()
    assert main(command) == 1
    assert "1 problem: 1 missing-file. 1 warning: 1 silent." in capsys.readouterr().out


def test_names_that_are_not_utf8_are_reported(healthy, tmp_path):
    shutil.copytree(healthy / "msrvtt" / "videos", tmp_path / "own" / "videos")
    rows = [{"video": path.name, "caption": "a dog"} for path in (tmp_path / "own" / "videos").glob("*.mp4")]
    rows.append({"video": "caf\udce9.mp4", "caption": "a cat"})
    table = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "own" / "captions.jsonl").write_text(table, encoding="utf-8")
    report = check(VideoFolder(root=str(tmp_path / "own")), **QUIET)
    write_report(report, tmp_path / "report.json")
    (found,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["problems"]
    assert (found["kind"], found["entry"]) == ("missing-file", "caf\udce9.mp4")


def test_every_illness_is_found_in_one_report(ill, tmp_path):
    data = MSRVTT(root=str(ill))
    report = check(data, workers=2, **QUIET)
    assert report == check(data, workers=1, **QUIET)
    assert Counter(problem.kind for problem in report.problems) == {
        "missing-file": 2,  # removed, and listed but never there
        "empty-file": 1,
        "undecodable": 2,  # no video, and cut off
        "too-short": 1,
        "untimed": 1,
        "duplicate-id": 1,
        "video-without-caption": 1,
        "split-overlap": 1,
    }
    assert Counter(problem.kind for problem in report.warnings) == {"silent": 2}
    found = [*report.problems, *report.warnings]
    assert all(problem.file and problem.entry and problem.message and problem.fix for problem in found)
    write_report(report, tmp_path / "reports" / "report.json")
    written = json.loads((tmp_path / "reports" / "report.json").read_text())
    assert len(written["problems"]) == len(report.problems)
    assert set(written["problems"][0]) == {"file", "entry", "kind", "message", "fix"}
    text = rendered(print_report, report)
    assert "10 problems" in text
    assert "2 warnings: 2 silent" in text
    assert text.count("no audio track") == 1, "one line for both"
    assert "split-overlap" in text


def test_a_healthy_dataset_has_no_problems_until_a_video_or_a_list_is_damaged(healthy):
    data = MSRVTT(root=str(healthy))
    report = check(data, decode=True, **QUIET)
    assert report.problems == []
    assert report.videos == {"train": 12, "test": 4}
    assert report.texts == {"train": 240, "test": 4}
    assert "1k-A" in report.protocol
    assert "No problems found" in rendered(print_report, report)
    video = data.read_split("test").videos[0]
    scramble(write_video(video.path, 40, sound=4.0), 0.1, 0.9)
    (problem,) = check(data, decode=True, **QUIET).problems
    assert (problem.kind, problem.entry) == ("undecodable", video.path.name)
    (data.folder / "MSRVTT_train.9k.csv").unlink()
    report = check(MSRVTT(root=str(healthy)), **QUIET)
    assert ("missing-file", "MSRVTT_train.9k.csv") in [(problem.kind, problem.entry) for problem in report.problems]
    assert report.videos == {"test": 4}


def test_quirks_are_notes_and_no_problems(tmp_path):
    folder = tmp_path / "charades"
    (folder / "videos").mkdir(parents=True)
    for name in ("train", "test"):
        clip = f"{name.upper()}1"
        write_video(folder / "videos" / f"{clip}.mp4", 40)
        (folder / f"Charades_v1_{name}.csv").write_text(f"id,script,length\n{clip},A person runs.,4.0\n")
        (folder / f"charades_sta_{name}.txt").write_text(f"{clip} 3.0 1.0##person runs.\n")
    report = check(Charades(root=str(tmp_path), split="sta"), decode=True, **QUIET)
    assert report.problems == []
    assert {problem.kind for problem in report.warnings} == {"silent"}
    assert [note.kind for note in report.notes] == ["reversed-span"] * 2
    assert "read as 1.0 to 3.0 s" in rendered(print_report, report)


def test_stats_count_captions_tokens_durations_and_sound(healthy):
    data = MSRVTT(root=str(healthy))
    (data.folder / "MSRVTT_train.9k.csv").write_text("video_id\nvideo0\nvideo3\n")
    write_video(data.folder / "videos" / "video3.mp4", 40)
    (data.folder / "videos" / "video0.mp4").unlink()
    source = data.folder / "MSRVTT_data.json"
    content = json.loads(source.read_text())
    content["sentences"] = [s for s in content["sentences"] if s["video_id"] not in ("video0", "video3")]
    content["sentences"] += [
        {"video_id": "video0", "caption": "a dog runs"},
        {"video_id": "video0", "caption": "a dog"},
        {"video_id": "video3", "caption": "word " * 40},
    ]
    source.write_text(json.dumps(content))
    found = stats(MSRVTT(root=str(healthy)), ClipTokenizer(77).needed)
    train = found["train"]
    assert (train["videos"], train["captions"], found["test"]["videos"]) == ("2", "3", "4")
    assert train["captions per video"] == "1 to 2, mean 1.5"
    assert train["tokens per caption"].startswith("4 to 42, mean")
    assert train["readable files"] == "1"
    assert train["with audio track"] == "0.0%"
    assert train["duration"] == "4 to 4 s, mean 4.0 s"
    text = rendered(print_stats, found)
    assert "33.33%" in text
    assert "over 32 tokens" in text


def test_the_real_videos_that_are_not_there_are_listed(test_data):
    report = check(MSRVTT(root=str(test_data / "annotations")), decode=True, **QUIET)
    kinds = Counter(problem.kind for problem in report.problems)
    assert kinds == {"missing-file": 9985}
    assert [warning.kind for warning in report.warnings] == ["silent"] * 3
    assert report.videos == {"train": 9000, "test": 1000}
