"""Runs that start at the same time have different folders and keep them while they are alive."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import forked
import torch
from small_run import small_run

from tvr_lightning.cli import main
from tvr_lightning.runs.folder import create_run

SECONDS = 300


def fit(root, runs, seed, *more):
    short = (
        "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=5", "--model.init_args.evaluation.audit=0",
        f"--seed_everything={seed}",
    )  # fmt: skip
    return ["fit", *small_run(root, runs, *short, *more, recipe="xpool")]


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_folders_created_at_the_same_moment_differ(tmp_path):
    together = threading.Barrier(16)

    def create(number):
        together.wait()
        return create_run(tmp_path / "runs")

    with ThreadPoolExecutor(16) as pool:
        folders = sorted(pool.map(create, range(16)), key=lambda folder: int(folder.name.removeprefix("version_")))
    assert folders == [tmp_path / "runs" / f"version_{number}" for number in range(16)]


def test_resuming_refuses_a_run_that_is_alive(msrvtt, tmp_path, ended, capsys):
    words = fit(msrvtt, tmp_path / "runs", 1, "--trainer.max_epochs=3")
    run = tmp_path / "runs" / "xpool-msrvtt" / "version_0"
    last = run / "checkpoints" / "last.ckpt"
    process = ended(forked.started(words, tmp_path))
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
