"""Runs that start at the same time have different folders and keep them while they are alive."""

import itertools
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import forked
import pytest
import torch
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.runs.folder import create_run

SECONDS = 300


def fit(root, runs, seed, *more):
    short = ("--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=5", f"--seed_everything={seed}")
    return ["fit", *small_run(root, runs, *short, *more, recipe="xpool")]


def table(run):
    """Return the seed and the measured values in `results.json`."""
    results = json.loads((run / "results.json").read_text())
    return {key: results[key] for key in ("seed", "text_to_video", "video_to_text", "sum_of_recalls", "skipped")}


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path, ended):
    """Start commands, numbered from 0, which end after the test."""
    numbers = itertools.count()

    def started(words):
        folder = tmp_path / f"process-{next(numbers)}"
        folder.mkdir()
        return ended(forked.started(words, folder))

    return started


@pytest.fixture(scope="module")
def tables(msrvtt, tmp_path_factory):
    """Tables of two consecutive runs, by their seeds."""
    runs = tmp_path_factory.mktemp("expected")
    for seed in (1, 3):
        assert main(fit(msrvtt, runs / str(seed), seed)) == 0
    found = {seed: table(runs / str(seed) / "xpool-msrvtt" / "version_0") for seed in (1, 3)}
    values = [{name: value for name, value in found[seed].items() if name != "seed"} for seed in found]
    assert values[0] != values[1], "the tables must differ"
    return found


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_two_runs_paused_while_they_start_have_two_folders_and_two_tables(first, msrvtt, tmp_path, start, tables):
    """Both are paused when they have named their folders, and either may continue first."""
    runs = tmp_path / "runs"
    processes = []
    for number, seed in enumerate(tables):
        process, output = start(fit(msrvtt, runs, seed)), tmp_path / f"process-{number}" / "out-0.txt"
        until(lambda p=process, o=output: (o.is_file() and "writes to" in o.read_text()) or not p.is_alive())
        os.kill(process.pid, signal.SIGSTOP)
        processes.append(process)
    for process in (processes[first], processes[1 - first]):
        os.kill(process.pid, signal.SIGCONT)
        process.join(SECONDS)
        assert process.exitcode == 0
    folders = sorted((runs / "xpool-msrvtt").iterdir())
    assert [folder.name for folder in folders] == ["version_0", "version_1"]
    assert sorted((table(folder) for folder in folders), key=lambda found: found["seed"]) == list(tables.values())


def test_folders_created_at_the_same_moment_differ(tmp_path):
    together = threading.Barrier(16)

    def create(number):
        together.wait()
        return create_run(tmp_path / "runs")

    with ThreadPoolExecutor(16) as pool:
        folders = sorted(pool.map(create, range(16)), key=lambda folder: int(folder.name.removeprefix("version_")))
    assert folders == [tmp_path / "runs" / f"version_{number}" for number in range(16)]


def test_resuming_refuses_a_run_that_is_alive(msrvtt, tmp_path, start, capsys):
    words = fit(msrvtt, tmp_path / "runs", 1, "--trainer.max_epochs=3")
    run = tmp_path / "runs" / "xpool-msrvtt" / "version_0"
    last = run / "checkpoints" / "last.ckpt"
    process = start(words)
    until(lambda: last.is_file() or not process.is_alive())
    os.kill(process.pid, signal.SIGSTOP)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main([*words, "--checkpoints.resume=true"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert str(run) in error
    assert "Another process is writing the run" in error
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    process.kill()
    process.join()
    assert main([*words, "--checkpoints.resume=true"]) == 0
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    assert torch.load(last, weights_only=True)["epoch"] == 2
