"""Progress of long-running work, with and without a terminal."""

import json
import re
import time

from tvr_lightning import progress
from tvr_lightning.progress import clock, progress_bar, progress_file, shown


def test_without_a_terminal_a_bar_prints_lines_at_intervals(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.05)
    with progress_bar() as bar:
        task = bar.add_task("videos", total=100)
        for _ in range(4):
            time.sleep(0.04)
            bar.advance(task, 10)
        time.sleep(0.1)
        before = capsys.readouterr().out
        bar.advance(task, 60)
    assert re.search(r"^videos: 40/100, [\d.e+]+/s, 0:00:0\d left$", before, re.MULTILINE)
    assert "100/100" in capsys.readouterr().out
    time.sleep(0.1)
    assert not capsys.readouterr().out


def test_items_that_finish_together_count_from_the_start_of_the_work(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "SECONDS", 0.1)
    with progress_bar() as bar, progress_file(tmp_path / "progress.json", seconds=0.1) as other:
        tasks = [(each, each.add_task("videos", total=800)) for each in (bar, other)]
        time.sleep(0.5)
        for each, task in tasks:
            each.advance(task, 4)
            each.advance(task, 4)
        time.sleep(0.25)
        left = json.loads((tmp_path / "progress.json").read_text())["left"]
    speeds = [float(speed) for speed in re.findall(r"videos: 8/800, ([\d.]+)/s", capsys.readouterr().out)]
    assert 0 < max(speeds) <= 16
    assert left >= 49


def test_items_of_an_earlier_call_do_not_count_for_the_speed(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.1)
    with progress_bar() as bar:
        task = bar.add_task("videos", total=1000, completed=900)
        bar.add_task("a video of unknown length", total=0)
        time.sleep(0.15)
        shown_first = capsys.readouterr().out
        assert "videos: 900/1000\n" in shown_first
        assert "0/0" not in shown_first
        bar.advance(task, 1)
        time.sleep(0.15)
        bar.advance(task, 1)
        time.sleep(0.3)
    speed, *_ = re.findall(r"videos: 902/1000, ([\d.]+)/s", capsys.readouterr().out)
    assert float(speed) <= 10


def test_silent_work_is_reported_on_stderr_at_intervals(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.05)
    seen = iter(range(1000))
    with shown("loading"):
        time.sleep(0.12)
    with shown(lambda: f"run {next(seen)}"):
        time.sleep(0.12)
    printed = capsys.readouterr()
    assert not printed.out
    lines = {"loading, 0:00:00 so far", "run 0, 0:00:00 so far", "run 1, 0:00:00 so far"}
    assert lines <= set(printed.err.splitlines())


def test_another_process_reads_the_progress_of_tasks_from_a_file(tmp_path):
    file = tmp_path / "progress.json"
    with progress_file(file, tasks=2, seconds=0.01) as bar:
        texts = bar.add_task("texts", total=4)
        bar.advance(texts, 4)
        time.sleep(0.1)
        assert json.loads(file.read_text()) == {"doing": "texts, 4 of 4", "left": None}
        videos = bar.add_task("videos", total=10, completed=4)
        time.sleep(0.02)
        bar.advance(videos, 1)
        time.sleep(0.02)
        bar.advance(videos, 2)
        time.sleep(0.1)
        found = json.loads(file.read_text())
        bar.advance(videos, 3)
    assert found["doing"] == "videos, 7 of 10"
    assert found["left"] >= 0.02
    assert json.loads(file.read_text()) == {"doing": "videos, 10 of 10", "left": 0.0}


def test_durations_are_shown_as_hours_minutes_and_seconds():
    assert [clock(seconds) for seconds in (0.4, 61, 3600 * 25 + 62)] == ["0:00:00", "0:01:01", "25:01:02"]
