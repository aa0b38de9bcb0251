"""Commands that show data: problems, warnings, notes and statistics of a dataset, and the page of a video."""

import io
import json
from collections import Counter
from contextlib import redirect_stdout

import numpy as np
import pytest
from broken_videos import cut_off, scramble, stop_clock, write_video
from PIL import Image
from sound_files import burst, tone, write_clip

from tvr_lightning.cli import main
from tvr_lightning.data import MSRVTT, Charades, VideoFolder
from tvr_lightning.data.check import check, print_report, write_report
from tvr_lightning.data.preview import preview
from tvr_lightning.data.stats import print_stats, stats
from tvr_lightning.encoders.tokenizer import ClipTokenizer


def rendered(show, *arguments) -> str:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", "200")
        show(*arguments)
    return out.getvalue()


def test_the_exit_status_shows_problems_but_not_warnings(own_data, capsys):
    train = MSRVTT(root=str(own_data)).read_split("train").videos
    write_video(train[0].path, 40)
    command = ["data", "check", "--config=data/msrvtt", f"--data.init_args.root={own_data}", "--num_workers=1"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "No problems found. 1 warning: 1 silent." in shown
    assert shown.count("no audio track") == 1
    train[1].path.unlink()
    assert main(command) == 1
    assert "1 problem: 1 missing-file. 1 warning: 1 silent." in capsys.readouterr().out


def test_every_kind_of_problem_is_reported(own_data):
    data = MSRVTT(root=str(own_data))
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
    data = MSRVTT(root=str(own_data))
    report = check(data, workers=2, progress=False)
    assert report == check(data, workers=1, progress=False)
    assert Counter(problem.kind for problem in report.problems) == {
        "missing-file": 2,  # removed, and listed but never there
        "empty-file": 1,
        "undecodable": 2,  # not a video, and cut off
        "too-short": 1,
        "untimed": 1,
        "duplicate-id": 1,
        "video-without-caption": 1,
        "split-overlap": 1,
    }
    assert Counter(problem.kind for problem in report.warnings) == {"silent": 2}
    found = [*report.problems, *report.warnings]
    assert all(problem.file and problem.entry and problem.message and problem.fix for problem in found)
    text = rendered(print_report, report)
    assert "10 problems" in text
    assert "2 warnings: 2 silent" in text
    assert text.count("no audio track") == 1, "one line for both"


def test_a_report_can_contain_names_that_are_not_utf8(tmp_path):
    write_video(tmp_path / "videos" / "a.mp4", 20)
    rows = [{"video": "a.mp4", "caption": "a dog"}, {"video": "caf\udce9.mp4", "caption": "a cat"}]
    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    file = tmp_path / "reports" / "report.json"
    write_report(check(VideoFolder(root=str(tmp_path)), progress=False), file)
    (found,) = json.loads(file.read_text(encoding="utf-8"))["problems"]
    assert set(found) == {"file", "entry", "kind", "message", "fix"}
    assert (found["kind"], found["entry"]) == ("missing-file", "caf\udce9.mp4")


def test_a_damaged_video_or_list_is_found(own_data):
    data = MSRVTT(root=str(own_data))
    report = check(data, decode=True, progress=False)
    assert report.problems == []
    assert report.videos == {"train": 12, "test": 4}
    assert report.texts == {"train": 240, "test": 4}
    assert "1k-A" in report.protocol
    video = data.read_split("test").videos[0]
    scramble(write_video(video.path, 40, sound=4.0), 0.1, 0.9)
    (data.folder / "MSRVTT_train.9k.csv").unlink()
    report = check(MSRVTT(root=str(own_data)), decode=True, progress=False)
    found = {(problem.kind, problem.entry) for problem in report.problems}
    assert found == {("undecodable", video.path.name), ("missing-file", "MSRVTT_train.9k.csv")}
    assert report.videos == {"test": 4}


def test_quirks_of_annotations_are_notes(tmp_path):
    folder = tmp_path / "charades"
    (folder / "videos").mkdir(parents=True)
    for name in ("train", "test"):
        write_video(folder / "videos" / f"{name}.mp4", 40)
        (folder / f"Charades_v1_{name}.csv").write_text(f"id,script,length\n{name},A person runs.,4.0\n")
        (folder / f"charades_sta_{name}.txt").write_text(f"{name} 3.0 1.0##person runs.\n")
    report = check(Charades(root=str(tmp_path), split="sta"), progress=False)
    assert report.problems == []
    assert [note.kind for note in report.notes] == ["reversed-span"] * 2
    assert "read as 1.0 to 3.0 s" in rendered(print_report, report)


def test_statistics_count_captions_tokens_durations_and_audio(own_data):
    data = MSRVTT(root=str(own_data))
    (data.folder / "MSRVTT_train.9k.csv").write_text("video_id\nvideo0\nvideo3\n")
    write_video(data.folder / "videos" / "video3.mp4", 40)
    (data.folder / "videos" / "video0.mp4").unlink()
    captions = [("video0", "a dog runs"), ("video0", "a dog"), ("video3", "word " * 40)]
    content = json.loads((data.folder / "MSRVTT_data.json").read_text())
    content["sentences"] = [{"video_id": video, "caption": caption} for video, caption in captions]
    (data.folder / "MSRVTT_data.json").write_text(json.dumps(content))
    found = stats(MSRVTT(root=str(own_data)), ClipTokenizer(77).needed)
    train, text = found["train"], rendered(print_stats, found)
    assert (train["videos"], train["captions"], found["test"]["videos"]) == ("2", "3", "4")
    assert train["captions per video"] == "1 to 2, mean 1.5"
    assert train["tokens per caption"].startswith("4 to 42, mean")
    assert train["readable files"] == "1"
    assert train["with audio track"] == "0.0%"
    assert train["duration"] == "4 to 4 s, mean 4.0 s"
    assert "33.33%" in text
    assert "over 32 tokens" in text


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def test_the_page_shows_frames_and_the_waveform(tmp_path):
    clip = write_clip(tmp_path / "clip.mkv", burst(4.0, 2.0, 3.0), seconds=4.0)
    preview(clip, tmp_path / "pages" / "page.png", frames=4)
    page = pixels(tmp_path / "pages" / "page.png")
    height, width, _ = page.shape
    assert (np.abs(page - 128).max(axis=-1) < 6).mean() > 0.05, "the gray frames are on the page"
    wave = page[height // 2 : height * 3 // 4]
    columns = np.flatnonzero((wave.max(axis=-1) < 70).sum(axis=0) > 0.3 * len(wave))
    columns = columns[(columns > 0.1 * width) & (columns < 0.97 * width)]
    assert len(columns) > 0.18 * width, "one of four seconds is loud"
    assert 0.45 * width < columns.min() < columns.max() < 0.82 * width


def test_a_broken_audio_track_is_marked_in_red(tmp_path):
    red = []
    for first_broken in (1000, 11):
        clip = write_clip(tmp_path / "clip.mkv", tone(2.0), codec="aac", spoil=lambda n, f=first_broken: n >= f)
        preview(clip, tmp_path / "page.png", frames=2)
        page = pixels(tmp_path / "page.png")
        red.append(int((page[..., 0] > page[..., 1:].max(axis=-1) + 60).sum()))
    assert red[0] < 20 < red[1]


def test_clips_without_audio_and_with_dollar_signs_in_their_name_have_a_page(tmp_path):
    clip = write_clip(tmp_path / "costs $5 or $x_{2.mkv", None)
    preview(clip, tmp_path / "mute.svg", frames=2)
    assert "<!-- no audio track -->" in (tmp_path / "mute.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "message"), [("page.png", "letter.mp4"), ("page.xyz", "page.xyz must end in .png, .pdf, or .svg")]
)
def test_other_files_and_suffixes_are_refused(tmp_path, capsys, name, message):
    (tmp_path / "letter.mp4").write_text("not a video")
    assert main(["data", "show", str(tmp_path / "letter.mp4"), "--out", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / name).exists()
