"""Progress of long-running work, with and without a terminal, and the remaining time of an entire run."""

import json
import re
import time
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback

from tvr_lightning import progress
from tvr_lightning.progress import clock, progress_bar, progress_file, shown
from tvr_lightning.runs.progress_report import ProgressReport, RunProgressBar, print_progress
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.testing.small import small

RECIPE = Path(__file__).parents[1] / "recipes" / "clip4clip.yaml"


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


def test_the_bar_shows_the_remaining_time_of_the_whole_run():
    method, data = small(RECIPE)
    bar, metrics, descriptions, seconds = RunProgressBar(), [], [], []

    def note(trainer, module, *batch):
        metrics.append(bar.get_metrics(trainer, module))
        descriptions.append(bar._get_train_description(trainer.current_epoch).strip())
        seconds.append(bar._left.seconds(trainer))

    trainer = Trainer(
        accelerator="cpu", max_epochs=2, limit_train_batches=2, limit_val_batches=0, logger=False,
        callbacks=[bar, LambdaCallback(on_train_batch_end=note)], enable_checkpointing=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(method, datamodule=data)
    assert descriptions == ["Epoch 1/2"] * 2 + ["Epoch 2/2"] * 2
    assert seconds[0] is None, "one step is not enough to estimate the time of a step"
    assert "run left" not in metrics[0]
    assert all(left > 0 for left in seconds[1:-1])
    assert seconds[-1] == 0
    assert metrics[-1]["run left"] == "0:00:00"
    assert "v_num" not in metrics[-1]


def test_without_a_terminal_lines_report_progress_at_intervals(capsys):
    method, data = small(RECIPE)
    options = {"max_epochs": 1, "limit_train_batches": 3, "check_val_every_n_epoch": 1}
    trainer = quiet_trainer(**options, limit_val_batches=1, callbacks=[ProgressReport(print_progress, 0.0)])
    trainer.fit(method, datamodule=data)
    trainer.test(method, datamodule=data, verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert "Epoch 1/1, step 1 of 3" in lines
    assert any(re.fullmatch(r"Epoch 1/1, step 2 of 3, 0:00:\d\d left of the run", line) for line in lines)
    assert any(line.startswith("validate, batch 1 of 1") for line in lines)
    assert "test, batch 1 of 1" in lines
    rare = quiet_trainer(**options, limit_val_batches=0, callbacks=[ProgressReport(print_progress, 60.0)])
    rare.fit(method, datamodule=data)
    assert [line for line in capsys.readouterr().out.splitlines() if "step" in line] == ["Epoch 1/1, step 1 of 3"]
